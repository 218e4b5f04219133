"""``hold.renew(ttl=…)``: a lease that lasts for another time from now on."""

from __future__ import annotations

import math
import threading
import time
from datetime import timedelta

import pytest
from django.db import transaction

from dlocks import LockBackendError, LockLost, db_lock, db_semaphore, resume_hold
from dlocks.testing import lose
from tests import jobs
from tests.for_each import EVERY, ROWS, for_each
from tests.promises.locks.keys import await_renewal, is_taken, unlocked_after
from tests.sync_and_async import sync_and_async
from tests.timing import eventually

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

SERVERS = pytest.mark.engine("postgresql", "mariadb")


def left_for_others(*keys, using="default"):
    """Return the seconds left on the leases, by the backend."""
    return [db_lock(key, using=using).holder().remaining for key in keys]


@EVERY
@sync_and_async
async def test_a_lease_lasts_for_its_new_ttl_from_now(do, using):
    """It may be longer or shorter. A renewal without a ttl keeps to it."""
    hold = await do.ask(db_lock("stock:7", using=using, ttl=30), "acquire")
    for ttl in (600, timedelta(seconds=9), 100):
        seconds = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
        for options in ({"ttl": ttl}, {}):
            await do.ask(hold, "renew", **options)
            (left,) = await do.sync(left_for_others, "stock:7", using=using)
            assert seconds - 5 < left <= seconds
            # The holder's own deadline always comes first.
            assert seconds - 5 < hold.remaining <= left + 0.1
    await do.ask(hold, "release")


@EVERY
def test_the_lease_is_renewed_as_often_as_its_new_ttl_needs(using):
    """The keeper does not sleep for a third of the ttl that was before."""
    with db_lock("stock:7", using=using, ttl=60) as hold:
        hold.renew(ttl=1.5)
        assert hold.remaining <= 1.5
        await_renewal(hold)
        assert hold.remaining <= 1.5
        assert is_taken("stock:7", using)


@EVERY
@sync_and_async
async def test_a_new_max_hold_counts_from_now(do, using):
    """For one key and for several. The lease then has the whole ttl of its lock."""
    options = {"using": using, "ttl": 30, "max_hold": 6}
    for keys in ["stock:7"], ["a", "b"]:
        hold = await do.ask(db_lock(*keys, **options), "acquire")
        assert hold.remaining <= 6
        for terms, most in (
            ({"max_hold": timedelta(minutes=1)}, 30),
            ({"max_hold": 12}, 12),
            ({}, 12),
            ({"max_hold": 60, "ttl": 20}, 20),
        ):
            await do.ask(hold, "renew", **terms)
            assert most - 5 < hold.remaining <= most
            for left in await do.sync(left_for_others, *keys, using=using):
                assert hold.remaining <= left + 0.1
                assert left <= most
        await do.ask(hold, "release")


@pytest.mark.front
def test_a_wrong_max_hold_is_refused_before_any_request(django_assert_num_queries):
    with db_lock("stock:7", max_hold=60) as hold, django_assert_num_queries(0):
        for wrong in 0, -1, "60", math.nan, True:
            with pytest.raises((TypeError, ValueError), match="max_hold"):
                hold.renew(max_hold=wrong)


@pytest.mark.front
def test_a_new_max_hold_in_a_guarded_transaction_and_in_the_next_process():
    """A guarded transaction keeps the key beyond it, and the lease ends after it."""
    lock = db_lock("stock:7", using="memory", ttl=300, max_hold=600)
    text = lock.acquire().detach()
    hold = resume_hold(text)
    hold.renew(max_hold=3600)
    again = resume_hold(hold.detach())
    assert 3590 < again.lock.max_hold <= 3600
    again.release()
    with pytest.raises(LockLost, match="its max_hold of 0.3 s"):
        with db_lock("stock:7", max_hold=60) as hold:
            with hold.atomic():
                hold.renew(max_hold=0.3)
            eventually(lambda: not hold.held)


@EVERY
@sync_and_async
async def test_several_keys_have_the_new_ttl(do, using):
    lock = db_lock("a", "b", "c", using=using)
    async with do.block(lock) as hold:
        await do.ask(hold, "renew", ttl=100)
        for left in await do.sync(left_for_others, *"abc", using=using):
            assert 95 < left <= 100
        assert 95 < hold.remaining <= 100
        assert [one.remaining > 95 for one in hold.holds] == [True] * 3


