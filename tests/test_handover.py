"""A hold that one process begins and another one ends, as docs/how-to/handover.md has it."""

from __future__ import annotations

import threading
import time

import pytest
from django.core.signing import BadSignature
from django.db import connection, transaction

from dlocks import LockBackendError, LockLost, LockTimeout, aresume_hold, db_lock, handover, lock_detached, resume_hold
from dlocks.backends.base import Claim
from dlocks.backends.memory import MemoryBackend
from dlocks.conf import backends
from dlocks.keeper import keeper
from dlocks.models import ResourceLock
from dlocks.testing import expire
from tests import jobs, pages

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
EVERY = pytest.mark.parametrize("using", ["default", "optimistic", "insert", "memory"])


def left(key):
    return ResourceLock.objects.by_clock().get(pk=key).seconds_left


# To another process.


@pytest.mark.parametrize("using", ["default", "optimistic", "insert", "prefixed"])
def test_another_process_resumes_the_hold_and_nobody_else_has_it_in_between(using, workers, is_busy):
    (worker,) = workers(1)
    with db_lock("export:7", using=using) as hold:
        text = hold.detach()
    assert is_busy("export:7", using)
    worker.start(jobs.resume, text)
    token = worker.hear()
    assert token > hold.token
    assert is_busy("export:7", using)
    worker.tell()
    assert worker.hear() == "released"
    assert not is_busy("export:7", using)


@FAMILY
def test_of_many_that_have_the_text_one_resumes(using, workers):
    team = workers(4)
    text = db_lock("export:7", using=using).acquire().detach()
    for worker in team:
        worker.start(jobs.try_to_resume, text)
    answers = [worker.hear() for worker in team]
    assert sorted(map(str, answers))[1:] == ["LockLost"] * 3
    assert isinstance(min(answers, key=str), int)


def test_a_process_resumes_what_one_that_is_gone_has_begun(doomed, is_busy):
    first = doomed()
    text = first.call(jobs.detach, "export:7")
    first.kill()
    with resume_hold(text) as hold:
        assert hold.held
        assert is_busy("export:7")
    assert not is_busy("export:7")


def test_the_time_on_its_way_counts_for_max_hold(monkeypatch):
    text = db_lock("export:7", using="memory", ttl=300, max_hold=600).acquire().detach(within=500)
    with monkeypatch.context() as later:
        now = time.time
        later.setattr(handover.time, "time", lambda: now() + 400)
        with resume_hold(text) as hold:
            assert 190 < hold.lock.max_hold <= 200
            assert hold.remaining <= 200


def test_a_process_that_ends_normally_does_not_take_along_what_it_gave_away(doomed, is_busy):
    first = doomed()
    text = first.call(jobs.detach, "export:7")
    first.close()
    assert is_busy("export:7")
    resume_hold(text).release()


def test_a_backend_that_cannot_is_named(monkeypatch):
    monkeypatch.setattr(MemoryBackend, "supports_handover", False)
    with db_lock("export:7", using="memory") as hold:
        with pytest.raises(RuntimeError, match="MemoryBackend cannot hand 'export:7' over"):
            hold.detach()
        hold.check()


# Where it was.


@EVERY
def test_the_first_can_no_longer_use_it(using):
    hold = db_lock("export:7", using=using).acquire()
    text = hold.detach()
    assert not hold.held
    assert hold.remaining == 0
    for use in (hold.check, hold.renew, hold.detach):
        with pytest.raises(LockLost, match="handed over"):
            use()
    hold.release()
    with resume_hold(text) as resumed:
        hold.release()
        resumed.check()


@EVERY
def test_who_gave_it_away_waits_like_everybody(using):
    text = db_lock("export:7", using=using).acquire().detach()
    with pytest.raises(LockTimeout):
        db_lock("export:7", using=using, timeout=0).acquire()
    with resume_hold(text) as hold, db_lock("export:7", using=using, timeout=0) as inner:
        assert inner is hold


def test_it_is_signalled_as_neither_released_nor_lost():
    told = []
    receiver = lambda hold, **kwargs: told.append(hold)  # noqa: E731
    lock_detached.connect(receiver)
    try:
        hold = db_lock("export:7").acquire()
        text = hold.detach()
    finally:
        lock_detached.disconnect(receiver)
    assert told == [hold]
    resume_hold(text).release()


