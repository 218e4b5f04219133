"""Transactions that outlast a lease: the key is busy, its holder is alive."""

from __future__ import annotations

import math
import re
import threading
import time
from contextlib import ExitStack, nullcontext
from functools import partial

import pytest
from django.core.management import CommandError
from django.db import connection, transaction

from dlocks import (
    LockLost,
    LockStale,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    resume_hold,
)
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import expire
from tests import rows
from tests.for_each import ROWS, for_each
from tests.models import Counter
from tests.promises.commands.running import listed, run
from tests.settings import ENGINE
from tests.timing import seldom

pytest_plugins = ["tests.promises.stops"]
pytestmark = pytest.mark.django_db(transaction=True)

# Seconds until a lease expires. The alias "brisk" has no grace, so an expired lease is
# stale at once.
TTL = 0.3
GRACE = 0.5


# Takeovers.


@pytest.mark.driver
def test_a_key_released_just_then_is_not_taken_over(in_other_thread, caplog):
    """The row was expired when the next caller read it."""
    for using in ROWS:
        released = []
        lock = db_lock(using, using=using, renew=False)
        hold = in_other_thread(lock.acquire)
        expire(hold)

        def release_after_a_look(execute, sql, *arguments, hold=hold, done=released):
            result = execute(sql, *arguments)
            if sql.startswith("SELECT") and not done:
                done.append(sql)
                in_other_thread(hold.release)
            return result

        with connection.execute_wrapper(release_after_a_look), lock as next_hold:
            assert next_hold.token > hold.token
            assert not next_hold.takeover
        assert released, using
    assert not caplog.records


@pytest.mark.driver
def test_only_the_expired_one_of_several_keys_is_taken_over():
    for using in ROWS:
        rows.stale(f"stock:7 {using}")
        with db_lock("stock:8", f"stock:7 {using}", using=using) as hold:
            assert [one.takeover for one in hold.holds] == [True, False], using
            assert hold.takeover


@pytest.mark.driver
def test_a_key_of_a_dead_holder_is_still_stale(threads):
    """Callers that check an unlocked expired row at once all get ``LockStale``."""
    rows.stale("stock:7")

    def attempt(lock, start, scope):
        start.wait(30)
        with (
            transaction.atomic() if scope == "transaction" else nullcontext(),
            pytest.raises(LockStale),
        ):
            lock.acquire()

    for using, scope in zip(
        [*ROWS, "default"], ["lease", "transaction"] * 2, strict=True
    ):
        lock = db_lock("stock:7", using=using, takeover=False, timeout=0)
        work = partial(attempt, lock, threading.Barrier(3), scope)
        for thread in [threads(work) for _ in range(3)]:
            thread.join(60)


# Leases that expire while nothing can be written, on SQLite.


@pytest.mark.engine("sqlite")
def test_a_transaction_longer_than_the_ttl_is_not_a_loss(caplog):
    """Its holder can enter the lock again in the same transaction."""
    kinds = {
        "lock": db_lock,
        "semaphore": partial(db_semaphore, permits=2),
        "several": lambda key, **policy: db_lock(key, f"{key} too", **policy),
    }
    lost = []
    with ExitStack() as stack:
        holds = [
            stack.enter_context(
                lock(f"{name} {using}", using=using, ttl=TTL, on_lost=lost.append)
            )
            for name, lock in kinds.items()
            for using in ("brisk", "watching")
        ]
        with transaction.atomic():
            Counter.objects.create(name="stock", value=1)
            time.sleep(4 * TTL)
            for hold in holds:
                # It is certain to be held only until its deadline.
                assert not hold.held
                hold.check()
            with db_lock("lock brisk", using="brisk", ttl=TTL) as same:
                assert same is holds[0]
    assert lost == []
    assert not caplog.records
    assert Counter.objects.get().value == 1
    for name in kinds:
        assert db_lock(f"{name} brisk", using="brisk").holder() is None


