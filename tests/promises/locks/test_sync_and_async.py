"""The promises of a lock, each tested with sync and async methods."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest
from django.db import connection

from dlocks import LockBackendError, LockLost, LockStale, LockTimeout, db_lock
from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import abandoned, lose
from tests.for_each import LEASES, for_each
from tests.promises.locks.keys import clear, row
from tests.sync_and_async import sync_and_async

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]

# The contract suite tests the backends on other engines. The session backend does not
# exist on SQLite.
HERE = pytest.mark.engine("sqlite", "postgresql")
EVERY = LEASES if connection.vendor == "sqlite" else for_each("using", ["session"])


@HERE
@EVERY
@sync_and_async
async def test_a_block_acquires_and_releases(do, using, is_busy):
    """Each hold has a larger token."""
    lock, tokens = db_lock("stock:7", using=using), []
    for _ in range(2):
        async with do.block(lock) as hold:
            assert hold.held
            assert hold.count == 1
            assert hold.remaining > 0
            assert await do.ask(lock, "locked")
            holder = await do.ask(lock, "holder")
            assert holder.token == hold.token or using == "session"
            assert await do.sync(is_busy, "stock:7", using)
            tokens.append(hold.token)
        assert not hold.held
        assert not await do.ask(lock, "locked")
        assert await do.ask(lock, "holder") is None
        assert not await do.sync(is_busy, "stock:7", using)
    assert tokens == sorted(set(tokens))


@HERE
@EVERY
@sync_and_async
async def test_a_timeout_names_the_holder(do, using, in_other_thread):
    other = await do.sync(in_other_thread, db_lock("stock:7", using=using).acquire)
    holder = await do.ask(db_lock("stock:7", using=using), "holder")
    try:
        with pytest.raises(TimeoutError) as caught:
            await do.ask(db_lock("stock:7", using=using, timeout=0.1), "acquire")
        error = caught.value
        assert (type(error), error.key, error.timeout) == (LockTimeout, "stock:7", 0.1)
        assert error.holder.token == other.token or using == "session"
        assert re.fullmatch(
            r"'stock:7' could not be acquired within 0\.1 s: held by"
            + (
                ".*"
                if using == "session"
                else rf" {re.escape(holder.holder)} \([0-9.:a-f]+\)"
                r" for \d\.\d s, (2\d|30) s left on its lease"
            ),
            str(error),
        )
        with pytest.raises(LockTimeout, match="could not be acquired without waiting"):
            await do.ask(db_lock("stock:7", using=using, timeout=0), "acquire")
        assert await do.ask(db_lock("stock:7", using=using), "try_acquire") is None
        assert await do.ask(other, "queue_length") == 0
    finally:
        await do.ask(other, "release")


@HERE
@EVERY
@sync_and_async
async def test_a_waiter_acquires_after_the_release(do, using, until, threads):
    """The hold has the duration of its wait."""
    taken = threading.Event()

    def hold_until_another_waits():
        with db_lock("stock:7", using=using) as hold:
            taken.set()
            until(lambda: hold.queue_length())
            seen = time.monotonic()
            until(lambda: time.monotonic() - seen > 0.05)
            return time.monotonic() - seen

    thread = threads(hold_until_another_waits)
    await do.sync(taken.wait, 30)
    began = time.monotonic()
    async with do.block(db_lock("stock:7", using=using, timeout=30)) as hold:
        assert hold.held
        ended = time.monotonic()
    await do.sync(thread.join, 30)
    # The clock of the locks may be another one.
    assert thread.results[0] - 0.01 <= hold.waited <= ended - began + 0.01
    assert using != "default" or not await do.sync(LockClaim.objects.exists)


@HERE
@EVERY
@sync_and_async
async def test_a_reentrant_hold_is_released_by_the_last_exit(do, using, is_busy):
    lock = db_lock("stock:7", using=using)
    async with do.block(lock) as hold:
        async with do.block(lock) as again:
            assert again is hold
            assert hold.count == 2
        assert hold.count == 1
        assert await do.sync(is_busy, "stock:7", using)
        only = db_lock("stock:7", using=using, reentrant=False, timeout=None)
        with pytest.raises(LockTimeout, match=r"holds it already, .*reentrant=False"):
            await do.ask(only, "acquire")
    assert not await do.sync(is_busy, "stock:7", using)


@HERE
@EVERY
@sync_and_async
async def test_a_lock_that_is_not_reentrant_is_busy_for_its_holder(do, using, is_busy):
    """It is so at once, whatever its timeout. The wait would not end."""
    lock = db_lock("stock:7", using=using)
    only = db_lock("stock:7", using=using, reentrant=False, timeout=None)
    async with do.block(only) as hold:
        for again in (only, lock):
            with pytest.raises(LockTimeout, match=r"holds it already, .*reentrant=Fal"):
                await do.ask(again, "acquire")
            assert await do.ask(again, "try_acquire") is None
        with pytest.raises(LockTimeout) as caught:
            await do.ask(only, "acquire")
        assert caught.value.holder.token == hold.token or using == "session"
        assert (caught.value.key, hold.count) == ("stock:7", 1)
    assert not await do.sync(is_busy, "stock:7", using)
    async with do.block(only) as hold:
        assert hold.held


@LEASES
@sync_and_async
async def test_a_lost_hold_raises_in_check_and_at_the_end_of_its_block(do, using):
    with pytest.raises(LockLost, match="stock:7"):
        async with do.block(db_lock("stock:7", using=using)) as hold:
            await do.ask(hold, "check")
            await do.ask(hold, "renew")
            await do.sync(lose, "stock:7", using=using)
            for question in ("check", "renew"):
                with pytest.raises(LockLost, match="stock:7"):
                    await do.ask(hold, question)
            assert not hold.held


@LEASES
@sync_and_async
async def test_an_error_of_the_block_has_a_note_about_the_loss(do, using):
    with pytest.raises(KeyError) as caught:
        async with do.block(db_lock("stock:7", using=using)):
            await do.sync(lose, "stock:7", using=using)
            raise KeyError("mine")
    assert caught.value.__notes__[0].startswith("LockLost: 'stock:7' was lost")


@for_each("using", ["default", "optimistic"])
@sync_and_async
async def test_a_failed_block_releases_with_the_status_failed(do, using):
    for error, status in (
        (KeyError, ResourceLock.Status.FAILED),
        (None, ResourceLock.Status.SUCCEEDED),
    ):
        try:
            async with do.block(db_lock("stock:7", using=using)):
                if error is not None:
                    raise error
        except KeyError:
            pass
        found = await do.sync(row, "stock:7")
        assert (found.state, found.status) == ("free", status)


@sync_and_async
async def test_a_failed_inner_block_counts_for_each_of_several_keys(do):
    """As it does for a lock on one key."""
    async with do.block(db_lock("stock:7", "stock:8")):
        with contextlib.suppress(KeyError):
            async with do.block(db_lock("stock:7")):
                raise KeyError
    statuses = {key: (await do.sync(row, key)).status for key in ("stock:7", "stock:8")}
    assert statuses == {
        "stock:7": ResourceLock.Status.FAILED,
        "stock:8": ResourceLock.Status.SUCCEEDED,
    }


@HERE
@EVERY
@sync_and_async
async def test_a_second_release_does_nothing(do, using, is_busy, in_other_thread):
    hold = await do.ask(db_lock("stock:7", using=using), "acquire")
    await do.ask(hold, "release")
    other = await do.sync(in_other_thread, db_lock("stock:7", using=using).acquire)
    await do.ask(hold, "release")
    with pytest.raises(RuntimeError, match="has been released"):
        async with do.block(hold):
            pytest.fail("the block was entered")
    assert await do.sync(is_busy, "stock:7", using)
    await do.ask(other, "release")


@LEASES
@sync_and_async
async def test_a_stale_lock_is_taken_over_or_refused(do, using):
    await do.sync(abandoned, "stock:7", using=using)
    careful = db_lock("stock:7", using=using, takeover=False)
    with pytest.raises(LockStale, match="is stale: held by .*takeover=False") as stale:
        await do.ask(careful, "acquire")
    assert stale.value.holder.stale
    async with do.block(db_lock("stock:7", using=using)) as hold:
        assert hold.takeover
    if using != "memory":
        await do.sync(abandoned, "stock:7", using=using)
        await do.sync(clear, "stock:7", using)
        async with do.block(careful):
            pass


@LEASES
@sync_and_async
async def test_a_backend_error_is_never_taken_for_a_busy_key(do, using, stops, is_busy):
    def fail(usual, claim):
        raise LockBackendError("the server is away")

    with stops.replace("acquire", fail):
        for name in ("acquire", "try_acquire"):
            with pytest.raises(LockBackendError, match="away"):
                await do.ask(db_lock("stock:7", using=using), name)
    assert not await do.sync(is_busy, "stock:7", using)


@LEASES
@sync_and_async
async def test_a_hold_is_detached_and_resumed(do, using, is_busy):
    async with do.block(db_lock("stock:7", using=using)) as hold:
        text = await do.ask(hold, "detach")
    assert await do.sync(is_busy, "stock:7", using)
    resumed = await do.resume(text)
    assert resumed.token > hold.token
    with pytest.raises(LockLost):
        await do.resume(text)
    await do.ask(resumed, "release")
    assert not await do.sync(is_busy, "stock:7", using)