def test_nothing_renews_it_until_it_is_resumed(until):
    hold = db_lock("export:7", using="brisk").acquire()
    text = hold.detach()
    until(lambda: left("export:7") < 0)
    with pytest.raises(LockLost, match="cannot be resumed"):
        resume_hold(text)


@FAMILY
def test_it_lasts_for_as_long_as_the_message_may_wait(using):
    hold = db_lock("export:7", using=using, ttl=50).acquire()
    text = hold.detach(within=300)
    # SQLite counts it from Julian days, whose last bit is 40 µs.
    assert 290 < left("export:7") < 300.001
    with resume_hold(text) as resumed:
        assert 40 < left("export:7") < 50.001
        assert 40 < resumed.remaining <= 50


def test_a_detached_hold_is_not_cut_short_by_a_renewal_on_its_way(monkeypatch, until):
    """The keeper had sent one when it was given away."""
    backend = backends["default"]
    hold = db_lock("export:7").acquire()
    on_its_way, go_on = threading.Event(), threading.Event()
    renew = backend.renew

    def slow(claims):
        if not on_its_way.is_set():
            on_its_way.set()
            go_on.wait(30)
        return renew(claims)

    monkeypatch.setattr(backend, "renew", slow)
    hold.renew_at = 0
    keeper.look()
    assert on_its_way.wait(30)
    texts = []
    thread = threading.Thread(target=lambda: texts.append(hold.detach(within=300)))
    thread.start()
    # Until it waits for the keeper, or is done without it.
    until(lambda: any(desk.jobs for desk in keeper._desks.values()) or texts)
    go_on.set()
    thread.join(30)
    keeper.catch_up()
    assert left("export:7") > 290
    resume_hold(texts[0]).release()


# What cannot be handed over, or resumed.


def test_what_a_transaction_holds_cannot_be_handed_over():
    with transaction.atomic(), db_lock("export:7") as hold:
        with pytest.raises(RuntimeError, match="scope='lease'"):
            hold.detach()
        assert hold.held


@EVERY
def test_what_was_entered_twice_cannot_be_handed_over(using):
    lock = db_lock("export:7", using=using)
    with lock as hold, lock:
        with pytest.raises(RuntimeError, match="entered 2 times"):
            hold.detach()
        assert hold.held


@EVERY
def test_what_has_ended_or_is_lost_cannot_be_handed_over(using):
    with db_lock("export:7", using=using) as hold:
        pass
    with pytest.raises(LockLost):
        hold.detach()
    hold = db_lock("export:7", using=using).acquire()
    expire(hold)
    with pytest.raises(LockLost, match="no longer this hold's"):
        hold.detach()
    with pytest.raises(LockLost):
        hold.check()


@pytest.mark.parametrize("within", [0, -1, "5", float("nan")])
def test_a_time_that_makes_no_sense_is_refused_and_the_hold_goes_on(within):
    with db_lock("export:7") as hold:
        with pytest.raises((TypeError, ValueError), match="within"):
            hold.detach(within=within)
        hold.check()


def test_a_hold_that_could_not_be_handed_over_is_still_there(monkeypatch):
    def fail(claims):
        raise LockBackendError("the database is away")

    with db_lock("export:7") as hold:
        with monkeypatch.context() as patch:
            patch.setattr(backends["default"], "renew", fail)
            with pytest.raises(LockBackendError, match="away"):
                hold.detach()
        hold.check()
        with db_lock("export:7", timeout=0) as inner:
            assert inner is hold


@EVERY
def test_a_text_can_be_resumed_once_only(using):
    text = db_lock("export:7", using=using).acquire().detach()
    with resume_hold(text) as hold:
        with pytest.raises(LockLost, match="resumed it already"):
            resume_hold(text)
        hold.check()
    with pytest.raises(LockLost):
        resume_hold(text)


@FAMILY
def test_what_was_cleared_cannot_be_resumed(using):
    text = db_lock("export:7", using=using).acquire().detach()
    row = ResourceLock.objects.get(pk="export:7")
    assert backends[using].clear("export:7", row.version)
    with pytest.raises(LockLost):
        resume_hold(text)


def test_a_text_that_was_changed_or_made_up_is_refused_before_any_query(django_assert_num_queries):
    text = db_lock("export:7").acquire().detach()
    with django_assert_num_queries(0):
        for wrong in (text[:-1], "x" + text, "", "made:up:text"):
            with pytest.raises(BadSignature):
                resume_hold(wrong)
    resume_hold(text).release()