@pytest.mark.engine("sqlite")
def test_a_lease_outlasts_a_long_transaction_of_another_thread(
    paused, in_other_thread, until, caplog
):
    """The lease is renewed after that transaction."""
    lost = []

    def write():
        with transaction.atomic():
            Counter.objects.create(name="other")
            yield

    locks = [partial(db_lock, "lock"), partial(db_semaphore, "permit", permits=1)]
    with ExitStack() as stack:
        holds = [
            stack.enter_context(lock(using="brisk", ttl=TTL, on_lost=lost.append))
            for lock in locks
        ]
        commit = paused(write)
        until(lambda: not any(hold.held for hold in holds))
        commit()
        until(lambda: all(hold.held for hold in holds))
        for lock, hold in zip(locks, holds, strict=True):
            hold.check()
            assert in_other_thread(lock(using="brisk").try_acquire) is None
    assert lost == []
    assert not caplog.records


@pytest.mark.engine("sqlite")
def test_a_hold_is_detached_during_a_long_transaction_of_another_thread(paused, until):
    """Its lease has expired, but no other caller has acquired the key."""

    def write():
        with transaction.atomic():
            Counter.objects.create(name="other")
            yield

    hold = db_lock("stock:7", using="brisk", ttl=TTL).acquire()
    commit = paused(write)
    until(lambda: not hold.held)
    committing = threading.Timer(TTL, commit)
    committing.start()
    text = hold.detach(within=30)
    committing.join(20)
    with resume_hold(text) as resumed:
        assert resumed.token > hold.token


@pytest.mark.engine("sqlite")
def test_a_key_acquired_by_another_caller_is_lost(in_other_thread):
    """The end of the block raises if another caller has acquired the key."""
    for using in "brisk", "watching":
        with pytest.raises(LockLost, match=f"'{using}' was lost"):
            # A renewal must not be the first to write after the transaction.
            with db_lock(using, using=using, ttl=TTL, renew=False) as hold:
                with transaction.atomic():
                    Counter.objects.create(name=using)
                    time.sleep(2 * TTL)
                if using == "watching":
                    ResourceLock.objects.filter(pk=using).update(
                        owner="another", version=hold.token + 1
                    )
                else:
                    lock = db_lock(using, using=using, timeout=0)
                    other = in_other_thread(lock.acquire)
    other.check()
    other.release()


# Expired leases that a transaction keeps. The key is busy, and its holder is alive.


@pytest.fixture
def guarded(paused, until):
    """Return a function that holds a key in ``hold.atomic()`` in another thread.

    The function returns once the lease has expired. Its result is a function that ends
    the transaction.
    """

    def begin(lock=db_lock, using="brisk"):
        def hold():
            with lock("stock:7", using=using, ttl=TTL) as held, held.atomic():
                yield

        finish = paused(hold)
        rows = (ResourceLock if lock is db_lock else LockClaim).objects.by_clock()
        grace = 0 if using == "brisk" else 1.2 * GRACE
        until(lambda: rows.get(key_resource="stock:7").seconds_left < -grace)
        return finish

    return begin


@for_each(
    "using",
    {
        "postgresql": ["brisk", "optimistic", "watching"],
        "mariadb": ["brisk", "insert"],
        "sqlite": ["brisk", "watching"],
    }.get(ENGINE, ["brisk"]),
)
def test_a_key_that_a_transaction_keeps_is_busy(using, guarded, stops, caplog):
    """Its holder is not stale. A waiter polls slowly."""
    finish, asked = guarded(using=using), []
    token = ResourceLock.objects.get().version
    stops.replace("acquire", lambda usual, claim: asked.append(claim) or usual())
    began = time.monotonic()
    # The longer wait observes the row for longer than the ttl of "watching".
    for timeout in (0, 3.0 if using == "watching" else 1.0):
        with pytest.raises(LockTimeout, match="in a transaction") as error:
            db_lock("stock:7", using=using, takeover=False, timeout=timeout).acquire()
        assert error.value.holder.in_transaction
        assert not error.value.holder.stale
    assert asked
    seldom(len(asked), 5 + 10 * (time.monotonic() - began))
    finish()
    with db_lock("stock:7", using=using, takeover=False, timeout=10) as hold:
        assert hold.token > token
        assert not hold.takeover
    # The transaction lasts for more than ten times the ttl, which is a warning.
    assert not [one for one in caplog.records if "not released yet" not in one.message]


