"""``hold.atomic()`` in one thread, while another thread leaves the hold."""

import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from django.db import connection, transaction

from dlocks import LockLost, db_lock
from tests.for_each import for_each
from tests.promises.locks.keys import clear
from tests.promises.yields import yielding
from tests.timing import in_time

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

FAMILY = for_each("using", ["default", "optimistic", "insert"])


@pytest.fixture
def are_busy(is_busy):
    """Return a function that returns whether others find all keys held.

    They cannot ask on SQLite, whose one writer is the guarded transaction.
    """
    return lambda keys, using: (
        connection.vendor == "sqlite" or all(is_busy(key, using) for key in keys)
    )


@for_each("name", ["pessimistic", "optimistic", "insert"])
@for_each("keys", ["a", "ab"])
@for_each("at", ["refusal", "release"])
def test_a_release_does_not_wait_for_a_guarded_transaction(
    name, keys, at, stops, threads, is_busy, are_busy
):
    """A guard that begins during the release is refused, or it keeps the key.

    The release succeeds at once, and the key is free when the transaction has ended.
    """
    using = f"stopping {name}"
    hold = db_lock(*keys, using=using, release_at="exit").acquire()
    leaving = stops.at("release_all" if (keys, at) == ("ab", "release") else at)
    other = threads(hold.release)
    leaving.wait()
    with suppress(LockLost), hold.atomic():
        leaving.go_on()
        began = time.monotonic()
        other.join(20)
        in_time(time.monotonic() - began, 2.0)
        assert are_busy(keys, using)
    leaving.go_on()
    other.join(20)
    assert not any(is_busy(key, using) for key in keys)


@pytest.mark.front
def test_a_guard_and_a_release_that_begin_together_wait_for_nothing(threads, is_busy):
    """The threads yield at random moments."""
    for number in range(40):
        hold = db_lock("a", release_at="exit").acquire()
        start = threading.Barrier(2)

        def leave(hold=hold, start=start, number=number):
            start.wait(20)
            with yielding(number):
                hold.release()

        other = threads(leave)
        start.wait(20)
        with yielding(-number):
            with suppress(LockLost), hold.atomic():
                began = time.monotonic()
                other.join(20)
                in_time(time.monotonic() - began, 2.0)
        other.join(20)
        assert not is_busy("a"), number


@FAMILY
@for_each("keys", ["a", "ab"])
def test_a_hold_that_is_left_under_a_guard_is_kept_until_its_end(
    using, keys, threads, is_busy, are_busy, until
):
    """The release comes after the guard, in another thread, with or without a delay."""
    for release_at in ("exit", "transaction"):
        hold = db_lock(*keys, using=using, release_at=release_at).acquire()
        with hold.atomic():
            threads(hold.release).join(20)
            assert are_busy(keys, using)
        until(lambda: not any(is_busy(key, using) for key in keys), 1.0)


# SQLite has one writer, so the two transactions cannot be open together.
@pytest.mark.engine("postgresql", "mariadb")
@FAMILY
def test_a_guard_of_a_hold_that_was_left_keeps_the_key(using, paused, is_busy, until):
    """The hold was left in a transaction that ends before the guarded one."""
    hold = db_lock("a", using=using, scope="lease").acquire()

    def leave():
        with transaction.atomic():
            hold.release()
            yield

    end = paused(leave)
    with hold.atomic():
        began = time.monotonic()
        end()
        in_time(time.monotonic() - began, 2.0)
        assert is_busy("a", using)
    until(lambda: not is_busy("a", using), 1.0)


# SQLite has one writer, which is the guard.
@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("use", ["check", "renew", "acquire", "release"])
def test_a_caller_learns_of_a_loss_beside_a_guard_that_has_not_begun(
    use, stops, threads, in_other_thread
):
    """The key is lost before the guard's transaction has locked its row."""
    lock = db_lock("a")
    hold = lock.acquire()
    uses = {
        "check": hold.check,
        "renew": hold.renew,
        "acquire": lock.acquire,
        "release": hold.release,
    }
    begins, lost = stops.at("pin"), []

    def guard():
        with pytest.raises(LockLost), hold.atomic():
            lost.append("not lost")

    guarding = threads(guard)
    begins.wait()
    clear("a")
    other = in_other_thread(db_lock("a", timeout=20).acquire)
    # The use waits for the guard, or is done without it.
    letting = threading.Timer(1, begins.go_on)
    letting.start()
    with pytest.raises(LockLost):
        uses[use]()
    letting.cancel()
    begins.go_on()
    guarding.join(20)
    assert lost == []
    other.check()
    other.release()


# SQLite has one writer, so the two transactions cannot be open together.
@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_check_writes_no_lease_in_a_transaction_of_its_caller(stops, threads, paused):
    """A guard in another thread begins and ends during the check.

    Otherwise no caller could renew or guard the hold before that transaction ends.
    """
    hold = db_lock("a", scope="lease").acquire()
    ends = []

    def guard():
        with hold.atomic():
            yield

    with transaction.atomic():
        stops.call("refusal", lambda: ends.append(paused(guard)))
        stops.call("verify", lambda: ends[0]())
        hold.check()
        threads(partial(hold.renew, ttl=60)).join(20)
        assert hold.remaining > 50
    hold.release()