@pytest.mark.front
@for_each("using", [*ROWS, "memory"])
def test_a_shorter_lease_without_renewals_is_free_sooner(using, until):
    """The block ends with LockLost, whose text has the new ttl."""
    with (
        pytest.raises(LockLost, match="not renewed within its ttl of 0.3 s"),
        db_lock("stock:7", using=using, ttl=600, renew=False) as hold,
    ):
        hold.renew(ttl=0.3)
        until(lambda: not hold.held)
        until(lambda: not is_taken("stock:7", using))


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_new_ttl_does_not_exceed_max_hold(using):
    with db_lock("stock:7", using=using, ttl=5, max_hold=20) as hold:
        hold.renew(ttl=600)
        (left,) = left_for_others("stock:7", using=using)
        assert 15 < hold.remaining <= left + 0.1 <= 20.1


@pytest.mark.front
@for_each("using", ["default", "memory"])
@sync_and_async
async def test_a_wrong_ttl_is_refused(do, using):
    async with do.block(db_lock("stock:7", using=using, ttl=30)) as hold:
        for wrong in ("3", True):
            with pytest.raises(TypeError, match="ttl must be a number of seconds"):
                await do.ask(hold, "renew", ttl=wrong)
        for wrong in (0, -1, float("inf")):
            with pytest.raises(ValueError, match="ttl must be above 0"):
                await do.ask(hold, "renew", ttl=wrong)
        with pytest.raises(TypeError):
            await do.ask(hold, "renew", 60)
        assert hold.remaining <= 30


def test_a_ttl_that_no_observer_would_respect_is_refused():
    """With expiry='observed', other callers watch a row for the backend's ttl."""
    for lock in (db_lock("a", using="watching"), db_lock("a", "b", using="watching")):
        with lock as hold:
            with pytest.raises(
                ValueError, match=r"'a' cannot be renewed\. A ttl of 9 s"
            ):
                hold.renew(ttl=9)
            hold.renew(ttl=1)
            assert hold.remaining <= 1


@EVERY
@sync_and_async
async def test_a_lost_hold_is_not_renewed(do, using):
    hold = await do.ask(db_lock("stock:7", using=using), "acquire")
    if using == "session":
        await do.ask(hold, "release")
    else:
        await do.sync(lose, hold)
    with pytest.raises(LockLost):
        await do.ask(hold, "renew", ttl=60)
    assert hold.remaining == 0


@pytest.mark.front
def test_a_shared_hold_has_a_new_ttl():
    with db_semaphore("pool", 3) as hold:
        hold.renew(ttl=600)
        assert 595 < left_for_others("pool")[0] <= 600


def test_a_hold_in_a_transaction_is_only_checked():
    with transaction.atomic(), db_lock("stock:7") as hold:
        hold.renew(ttl=1)
        assert hold.remaining == float("inf")


@for_each("using", ROWS)
def test_a_new_ttl_in_a_guarded_transaction_counts_from_its_commit(using, until):
    """The transaction keeps the key in any case. After a rollback, renewals set it."""
    for fails in (False, True):
        with db_lock("stock:7", using=using, ttl=600) as hold:
            with transaction.atomic():
                # The block that is rolled back.
                with hold.atomic():
                    hold.renew(ttl=9)
                    assert hold.remaining <= 9
                transaction.set_rollback(fails)
            assert hold.remaining <= 9
            hold.check()
            until(lambda: left_for_others("stock:7", using=using)[0] <= 9, 30)


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_resumed_hold_keeps_the_new_ttl(using):
    hold = db_lock("stock:7", using=using, ttl=30).acquire()
    hold.renew(ttl=600)
    text = hold.detach()
    assert 595 < left_for_others("stock:7", using=using)[0] <= 600
    with resume_hold(text) as hold:
        hold.renew()
        assert 595 < hold.remaining <= 600


# Renewals that are under way.


