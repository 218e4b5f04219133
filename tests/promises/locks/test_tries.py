"""``try_acquire(timeout=…)``: None when the key is not free in time."""

from datetime import timedelta

import pytest

from dlocks import LockDeadlock, LockStale, db_lock, db_semaphore
from dlocks.models import LockClaim
from dlocks.testing import abandoned
from tests.for_each import EVERY, for_each
from tests.sync_and_async import sync_and_async

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]


@EVERY
@sync_and_async
@pytest.mark.parametrize("keys", [["b"], ["a", "b", "c"]], ids=["a key", "three"])
async def test_a_try_that_waits_returns_none_after_its_timeout(
    do, using, keys, in_other_thread, is_busy
):
    """It leaves no claim and no key. The timeout of the lock does not matter."""
    other = await do.sync(in_other_thread, db_lock("b", using=using).acquire)
    lock = db_lock(*keys, using=using, timeout=60)
    for timeout in (0, 0.2, timedelta(seconds=0.2)):
        assert await do.ask(lock, "try_acquire", timeout=timeout) is None
        assert await do.sync(LockClaim.objects.count) == 0
    assert await do.ask(lock, "try_acquire") is None
    for key in "ac":
        assert not await do.sync(is_busy, key, using)
    await do.ask(other, "release")
    hold = await do.ask(lock, "try_acquire", timeout=0.2)
    assert hold.keys == tuple(keys)
    await do.ask(hold, "release")


@EVERY
@sync_and_async
async def test_a_try_acquires_a_key_that_is_released_in_time(
    do, using, threads, until, waiting, in_other_thread
):
    """``None`` is no limit, as everywhere."""
    for timeout in (30, None):
        other = await do.sync(in_other_thread, db_lock("stock:7", using=using).acquire)

        def release(other=other):
            until(lambda: waiting("stock:7", using) == 1)
            other.release()

        releasing = threads(release)
        lock = db_lock("stock:7", using=using, timeout=0)
        hold = await do.ask(lock, "try_acquire", timeout=timeout)
        assert hold.held
        await do.sync(releasing.join, 30)
        await do.ask(lock, "release")
        assert not hold.held


@pytest.mark.front
@for_each("using", ["default", "memory"])
@sync_and_async
async def test_a_try_raises_what_is_no_matter_of_time(do, using):
    """None would let the caller try again, and wait for itself again."""
    await do.sync(abandoned, "stock:7", using=using)
    lock = db_lock("stock:7", using=using, takeover=False)
    with pytest.raises(LockStale):
        await do.ask(lock, "try_acquire", timeout=1)
    if using == "memory":
        # Later tests find the keys in memory as this one leaves them.
        async with do.block(db_lock("stock:7", using=using)):
            return
    only = db_semaphore("pool", 1, reentrant=False)
    async with do.block(only):
        with pytest.raises(LockDeadlock):
            await do.ask(only, "try_acquire", timeout=30)


@pytest.mark.front
@sync_and_async
async def test_a_wrong_timeout_is_refused_first(do):
    """No alias of this name exists, so nothing was asked for."""
    lock = db_lock("stock:7", using="nowhere")
    for wrong in ("3", True, [3]):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            await do.ask(lock, "try_acquire", timeout=wrong)
    for wrong in (-1, float("nan"), timedelta(seconds=-1)):
        with pytest.raises(ValueError, match="timeout must be 0 or more"):
            await do.ask(lock, "try_acquire", timeout=wrong)
    # As in threading.Lock, but without its first argument.
    with pytest.raises(TypeError):
        await do.ask(lock, "try_acquire", 3)
