"""Holds of one key that are released in another order than they were acquired.

Each acquisition is left once, so the last one frees the key, and none is left open.
"""

import pytest

from dlocks import db_lock
from tests.for_each import for_each
from tests.sync_and_async import sync_and_async

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]

USING = for_each("using", ["default", "memory"])
# The keys that are acquired first and second, and which of the holds is left first.
KEYS = for_each("keys", [(("a",), ("a", "b")), (("a", "b"), ("a",))])
LEFT_FIRST = for_each("left_first", [0, 1])


@for_each("by", ["release", "block"])
@USING
@KEYS
@LEFT_FIRST
@sync_and_async
async def test_one_key_and_several_are_released_in_any_order(
    do, using, keys, left_first, by, is_busy
):
    """Neither ``hold.release()`` nor a block of one hold leaves an entry of another."""
    holds = [await do.ask(db_lock(*each, using=using), "acquire") for each in keys]
    if by == "release":
        await do.ask(holds.pop(left_first), "release")
    else:
        async with do.block(holds.pop(left_first)):
            pass
    assert holds[0].held
    assert await do.sync(is_busy, "a", using)
    await do.ask(holds[0], "release")
    for key in ("a", "b"):
        assert not await do.sync(is_busy, key, using)


@USING
@KEYS
@LEFT_FIRST
def test_other_threads_release_one_key_and_several_in_any_order(
    using, keys, left_first, in_other_thread, is_busy
):
    """The holds were passed to them."""
    holds = [db_lock(*each, using=using).acquire() for each in keys]
    in_other_thread(holds.pop(left_first).release)
    assert holds[0].held
    assert is_busy("a", using)
    in_other_thread(holds[0].release)
    for key in ("a", "b"):
        assert not is_busy(key, using)


@USING
@sync_and_async
async def test_a_release_of_the_lock_under_a_block_leaves_another_acquisition(
    do, using, is_busy
):
    """The end of the block leaves the one that the block uses."""
    lock = db_lock("a", using=using)
    await do.ask(lock, "acquire")
    hold = await do.ask(lock, "acquire")
    async with do.block(hold):
        await do.ask(lock, "release")
        assert await do.sync(is_busy, "a", using)
    assert not await do.sync(is_busy, "a", using)


@USING
@sync_and_async
async def test_a_release_under_the_own_block_takes_no_key_of_several(
    do, using, is_busy
):
    """The hold of several keys keeps all of them until its own release."""
    async with do.block(db_lock("a", using=using)) as hold:
        several = await do.ask(db_lock("a", "b", using=using), "acquire")
        await do.ask(hold, "release")
    assert several.held
    assert await do.sync(is_busy, "a", using)
    await do.ask(several, "release")
    assert not await do.sync(is_busy, "a", using)
