"""An acquisition that enters a hold again and is given up leaves only its own entry."""

import asyncio

import pytest

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock
from tests.for_each import for_each

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

USING = for_each("using", ["default", "optimistic", "insert", "memory"])


@pytest.fixture
def busy(in_other_thread):
    """Return a function that returns another thread's hold of a key."""
    return lambda key, using: in_other_thread(db_lock(key, using=using).acquire)


@USING
def test_a_timeout_does_not_undo_the_release_of_another_thread(
    using, busy, threads, until, is_busy
):
    """The key is free when its last holder has left it.

    A thread that holds "a" acquires "a" and "b" together, and waits for "b". Another
    thread leaves the hold of "a" meanwhile.
    """
    other = busy("b", using)
    hold = db_lock("a", using=using).acquire()

    def leave():
        until(lambda: other.queue_length() == 1)
        hold.release()

    thread = threads(leave)
    with pytest.raises(LockTimeout):
        db_lock("a", "b", using=using, timeout=0.4).acquire()
    thread.join(20)
    assert not hold.held
    assert not is_busy("a", using)
    other.release()


@USING
def test_a_timeout_leaves_the_hold_that_the_caller_has(using, busy, is_busy):
    """The caller still holds "a" after it could not acquire "a" and "b" together."""
    other = busy("b", using)
    with db_lock("a", using=using) as hold:
        for _ in range(2):
            with pytest.raises(LockTimeout):
                db_lock("a", "b", using=using, timeout=0).acquire()
            assert hold.count == 1
            hold.check()
            assert is_busy("a", using)
    assert not is_busy("a", using)
    other.release()


@USING
async def test_a_cancellation_does_not_undo_a_release(using, busy, is_busy):
    """The key is free at once, not only when the event loop is closed.

    A task that holds "a" is cancelled while it waits for "a" and "b". Another task
    leaves the hold of "a" meanwhile.
    """
    other = await asyncio.to_thread(busy, "b", using)
    holds = []

    async def acquire_twice():
        holds.append(await db_lock("a", using=using).aacquire())
        await db_lock("a", "b", using=using).aacquire()

    task = asyncio.create_task(acquire_twice())
    while await other.aqueue_length() == 0:
        await asyncio.sleep(0.01)
    await holds[0].arelease()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await asyncio.to_thread(is_busy, "a", using)
    await other.arelease()


@for_each("name", ["pessimistic", "optimistic", "insert", "memory"])
def test_an_error_does_not_undo_the_release_of_another_thread(
    name, stops, threads, is_busy
):
    """The backend fails while another thread leaves the hold that is entered again."""
    using = f"stopping {name}"

    def leave_and_fail():
        threads(hold.release).join(20)
        raise LockBackendError("The server does not respond.")

    for keys in ("a",), ("a", "b", "c"):
        hold = db_lock("a", using=using).acquire()
        stops.call("verify", leave_and_fail)
        with pytest.raises(LockBackendError):
            db_lock(*keys, using=using).acquire()
        assert not hold.held
        assert not is_busy("a", using)


@for_each("name", ["pessimistic", "optimistic", "insert", "memory"])
def test_an_entry_that_a_detach_refuses_does_not_keep_the_hold(
    name, stops, threads, is_busy, until
):
    """A thread enters its hold again, while others leave it and cannot detach it.

    The thread gets LockLost and has no entry. The last entry was left, so the key is
    free when the detach has failed.
    """
    using = f"stopping {name}"
    # Without renewals, so that the stop is in the detach.
    lock = db_lock("a", using=using, renew=False)
    hold = lock.acquire()
    detaching, others = stops.at("renew", using), []

    def leave_and_detach():
        threads(hold.release).join(20)
        others.append(threads(hold.detach))
        detaching.wait()

    stops.call("verify", leave_and_detach)
    with pytest.raises(LockLost):
        lock.acquire()
    detaching.go_on(LockBackendError("The server does not respond."))
    with pytest.raises(LockBackendError):
        others[0].join(20)
    assert hold.count == 0
    until(lambda: not is_busy("a", using), 1.0)
