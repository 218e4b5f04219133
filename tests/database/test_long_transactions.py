"""Transactions that outlast a lease: the key is busy, its holder is alive."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
from django.db import connection, transaction

from dlocks import (
    LockBackendError,
    LockLost,
    LockStale,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from dlocks.testing import expire
from tests.admin.test_admin import (
    CLEAR,
    FORCE,
    LIST,
    act,
    boss,
    clearer,
    page,
    releaser,
    told,
)
from tests.internals import (
    Claim,
    LockClaim,
    ResourceLock,
    backends,
    callers,
    clock,
    keeper,
)
from tests.management.test_commands import nobody_there, refused, run
from tests.models import Counter
from tests.timing import seldom

__all__ = ["boss", "clearer", "nobody_there", "releaser"]

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
# Seconds until a lease expires. The alias "brisk" has no grace, so an expired lease is
# stale at once.
TTL = 0.3


# Takeovers.


@FAMILY
def test_a_key_released_just_then_is_not_taken_over(
    using, in_other_thread, monkeypatch, caplog
):
    """A key that is released just before it is acquired is not taken over.

    The row was expired when the next caller read it.
    """
    backend = backends[using]
    hold = in_other_thread(db_lock("stock:7", using=using).acquire)
    expire(hold)
    look = backend._look

    def look_before_the_release(claim):
        row = look(claim)
        if not hold._state.lease.ended:
            assert row.stale
            in_other_thread(hold.release)
        return row

    monkeypatch.setattr(backend, "_look", look_before_the_release)
    with db_lock("stock:7", using=using) as next_hold:
        assert next_hold.token > hold.token
        assert not next_hold.takeover
    assert not caplog.records


def crash(hold):
    """Expire a lease, and forget its hold, as if the holder had crashed."""
    expire(hold)
    keeper.drop(hold._state)
    callers.forget_acquired(hold._state)


@FAMILY
def test_a_key_of_a_dead_holder_is_taken_over(using, in_other_thread, caplog):
    """Acquiring an expired, unreleased key is a takeover and logs a warning."""
    crash(in_other_thread(db_lock("stock:7", using=using).acquire))
    with db_lock("stock:7", using=using) as hold:
        assert hold.takeover
    assert [
        record.levelno for record in caplog.records if "taken over" in record.message
    ] == [logging.WARNING]


@FAMILY
def test_one_of_several_keys_is_taken_over(using, in_other_thread):
    """Of several keys acquired at once, only the expired one is taken over."""
    crash(in_other_thread(db_lock("stock:7", using=using).acquire))
    with db_lock("stock:8", "stock:7", using=using) as hold:
        assert [one.takeover for one in hold.holds] == [True, False]
        assert hold.takeover


def test_a_long_transaction_causes_no_takeover(threads, until, caplog):
    """A guarded transaction that outlasts the ttl causes no takeover.

    The waiter acquires the key after the release.
    """

    def wait():
        with db_lock("stock:7", using="brisk", timeout=30) as hold:
            return hold.takeover, hold.token

    with db_lock("stock:7", using="brisk", ttl=TTL) as hold:
        with hold.atomic():
            thread = threads(wait)
            time.sleep(4 * TTL)
    thread.join(60)
    ((takeover, token),) = thread.results
    assert (takeover, token > hold.token) == (False, True)
    assert not caplog.records


# Leases that expire while nothing can be written, on SQLite.

KINDS = pytest.mark.parametrize(
    "lock",
    [
        db_lock,
        partial(db_semaphore, permits=2),
        lambda key, **policy: db_lock(key, key + "b", **policy),
    ],
    ids=["lock", "semaphore", "several"],
)


@pytest.mark.engine("sqlite")
@KINDS
@pytest.mark.parametrize("using", ["brisk", "watching"])
def test_a_transaction_longer_than_the_ttl_is_not_a_loss(lock, using, caplog):
    """A hold whose transaction outlasts the ttl is not lost without contention."""
    lost = []
    with (
        lock("stock:7", using=using, ttl=TTL, on_lost=lost.append) as hold,
        transaction.atomic(),
    ):
        Counter.objects.create(name="stock", value=1)
        time.sleep(4 * TTL)
        # It is certain to be held only until its deadline.
        assert not hold.held
        hold.check()
    assert lost == []
    assert not caplog.records
    assert Counter.objects.get().value == 1
    assert db_lock("stock:7", using=using).holder() is None


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize(
    "lock", [db_lock, partial(db_semaphore, permits=1)], ids=["lock", "semaphore"]
)
def test_a_lease_outlasts_a_long_transaction_of_another_thread(
    lock, threads, in_other_thread, until, caplog
):
    """A long write transaction of another thread ends no lease.

    The lease is renewed after that transaction.
    """
    begun, lost = threading.Event(), []

    def write():
        with transaction.atomic():
            Counter.objects.create(name="other")
            begun.set()
            time.sleep(4 * TTL)

    with lock("stock:7", using="brisk", ttl=TTL, on_lost=lost.append) as hold:
        thread = threads(write)
        assert begun.wait(30)
        until(lambda: not hold.held)
        thread.join(60)
        until(lambda: hold.held)
        hold.check()
        assert in_other_thread(lock("stock:7", using="brisk").try_acquire) is None
    assert lost == []
    assert not caplog.records


@pytest.mark.engine("sqlite")
def test_a_lock_can_be_reentered_after_its_ttl(threads):
    """The holder enters its lock again after the ttl, in the same transaction."""
    lock = db_lock("stock:7", using="brisk", ttl=TTL)
    with lock as hold, transaction.atomic():
        Counter.objects.create(name="stock")
        time.sleep(3 * TTL)
        with lock as same:
            assert same is hold
    assert db_lock("stock:7", using="brisk").holder() is None


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("using", ["brisk", "watching"])
def test_a_key_acquired_by_another_caller_is_lost(
    using, threads, in_other_thread, until
):
    """The end of the block raises if another caller has acquired the key."""
    with pytest.raises(LockLost, match="'stock:7' was lost"):
        with db_lock("stock:7", using=using, ttl=TTL) as hold:
            # The keeper must not be the first to write after the transaction.
            hold._state.lease.renew_at = clock.now() + 3600
            hold._state.lease.answered_at = clock.now() + 3600
            with transaction.atomic():
                Counter.objects.create(name="stock")
                time.sleep(2 * TTL)
            if using == "watching":
                ResourceLock.objects.update(owner="another", version=hold.token + 1)
            else:
                other = in_other_thread(
                    db_lock("stock:7", using=using, timeout=0).acquire
                )
    if using == "brisk":
        other.check()
        other.release()


@pytest.mark.engine("sqlite")
def test_a_lease_that_cannot_be_renewed_is_lost_at_its_deadline(monkeypatch, until):
    """Errors do not prolong an expired lease. It is lost at its deadline."""
    lost = []

    def fail(claims):
        raise LockBackendError("could not ask")

    with pytest.raises(LockLost, match="not renewed within its ttl"):
        with db_lock("stock:7", using="brisk", ttl=TTL, on_lost=lost.append):
            monkeypatch.setattr(backends["brisk"], "renew", fail)
            until(lambda: lost)


@pytest.mark.engine("sqlite")
@pytest.mark.parametrize("shared", [False, True])
def test_only_a_late_claim_is_renewed_late(shared):
    """An expired claim is renewed only if it is marked as late.

    A claim whose key was acquired by another caller is never renewed.
    """
    backend = backends["brisk"]
    claim = Claim(key="stock:7", ttl=0.001, shared=shared)
    assert backend.acquire(claim) is not None
    late = replace(claim, ttl=30.0, late=True)
    time.sleep(0.01)
    assert (dict(backend.renew([claim])), backend.verify([claim], 2)) == ({}, False)
    assert dict(backend.renew([late])) == {claim.owner: 30.0}
    backend.renew([claim])
    time.sleep(0.01)
    assert backend.verify([late], 2)
    assert backend.holder("stock:7").remaining > 1
    backend.renew([claim])
    time.sleep(0.01)
    other = Claim(key="stock:7", ttl=30.0)
    assert backend.acquire(other) is not None
    assert (
        dict(backend.renew([late])),
        backend.verify([late], 2),
        backend.release(late),
    ) == ({}, False, False)
    assert backend.release(other)


# Expired leases that a transaction keeps. The key is busy, and its holder is alive.


def read_lock(key, **policy):
    return db_rwlock(key, **policy).read()


@pytest.fixture
def guarded(threads, until):
    """Return a function that holds a key in ``hold.atomic()`` in another thread.

    The function returns once the lease has expired. Its result is a function that ends
    the transaction.
    """
    ends = []

    def begin(lock=db_lock, key="stock:7", using="brisk"):
        inside, end = threading.Event(), threading.Event()

        def hold():
            with lock(key, using=using, ttl=TTL) as held, held.atomic():
                inside.set()
                assert end.wait(60)
            return held

        thread = threads(hold)
        assert inside.wait(30)
        model = ResourceLock if lock is db_lock else LockClaim
        grace = 1.2 * backends[using].grace
        until(
            lambda: model.objects.by_clock().get(key_resource=key).seconds_left < -grace
        )

        def finish():
            end.set()
            thread.join(60)
            return thread.results[0]

        ends.append(finish)
        return finish

    yield begin
    for finish in ends:
        finish()


@pytest.mark.parametrize("using", ["brisk", "optimistic", "insert", "watching"])
def test_a_key_that_a_transaction_keeps_is_busy(using, guarded, until, caplog):
    """With ``takeover=False``, a holder in ``hold.atomic()`` is never stale.

    Its key is busy for as long as the transaction lasts.
    """
    finish = guarded(using=using)
    if using == "watching":
        # Wait until the row has been observed long enough to count as a dead holder's.
        watcher = Claim(key="stock:7", ttl=TTL, takeover=False)
        until(lambda: backends[using]._look(watcher).stale)
    for timeout in (0, 0.5):
        with pytest.raises(LockTimeout, match="in a transaction") as error:
            db_lock("stock:7", using=using, takeover=False, timeout=timeout).acquire()
        assert (error.value.holder.in_transaction, error.value.holder.stale) == (
            True,
            False,
        )
    token = finish().token
    with db_lock("stock:7", using=using, takeover=False, timeout=10) as hold:
        assert hold.token > token
        assert not hold.takeover
    # The transaction lasts for more than ten times the ttl, which is a warning.
    assert not [one for one in caplog.records if "not released yet" not in one.message]


def test_a_waiter_without_takeover_polls_slowly(guarded, threads, monkeypatch, until):
    """A waiter with ``takeover=False`` polls slowly during a transaction.

    It is granted the key afterwards.
    """
    finish, asked = guarded(), []
    acquire = backends["brisk"].acquire

    def counted(claim):
        asked.append(claim)
        return acquire(claim)

    monkeypatch.setattr(backends["brisk"], "acquire", counted)

    def wait():
        with db_lock("stock:7", using="brisk", takeover=False, timeout=30) as hold:
            return hold.takeover

    thread = threads(wait)
    began = time.monotonic()
    until(lambda: asked)
    time.sleep(1.0)
    seldom(len(asked), 5 + 10 * (time.monotonic() - began))
    finish()
    thread.join(60)
    assert thread.results == [False]


def test_a_lease_that_the_commit_renews_is_not_stale(guarded, monkeypatch):
    """With ``takeover=False``, a transaction that ends just now is no stale holder."""
    finish, find = guarded(), type(backends["brisk"]).in_transactions

    def find_after_the_end(backend, rows, *others):
        finish()
        return find(backend, rows, *others)

    monkeypatch.setattr(type(backends["brisk"]), "in_transactions", find_after_the_end)
    with db_lock("stock:7", using="brisk", takeover=False, timeout=30) as hold:
        assert not hold.takeover


@pytest.mark.parametrize(
    "lock", [partial(db_semaphore, permits=1), read_lock], ids=["semaphore", "read"]
)
def test_a_shared_hold_that_a_transaction_keeps_is_busy(lock, guarded):
    """A shared hold that a transaction keeps is busy, and shown as shared."""
    finish = guarded(lock)
    for other in (lock if lock is not read_lock else db_lock, db_lock):
        with pytest.raises(LockTimeout):
            other("stock:7", using="brisk", takeover=False, timeout=0).acquire()
    holder = db_lock("stock:7", using="brisk").holder()
    assert (holder.in_transaction, holder.stale, holder.remaining) == (
        True,
        False,
        math.inf,
    )
    assert db_lock("stock:7", using="brisk").locked()
    (row,) = listed()
    assert (row["state"], row["sharing"]) == ("shared", 1)
    assert "in a transaction" in run("list_locks", "--waiting")
    token = str(holder.token)
    assert "held by an open transaction" in refused(
        "clear_lock", "stock:7", "--share", token, "--yes"
    )
    assert run("reap_locks", "--dry-run") == "0 stale locks would be cleared.\n"
    finish()
    assert listed() == []


@FAMILY
@pytest.mark.parametrize("scope", ["lease", "transaction"])
def test_a_key_of_a_dead_holder_is_still_stale(using, scope, in_other_thread, threads):
    """Callers that check an unlocked expired row at once all get ``LockStale``."""
    crash(in_other_thread(db_lock("stock:7", using=using).acquire))
    lock, start = (
        db_lock("stock:7", using=using, takeover=False, timeout=0),
        threading.Barrier(4),
    )

    def attempt():
        start.wait(30)
        with (
            transaction.atomic() if scope == "transaction" else nullcontext(),
            pytest.raises(LockStale),
        ):
            lock.acquire()
        return True

    attempts = [threads(attempt) for _ in range(4)]
    for thread in attempts:
        thread.join(60)
    assert [thread.results for thread in attempts] == [[True]] * 4


# Commands and the admin show the same.


def listed(*flags):
    return json.loads(run("list_locks", "--json", *flags))


def test_commands_show_that_a_transaction_keeps_a_key(guarded):
    """Commands and ``holder()`` show the key as held, in a transaction.

    Nothing treats it as stale.
    """
    finish = guarded()
    holder = db_lock("stock:7", using="brisk").holder()
    assert (holder.in_transaction, holder.stale, holder.remaining) == (
        True,
        False,
        math.inf,
    )
    assert str(holder).endswith(", in a transaction")
    assert db_lock("stock:7", using="brisk").locked()
    for flags in ((), ("--held",), ("--all",)):
        (row,) = listed(*flags)
        assert (row["state"], row["seconds_left"]) == ("held", None)
        assert "held, in a transaction" in run("list_locks", *flags)
    assert listed("--stale") == []
    for flags in (
        ("--yes",),
        ("--yes", "--stale-only"),
        ("--yes", "--reason", "tests"),
    ):
        assert "held by an open transaction" in refused("clear_lock", "stock:7", *flags)
    assert run("reap_locks", "--dry-run") == "0 stale locks would be cleared.\n"
    if not connection.features.has_select_for_update:
        # There the command waits for the only writer.
        finish()
    assert run("reap_locks") == "0 stale locks cleared.\n"
    finish()
    assert listed() == []


@pytest.mark.django_db(transaction=True)
def test_the_admin_shows_that_a_transaction_keeps_a_key(guarded, releaser, clearer):
    """The admin shows the key as held, and no action clears it.

    This covers the list, its filter, the page of the lock and the control room.
    """
    finish = guarded()
    assert "held, in a transaction" in page(releaser.get(LIST))
    assert "held, in a transaction" in page(releaser.get(LIST, {"state": "held"}))
    assert "stock:7" not in page(releaser.get(LIST, {"state": "stale"}))
    assert "in a transaction" in page(releaser.get(f"{LIST}stock_3A7/change/"))
    live = page(releaser.get(f"{LIST}live/"))
    assert "held, in a transaction" in live
    version = str(ResourceLock.objects.get().version)
    if connection.features.has_select_for_update:
        # On SQLite, the request would wait for the only writer.
        for client, action in ((clearer, CLEAR), (releaser, FORCE)):
            assert "held by an open transaction" in told(
                act(client, action, "stock:7", version=version)
            )
    finish()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_listing_locks_in_a_transaction_locks_no_row(in_other_thread):
    """Listing locks inside a transaction locks no row.

    A stale row can be taken over before the transaction has ended.
    """
    crash(in_other_thread(db_lock("stock:7", using="brisk").acquire))
    with transaction.atomic():
        assert [row["state"] for row in listed()] == ["stale"]
        assert db_lock("stock:7", using="brisk").holder().stale
        hold = in_other_thread(db_lock("stock:7", using="brisk").try_acquire)
        assert hold is not None
    hold.release()