# What goes with it.


def test_its_policy_goes_with_it_less_what_is_over():
    hold = db_lock("export:7", ttl=50, max_hold=1000, at_least=500, reentrant=False, release_at="exit").acquire()
    hold._granted_at -= 200
    hold._last_at -= 200
    lost = []
    with resume_hold(hold.detach(), on_lost=lost.append) as resumed:
        lock = resumed.lock
        assert (lock.key, lock.using, lock.scope) == ("export:7", "default", "lease")
        assert (lock.ttl, lock.reentrant, lock.release_at) == (50, False, "exit")
        assert 290 < lock.at_least <= 300
        assert 790 < lock.max_hold <= 800
        assert lock.on_lost == lost.append
    assert left("export:7") > 250


@FAMILY
def test_the_row_shows_who_has_it_now(using, workers):
    (worker,) = workers(1)
    text = db_lock("export:7", using=using).acquire().detach()
    worker.start(jobs.resume, text)
    worker.hear()
    assert db_lock("export:7", using=using).holder().holder.split(":")[1] == str(worker.process.pid)
    worker.tell()
    worker.hear()


@EVERY
async def test_coroutines_hand_over_too(using):
    hold = await db_lock("export:7", using=using).aacquire()
    text = await hold.adetach()
    async with await aresume_hold(text) as resumed:
        await resumed.acheck()
        assert (await db_lock("export:7", using=using).atry_acquire()) is resumed
        await resumed.arelease()


# The waist.


@EVERY
def test_an_exchange_whose_reply_was_lost_says_yes_again(using):
    backend = backends[using]
    claim, successor = (Claim(key="export:7", ttl=30) for _ in range(2))
    first = backend.acquire(claim)
    second = backend.exchange(claim, successor)
    third = backend.exchange(claim, successor)
    assert first.token < second.token < third.token
    assert backend.exchange(claim, Claim(key="export:7", ttl=30)) is None
    assert not backend.release(claim)
    assert backend.release(successor)
    assert backend.exchange(successor, claim) is None


@FAMILY
def test_a_resumption_whose_outcome_is_unknown_leaves_the_key_free(using, monkeypatch, is_busy):
    backend = backends[using]
    text = db_lock("export:7", using=using).acquire().detach()
    exchange = backend.exchange

    def lose_the_reply(*claims):
        exchange(*claims)
        raise LockBackendError("the connection broke")

    monkeypatch.setattr(backend, "exchange", lose_the_reply)
    with pytest.raises(LockBackendError):
        resume_hold(text)
    assert not is_busy("export:7", using)


@pytest.mark.engine("postgresql", "mariadb")
@FAMILY
def test_it_is_handed_over_and_resumed_from_inside_of_transactions(using, is_busy):
    """The lease is beside them: a rollback takes nothing of it back."""
    with transaction.atomic():
        text = db_lock("export:7", using=using, scope="lease").acquire().detach()
        transaction.set_rollback(True)
    with transaction.atomic():
        hold = resume_hold(text)
        transaction.set_rollback(True)
    hold.check()
    hold.release()
    assert not is_busy("export:7", using)


# The page.


def test_the_example_of_the_page(workers, is_busy):
    page, sent = pages.run("how-to/handover"), []
    page.start_export(7, sent.append)
    assert is_busy("export:7")
    assert page.export(sent.pop()) == "exported export:7"
    assert not is_busy("export:7")

    def fail(text):
        raise KeyError

    with pytest.raises(KeyError):
        page.start_export(7, fail)
    assert not is_busy("export:7")
    if connection.vendor != "sqlite":
        page.start_export_after_commit(8, sent.append)
        assert page.export(sent.pop()) == "exported export:8"


def test_a_hold_is_resumed_though_it_has_to_be_kept_for_as_long_as_it_may_be():
    hold = db_lock("stock:7", at_least=5.0, max_hold=5.0).acquire()
    with resume_hold(hold.detach()) as resumed:
        assert resumed.held
    ResourceLock.objects.all().delete()


def test_a_hold_whose_handover_was_interrupted_is_given_back(monkeypatch, elsewhere):
    """Nobody will ever have the text."""

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("dlocks.handover.signing.dumps", interrupted)
    with pytest.raises(KeyboardInterrupt), db_lock("stock:7") as hold:
        hold.detach(within=300)
    monkeypatch.undo()
    elsewhere(lambda: db_lock("stock:7", timeout=5).acquire().release())