@for_each("using", ["default", "memory"])
def test_no_earlier_renewal_in_the_background_comes_after_it(
    using, stops, threads, until
):
    """It would end the lease soon, although the holder counts on the new ttl."""
    with db_lock("stock:7", using=using, ttl=6) as hold:
        late = stops.at("renew", using)
        late.wait()
        renewing = threads(lambda: hold.renew(ttl=600))
        until(lambda: renewing.is_alive())
        late.go_on()
        renewing.join(30)
        left = left_for_others("stock:7", using=using)[0]
        assert 595 < hold.remaining <= left + 0.1


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_late_reply_to_another_renewal_does_not_extend_a_shorter_lease(
    using, stops, threads
):
    replied, go_on = threading.Event(), threading.Event()

    def late(usual, claims):
        left = usual()
        if not replied.is_set():
            replied.set()
            assert go_on.wait(30)
        return left

    with db_lock("stock:7", using=using, ttl=600, renew=False) as hold:
        stops.replace("renew", late, using)
        renewing = threads(hold.renew)
        assert replied.wait(30)
        hold.renew(ttl=9)
        go_on.set()
        renewing.join(30)
        assert hold.remaining <= 9
        stops.end()


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_late_renewal_by_another_thread_is_noticed(using, stops, threads, until):
    """It has shortened the lease. Its reply says so, and the next renewal mends it."""
    with db_lock("stock:7", using=using, ttl=8) as hold:
        late = stops.at("renew", using)
        renewing = threads(hold.renew)
        late.wait()
        hold.renew(ttl=600)
        assert hold.remaining > 595
        late.go_on()
        renewing.join(30)
        until(lambda: hold.remaining > 500)
        assert left_for_others("stock:7", using=using)[0] > 595


@pytest.mark.engine("sqlite")
def test_a_late_check_by_another_thread_is_noticed_without_a_reply(stops, threads):
    """It has shortened the lease, because it renews one that is almost over."""
    checked, go_on = threading.Event(), threading.Event()

    def late(usual, *args):
        checked.set()
        assert go_on.wait(30)
        usual()
        raise LockBackendError("the reply is lost")

    def check():
        with pytest.raises(LockBackendError):
            hold.check()

    with db_lock("stock:7", ttl=0.9) as hold:
        with stops.replace("verify", late):
            checking = threads(check)
            assert checked.wait(30)
            hold.renew(ttl=600)
            go_on.set()
            checking.join(30)
        assert hold.remaining <= left_for_others("stock:7")[0] + 0.1
        hold.check()


@pytest.mark.front
@for_each("using", ["default", "memory"])
def test_a_new_ttl_whose_request_fails_is_that_of_the_next_renewal(using, stops, until):
    def fail(usual, claims):
        raise LockBackendError("the server is gone")

    with db_lock("stock:7", using=using, ttl=8) as hold:
        with stops.replace("renew", fail, using), pytest.raises(LockBackendError):
            hold.renew(ttl=600)
        until(lambda: hold.remaining > 500)
        assert left_for_others("stock:7", using=using)[0] > 595


@SERVERS
def test_a_row_that_is_locked_for_a_moment_is_renewed_then(worker):
    """Nothing is renewed in silence for less than the new ttl."""
    refused = pytest.raises(LockBackendError, match="'stock:7' could not be ext")
    with db_lock("stock:7", ttl=60) as hold:
        with unlocked_after(0.1, worker, jobs.lock_row, "stock:7"):
            hold.renew(ttl=600)
            left = left_for_others("stock:7")[0]
            assert 595 < hold.remaining <= left + 0.1
        with worker.doing(jobs.lock_row, "stock:7"), refused:
            hold.renew(ttl=1200)


@SERVERS
def test_a_lease_becomes_shorter_although_its_row_is_locked_for_a_moment(worker):
    """Otherwise others would wait longer for a process that is killed then."""
    refused = pytest.raises(LockBackendError, match="'stock:7' could not be ext")
    with db_lock("stock:7", ttl=600) as hold:
        with unlocked_after(0.1, worker, jobs.lock_row, "stock:7"):
            hold.renew(ttl=60)
            assert 55 < hold.remaining <= left_for_others("stock:7")[0] + 0.1 <= 60.1
        with worker.doing(jobs.lock_row, "stock:7"), refused:
            hold.renew(ttl=30)
        assert 25 < hold.remaining <= 30
        with unlocked_after(0.1, worker, jobs.lock_row, "stock:7"):
            text = hold.detach(within=9)
    assert left_for_others("stock:7")[0] <= 9
    resume_hold(text).release()


@SERVERS
def test_a_session_stays_for_as_long_as_the_new_ttl(settings):
    """The server ends a session that is idle for longer than the ttl."""
    session = settings.DLOCKS["session"]
    settings.DLOCKS = settings.DLOCKS | {"session": session | {"OPTIONS": {"ttl": 0.6}}}
    with db_lock("stock:7", using="session", renew=False) as hold:
        hold.renew(ttl=60)
        time.sleep(2)
        assert hold.remaining > 50
        hold.check()
