"""Locks use the real clock under freezegun and time-machine."""

import time
from contextlib import contextmanager
from functools import partial

import freezegun
import pytest
import time_machine
from django.db import connection

from dlocks import LockLost, LockTimeout, StaleVersion, db_lock, resume_hold
from dlocks.optimistic import retry_on_conflict
from tests.for_each import for_each
from tests.sync_and_async import sync_and_async
from tests.timing import eventually

pytestmark = [
    # Waits have no SQL of their own. The loop of a session lock is another one.
    pytest.mark.engine("sqlite", "postgresql"),
    pytest.mark.django_db(transaction=True),
    pytest.mark.timeout(30),
]

freeze = partial(freezegun.freeze_time, "2012-01-14 12:00", real_asyncio=True)
travel = partial(time_machine.travel, "2012-01-14 12:00 +0000", tick=False)

DATABASE = (
    ["default", "watching", "insert"] if connection.vendor == "sqlite" else ["session"]
)

# The partial keeps the real function, while freezegun replaces the attributes of all
# modules.
monotonic = partial(time.monotonic)


@contextmanager
def lasting(shortest, longest=10.0):
    began = monotonic()
    yield
    assert shortest <= monotonic() - began < longest


@for_each("using", [*DATABASE, "memory"])
@sync_and_async
async def test_a_busy_key_times_out(do, using, in_other_thread):
    """``timeout`` is real time. In a coroutine, the event loop's clock goes on."""
    hold = await do.sync(in_other_thread, db_lock("stock:7", using=using).acquire)
    for stop in freeze, travel:
        with stop(), lasting(0.2), pytest.raises(LockTimeout):
            await do.ask(db_lock("stock:7", using=using, timeout=0.2), "acquire")
    await do.ask(hold, "release")


@for_each("using", DATABASE)
def test_a_waiter_is_served_while_the_clock_is_stopped(using, threads):
    lock = db_lock("stock:7", using=using, timeout=10)
    with freeze(), lasting(0):
        with lock as hold:
            thread = threads(lambda: lock.acquire().release())
            eventually(hold.queue_length)
        thread.join()


@pytest.mark.front
@for_each("using", ["brisk", "memory"])
def test_leases_are_renewed_and_expire_by_the_real_clock(using):
    with freeze():
        with db_lock("renewed", using=using, ttl=0.6) as hold:
            with (
                pytest.raises(LockLost),
                db_lock("not renewed", using=using, ttl=0.6, renew=False) as other,
            ):
                while other.held:
                    time.sleep(0.01)
            time.sleep(0.1)
            hold.check()


@pytest.mark.front
def test_a_hold_can_be_handed_over_to_real_time():
    """The remaining ``max_hold`` does not depend on the date of the test."""
    with freeze():
        text = db_lock("export:7", using="memory", max_hold=600).acquire().detach()
    with resume_hold(text) as hold:
        assert hold.lock.max_hold > 500


@pytest.mark.front
async def test_a_coroutine_is_retried_while_the_clock_is_stopped():
    """The pause between attempts is real time."""
    attempts = []

    @retry_on_conflict(backoff=0.01)
    async def write():
        attempts.append(1)
        if len(attempts) < 3:
            raise StaleVersion(object, pk=1, held=1, found=2)

    with freeze(), lasting(0):
        await write()
    assert len(attempts) == 3
