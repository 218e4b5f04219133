"""``expiry="observed"``: a wrong clock never gives a key to a second holder."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection, connections
from django.test import override_settings

from dlocks import LockLost, LockStale, LockTimeout, db_lock, db_rwlock
from tests import jobs
from tests.internals import LockClaim, ResourceLock, backends
from tests.settings import DLOCKS, PESSIMISTIC
from tests.timing import in_time

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

TTL, GRACE = 2.0, 0.2
KINDS = ["watching", "watching optimistic", "watching insert"]


def watched(key="stock:7", using="watching", **policy):
    return db_lock(key, using=using, **policy)


def ran_out(model=ResourceLock):
    """Expire all leases by the database's clock, as a step of that clock would."""
    with connection.cursor() as cursor:
        table = model._meta.db_table
        if connection.vendor == "postgresql":
            cursor.execute(
                f"UPDATE {table} SET end_time = end_time - interval '1 hour'"
            )
        elif connection.vendor == "mysql":
            cursor.execute(f"UPDATE {table} SET end_time = end_time - INTERVAL 1 HOUR")
        else:
            cursor.execute(
                f"UPDATE {table} SET end_time = strftime('%Y-%m-%d %H:%M:%f', end_time,"
                " '-1 hour') || '000'"
            )


@pytest.mark.parametrize("using", KINDS)
@pytest.mark.parametrize("fair", [True, False])
def test_a_dead_holders_key_is_taken_over_after_ttl_and_grace(using, fair, doomed):
    victim = doomed()
    victim.start(jobs.hold, "stock:7", using=using)
    token = victim.hear()
    victim.kill()
    began = time.monotonic()
    with watched(using=using, fair=fair, timeout=20) as hold:
        assert time.monotonic() - began >= TTL + GRACE
        assert hold.token > token
        in_time(hold.waited, TTL + GRACE + 1.5)


@pytest.mark.parametrize("using", KINDS)
@pytest.mark.parametrize("fair", [True, False])
def test_a_holder_expired_by_the_clock_still_excludes(
    using, fair, in_other_thread, until
):
    with watched(using=using) as hold:
        ran_out()
        with pytest.raises(LockTimeout):
            in_other_thread(watched(using=using, fair=fair, timeout=2 * TTL).acquire)
        hold.check()
        hold.renew()
        hold.check()


def test_an_observing_reader_without_takeover_times_out(
    doomed,
):
    """It raises at its timeout, although it must retry until the key is cleared."""
    victim = doomed()
    victim.start(jobs.hold, "stock:7", using="watching")
    victim.hear()
    victim.kill()
    timeout = TTL + GRACE + 0.5
    began = time.monotonic()
    with pytest.raises((LockStale, LockTimeout)):
        db_rwlock(
            "stock:7", using="watching", takeover=False, timeout=timeout
        ).read().acquire()
    in_time(time.monotonic() - began, timeout + 3.0)


def test_a_single_attempt_cannot_observe_and_finds_the_key_busy(doomed):
    victim = doomed()
    victim.start(jobs.hold, "stock:7", using="watching")
    victim.hear()
    victim.kill()
    ran_out()
    assert watched().try_acquire() is None
    time.sleep(TTL + GRACE)
    # The process has observed the row before, so one attempt is enough.
    with watched(timeout=0) as hold:
        assert hold.takeover


@pytest.mark.front
def test_a_ttl_longer_than_the_observation_is_refused(
    django_assert_num_queries,
):
    with django_assert_num_queries(0), pytest.raises(ValueError, match="Raise OPTIONS"):
        watched(ttl=TTL + 0.001).acquire()
    with watched(ttl=TTL / 2):
        pass


@pytest.mark.front
def test_a_handover_longer_than_the_observation_is_refused(django_assert_num_queries):
    with watched() as hold:
        with (
            django_assert_num_queries(0),
            pytest.raises(ValueError, match="Raise OPTIONS"),
        ):
            hold.detach(within=TTL + 0.001)
        assert hold.held


@pytest.mark.front
def test_a_quorum_refuses_a_ttl_longer_than_the_observation(django_assert_num_queries):
    quorum = {
        "BACKEND": "dlocks.backends.quorum.QuorumBackend",
        "OPTIONS": {"of": ["watching", "memory", "third"]},
    }
    memory = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
    with override_settings(
        DLOCKS={**DLOCKS, "quorum": quorum, "memory": memory, "third": memory}
    ):
        with (
            django_assert_num_queries(0),
            pytest.raises(ValueError, match="Raise OPTIONS"),
        ):
            watched(using="quorum", ttl=TTL + 0.001).acquire()


