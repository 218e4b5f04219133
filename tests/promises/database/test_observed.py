"""``expiry="observed"``: a wrong clock never gives a key to a second holder."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import override_settings

from dlocks import LockLost, LockStale, LockTimeout, db_lock, db_rwlock
from tests import jobs
from tests.promises.commands.running import run
from tests.settings import DLOCKS, PESSIMISTIC
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True)

TTL, GRACE = 2.0, 0.2
# Each strategy, and a caller that does not queue.
POLICIES = [
    ("watching", True),
    ("watching optimistic", False),
    ("watching insert", True),
]


def watched(key="stock:7", using="watching", **policy):
    return db_lock(key, using=using, **policy)


def ran_out(*keys, table="dlocks_resourcelock"):
    """Expire leases by the database's clock, as a step of that clock would.

    Without keys, all leases expire.
    """
    end = {
        "postgresql": "end_time - interval '1 hour'",
        "mysql": "end_time - INTERVAL 1 HOUR",
        "sqlite": "strftime('%%Y-%%m-%%d %%H:%%M:%%f', end_time, '-1 hour') || '000'",
    }[connection.vendor]
    where = f"WHERE key_resource IN ({', '.join(['%s'] * len(keys))})" if keys else ""
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {table} SET end_time = {end} {where}", keys)


def test_a_dead_holders_key_is_taken_over_after_ttl_and_grace(doomed, threads, until):
    """An observer counts from when it first saw the row of a dead process.

    So does a writer that waits for a reader. A single attempt cannot observe. It finds
    the key busy until its process has observed the row for long enough. With
    ``takeover=False``, an observer gets ``LockStale``, and a reader an error at its
    timeout at the latest.
    """
    victim = doomed()
    tokens = {
        (using, fair): victim.call(jobs.acquire, f"{using} {fair}", using=using)
        for using, fair in POLICIES
    }
    for key in "once", "cautious", "cautious reader":
        victim.call(jobs.acquire, key, using="watching")
    victim.call(jobs.acquire, "read", using="watching", shared=True)
    victim.kill()
    ran_out("once")
    began = time.monotonic()

    def take_over(using, fair):
        key = f"{using} {fair}"
        with watched(key, using=using, fair=fair, timeout=20) as hold:
            assert time.monotonic() - began >= TTL + GRACE, key
            assert hold.token > tokens[using, fair], key
            in_time(hold.waited, TTL + GRACE + 1.5)

    def write():
        with db_rwlock("read", using="watching", timeout=20).write():
            assert time.monotonic() - began >= TTL + GRACE

    def wait_cautiously():
        with pytest.raises(LockStale):
            watched("cautious", takeover=False, timeout=20).acquire()

    def read_cautiously():
        timeout = TTL + GRACE + 0.5
        lock = db_rwlock(
            "cautious reader", using="watching", takeover=False, timeout=timeout
        )
        started = time.monotonic()
        with pytest.raises((LockStale, LockTimeout)):
            lock.read().acquire()
        in_time(time.monotonic() - started, timeout + 3.0)

    # While others write to SQLite, an attempt does not even see the row.
    assert watched("once").try_acquire() is None
    crowd = [threads(partial(take_over, *policy)) for policy in POLICIES]
    crowd += [threads(one) for one in (write, wait_cautiously, read_cautiously)]
    time.sleep(TTL + GRACE)
    with until(watched("once").try_acquire) as hold:
        assert hold.takeover
    for thread in crowd:
        thread.join(60)


@pytest.mark.driver
def test_a_holder_expired_by_the_clock_still_excludes(doomed, threads):
    """Its process stops for half of its ttl, so no renewal corrects the ends soon."""
    holder = doomed()
    for using, _ in POLICIES:
        assert holder.call(jobs.acquire, using, using=using)
    assert holder.call(jobs.acquire, "read", using="watching", shared=True)
    holder.stop()
    ran_out()
    ran_out(table="dlocks_lockclaim")

    def wait(lock):
        with pytest.raises(LockTimeout):
            lock.acquire()

    # This is longer than a dead holder would keep its key.
    timeout = 1.5 * TTL
    locks = [
        watched(using, using=using, fair=fair, timeout=timeout)
        for using, fair in POLICIES
    ]
    locks.append(db_rwlock("read", using="watching", timeout=timeout).write())
    # By this process's clock, the holder may still be alive.
    locks.append(watched("watching", timeout=0.4 * TTL, takeover=False))
    crowd = [threads(partial(wait, lock)) for lock in locks]
    time.sleep(0.5 * TTL)
    holder.resume()
    for thread in crowd:
        thread.join(60)
    assert holder.call(jobs.check) == "held"
    assert holder.call(jobs.release_all) == ["released"] * 4


@pytest.mark.front
def test_a_lease_longer_than_the_observation_is_refused(django_assert_num_queries):
    """The error of a ttl, a handover or a quorum says what to do, without a query.

    An unknown kind of expiry is refused too.
    """

    @contextmanager
    def refused():
        with (
            django_assert_num_queries(0),
            pytest.raises(ValueError, match="Raise OPTIONS"),
        ):
            yield

    with refused():
        watched(ttl=TTL + 0.001).acquire()
    with watched(ttl=TTL / 2):
        pass
    with watched() as hold:
        with refused():
            hold.detach(within=TTL + 0.001)
        assert hold.held
    quorum = {
        "BACKEND": "dlocks.backends.quorum.QuorumBackend",
        "OPTIONS": {"of": ["watching", "memory", "third"]},
    }
    memory = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
    never = {"BACKEND": PESSIMISTIC, "OPTIONS": {"expiry": "never"}}
    settings = {**DLOCKS, "quorum": quorum, "memory": memory, "third": memory}
    with override_settings(DLOCKS={**settings, "never": never}):
        with refused():
            watched(using="quorum", ttl=TTL + 0.001).acquire()
        with pytest.raises(ImproperlyConfigured, match="'clock' or 'observed'"):
            db_lock("stock:7", using="never").locked()


@pytest.mark.engine("postgresql", "mariadb")
def test_a_locked_shared_hold_does_not_block_other_renewals(worker, until):
    lost = []
    kept, mine = (
        db_rwlock(key, using="watching", on_lost=lost.append).read().acquire()
        for key in ("stock:7", "stock:8")
    )
    with worker.doing(jobs.lock_claim, version=kept.token):
        until(lambda: lost == [kept])
        time.sleep(0.5)
        mine.check()
        mine.release()
    with pytest.raises(LockLost):
        kept.release()


def test_commands_end_no_observed_lease_by_the_clock():
    # The ttl is longer here. Otherwise a renewal in between would write an end in the
    # future.
    with override_settings(
        DLOCKS={
            **DLOCKS,
            "watching": {"BACKEND": PESSIMISTIC, "OPTIONS": {"expiry": "observed"}},
        }
    ):
        watching = {"using": "watching"}
        with watched() as hold:
            ran_out()
            call_command("reap_locks", using="watching")
            for flags, message in (
                ([], "by the database's clock, but not observed for long enough"),
                (["--stale-only"], "stock:7"),
            ):
                with pytest.raises(CommandError, match=message):
                    call_command("clear_lock", "stock:7", "--yes", *flags, **watching)
            hold.check()
        with db_rwlock("catalogue", using="watching").read() as hold:
            ran_out(table="dlocks_lockclaim")
            message = "by the database's clock, but not observed for long enough"
            with pytest.raises(CommandError, match=message):
                call_command(
                    "clear_lock", "catalogue", share=hold.token, yes=True, **watching
                )
            hold.check()


def test_a_dry_run_of_the_reaper_counts_no_observed_share_by_the_clock():
    """A run does not end it either."""
    with db_rwlock("catalogue", using="watching", renew=False).read() as hold:
        ran_out(table="dlocks_lockclaim")
        dry = run("reap_locks", "--using", "watching", "--dry-run")
        assert dry == "0 stale locks would be cleared.\n"
        assert run("reap_locks", "--using", "watching") == dry.replace("would be ", "")
        hold.check()