# Commands and the admin show the same.


def read_lock(key, **policy):
    return db_rwlock(key, **policy).read()


permit = partial(db_semaphore, permits=1)


@for_each(
    "lock",
    {
        "sqlite": [db_lock, permit],
        "postgresql": [db_lock, read_lock],
        "mariadb": [read_lock],
        "mysql": [permit],
    }[ENGINE],
)
def test_commands_show_that_a_transaction_keeps_a_key(lock, guarded):
    """Nothing treats it as stale, also if the hold is shared."""
    finish, words = guarded(lock), []
    for other in (db_lock if lock is read_lock else lock, db_lock):
        with pytest.raises(LockTimeout):
            other("stock:7", using="brisk", takeover=False, timeout=0).acquire()
    holder = db_lock("stock:7", using="brisk").holder()
    assert holder.in_transaction
    assert (holder.stale, holder.remaining) == (False, math.inf)
    assert db_lock("stock:7", using="brisk").locked()
    if lock is db_lock:
        assert str(holder).endswith(", in a transaction")
        (row,) = listed("--held").values()
        assert (row["state"], row["seconds_left"]) == ("held", None)
        (line,) = run("list_locks").splitlines()[1:]
        assert re.fullmatch(r"stock:7 +held .* transaction +\S+", line)
        assert listed("--stale") == {}
    else:
        (row,) = listed().values()
        assert (row["state"], row["sharing"]) == ("shared", 1)
        assert "in a transaction" in run("list_locks", "--waiting")
        words = ["--share", str(holder.token)]
    for flags in [words] if words else [[], ["--stale-only"]]:
        with pytest.raises(CommandError, match="held by an open transaction"):
            run("clear_lock", "stock:7", "--yes", *flags)
    assert run("reap_locks", "--dry-run") == "0 stale locks would be cleared.\n"
    if connection.vendor == "sqlite":
        # There the command waits for the only writer.
        finish()
    assert run("reap_locks") == "0 stale locks cleared.\n"
    finish()
    assert listed() == {}


@pytest.mark.engine("postgresql")
def test_the_admin_shows_that_a_transaction_keeps_a_key(guarded, admin_client):
    """The list, its filter and the page of the key do, and no action clears it."""

    def page(path, **query):
        url = f"/admin/dlocks/resourcelock/{path}"
        return admin_client.get(url, query).content.decode()

    guarded()
    for path, query in (("", {}), ("", {"state": "held"}), ("", {"part": "now"})):
        assert "held, in a transaction" in page(path, **query)
    assert "stock:7" not in page("", state="stale")
    assert "in a transaction" in page("stock_3A7/change/")
    target = f"lock {ResourceLock.objects.get().version} stock:7"
    selected = {"action": "clear_stale_locks", "_selected_action": "stock:7"}
    for path, form in (
        ("", selected),
        ("end/", {"clear": target}),
        ("end/", {"force_release": target, "reason": "tests"}),
    ):
        url = f"/admin/dlocks/resourcelock/{path}"
        answer = admin_client.post(url, form, follow=True)
        assert "held by an open transaction" in answer.content.decode()


@pytest.mark.engine("postgresql", "mariadb")
def test_listing_locks_in_a_transaction_locks_no_row(in_other_thread):
    """A stale row can be taken over before the transaction has ended."""
    rows.stale("stock:7")
    with transaction.atomic():
        assert [row["state"] for row in listed().values()] == ["stale"]
        assert db_lock("stock:7", using="brisk").holder().stale
        hold = in_other_thread(db_lock("stock:7", using="brisk").try_acquire)
        assert hold is not None
    hold.release()