@pytest.mark.front
def test_an_unknown_expiry_option_is_refused():
    settings = {
        **DLOCKS,
        "default": {"BACKEND": PESSIMISTIC, "OPTIONS": {"expiry": "never"}},
    }
    with (
        override_settings(DLOCKS=settings),
        pytest.raises(ImproperlyConfigured, match="'clock' or 'observed'"),
    ):
        backends["default"]


def test_an_observer_without_takeover_gets_lock_stale(doomed):
    victim = doomed()
    victim.start(jobs.hold, "stock:7", using="watching")
    victim.hear()
    victim.kill()
    with pytest.raises(LockStale):
        watched(takeover=False, timeout=20).acquire()


def test_a_dead_reader_is_replaced_after_ttl_and_grace(doomed):
    victim = doomed()
    victim.start(jobs.read, "stock:7", using="watching")
    victim.hear()
    victim.kill()
    began = time.monotonic()
    with db_rwlock("stock:7", using="watching", timeout=20).write():
        assert time.monotonic() - began >= TTL + GRACE


def test_a_reader_expired_by_the_clock_still_excludes(in_other_thread):
    with db_rwlock("stock:7", using="watching").read() as hold:
        ran_out(LockClaim)
        with pytest.raises(LockTimeout):
            in_other_thread(
                db_rwlock("stock:7", using="watching", timeout=2 * TTL).write().acquire
            )
        hold.renew()
        hold.check()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_locked_shared_hold_does_not_block_other_renewals(workers, until):
    (other,) = workers(1)
    kept, mine = (
        db_rwlock(key, using="watching").read().acquire()
        for key in ("stock:7", "stock:8")
    )
    other.start(jobs.lock_share, kept.token)
    assert other.hear() == "locked"
    until(lambda: kept._state.is_over)
    time.sleep(0.5)
    mine.check()
    mine.release()
    other.tell()
    assert other.hear() == "unlocked"
    with pytest.raises(LockLost):
        kept.release()


@pytest.mark.parametrize(
    "lock",
    [watched(), db_rwlock("stock:7", using="watching").read()],
    ids=["alone", "shared"],
)
def test_a_lease_that_cannot_be_written_is_not_prolonged(lock, monkeypatch):
    """Other processes see the row unchanged, and count from then."""
    backend = backends["watching"]
    with lock as hold:
        monkeypatch.setattr(backend, "_count", lambda *args, locked=None: locked())
        left = backend.renew([hold.claim])
        monkeypatch.undo()
        assert left == {hold.claim.owner: 0.0}


def test_commands_end_no_observed_lease_by_the_clock():
    # The ttl is longer here. Otherwise a renewal in between would write an end in the
    # future.
    with override_settings(
        DLOCKS={
            **DLOCKS,
            "watching": {"BACKEND": PESSIMISTIC, "OPTIONS": {"expiry": "observed"}},
        }
    ):
        with watched() as hold:
            ran_out()
            backend = backends["watching"]
            assert sum(backend.reap()) == 0
            assert not backend.clear("stock:7", hold.token, stale_only=True)
            message = (
                "expired by the database's clock, but not yet by observation: force its"
            )
            with pytest.raises(CommandError, match=message):
                call_command("clear_lock", "stock:7", "--yes", using="watching")
            hold.check()


@pytest.mark.once
@pytest.mark.parametrize("using", KINDS)
def test_clock_steps_lose_no_increment(using, workers, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0 0")
    crowd, tokens = workers(4), []
    stop, steps = threading.Event(), []

    def step():
        # SQLite has one writer, so the clock steps less often there.
        while not stop.wait(0.1 if connection.vendor == "sqlite" else 0.005):
            ran_out()
            steps.append(len(tokens))
        connections.close_all()

    thread = threading.Thread(target=step)
    thread.start()
    try:
        # Repeat the work if it ended before the clock was stepped often enough.
        while len(steps) <= 5:
            for worker in crowd:
                worker.start(
                    jobs.count,
                    str(path),
                    "counter",
                    times=12,
                    scope="lease",
                    using=using,
                    timeout=None,
                )
            tokens += [worker.hear(100) for worker in crowd]
    finally:
        stop.set()
        thread.join()
    assert path.read_text().split()[0] == str(12 * len(tokens))
    everybody = list(itertools.chain.from_iterable(tokens))
    assert len(set(everybody)) == len(everybody)
