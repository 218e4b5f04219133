"""Handover of a hold between processes, as in docs/how-to/handover.md."""

from __future__ import annotations

import time
from functools import partial

import pytest
import time_machine
from django.core.signing import BadSignature
from django.db import connection, transaction

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    lock_detached,
    resume_hold,
)
from dlocks.backends.memory import MemoryBackend
from dlocks.models import ResourceLock
from dlocks.testing import expire, frozen_clock, override_locks
from tests import jobs, pages
from tests.for_each import FAMILY, LEASES, for_each
from tests.promises.locks.keys import clear, is_taken, row

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]


def left(key):
    return row(key).seconds_left


# Handover to another process.


@pytest.mark.driver
@for_each("using", ["default", "optimistic", "insert", "prefixed"])
def test_a_detached_hold_is_busy_until_it_is_resumed(using, worker):
    """The row shows the process that resumed it."""
    lock = db_lock("export:7", using=using)
    with lock as hold:
        text = hold.detach()
    assert is_taken("export:7", using)
    with worker.doing(jobs.resume, text) as token:
        assert token > hold.token
        assert is_taken("export:7", using)
        assert lock.holder().holder.split(":")[1] == str(worker.process.pid)
    assert not is_taken("export:7", using)


@pytest.mark.driver
@FAMILY
def test_only_one_process_resumes_a_hold(using, workers):
    team = workers(4)
    text = db_lock("export:7", using=using).acquire().detach()
    for worker in team:
        worker.start(jobs.try_to_resume, text)
    answers = [worker.hear() for worker in team]
    assert sorted(map(str, answers))[1:] == ["LockLost"] * 3
    assert isinstance(min(answers, key=str), int)


def test_the_time_before_the_resumption_counts_for_max_hold():
    lock = db_lock("export:7", using="memory", ttl=300, max_hold=600)
    text = lock.acquire().detach(within=500)
    with time_machine.travel(time.time() + 400), resume_hold(text) as hold:
        assert 190 < hold.lock.max_hold <= 200
        assert hold.remaining <= 200


def test_a_detached_hold_survives_the_end_of_its_process(doomed):
    for end in ("close", "kill"):
        first = doomed()
        text = first.call(jobs.detach, "export:7")
        getattr(first, end)()
        assert is_taken("export:7")
        with resume_hold(text) as hold:
            assert hold.held
            assert is_taken("export:7")
        assert not is_taken("export:7")


# The process that detached the hold.


@LEASES
def test_a_detached_hold_can_no_longer_be_used(using, signalled):
    """The former holder waits for it like any caller, and the text works only once."""
    lock, seen = db_lock("export:7", using=using, timeout=0), signalled(lock_detached)
    hold = lock.acquire()
    text = hold.detach()
    assert seen == [(lock_detached, hold)]
    assert not hold.held
    assert hold.remaining == 0
    for use in (hold.check, hold.renew, hold.detach):
        with pytest.raises(LockLost, match="handed over"):
            use()
    hold.release()
    assert not lock.held()
    with pytest.raises(RuntimeError, match="was not acquired by this thread"):
        lock.release()
    with pytest.raises(LockTimeout):
        lock.acquire()
    with resume_hold(text) as resumed, lock as inner:
        assert inner is resumed
        hold.release()
        with pytest.raises(LockLost, match="already been resumed"):
            resume_hold(text)
        resumed.check()
    with pytest.raises(LockLost):
        resume_hold(text)


def test_a_detached_hold_is_not_renewed(until):
    hold = db_lock("export:7", using="brisk").acquire()
    text = hold.detach()
    until(lambda: left("export:7") < 0)
    with pytest.raises(LockLost, match="cannot be resumed"):
        resume_hold(text)


@pytest.mark.storage
@FAMILY
def test_a_detached_hold_lasts_for_the_given_time(using):
    """If it is cleared meanwhile, it cannot be resumed."""
    hold = db_lock("export:7", using=using, ttl=50).acquire()
    text = hold.detach(within=300)
    # SQLite computes the time from Julian days, whose last bit is 40 µs.
    assert 290 < left("export:7") < 300.001
    with resume_hold(text) as resumed:
        assert 40 < left("export:7") < 50.001
        assert 40 < resumed.remaining <= 50
    text = db_lock("export:7", using=using).acquire().detach()
    clear("export:7", using)
    with pytest.raises(LockLost):
        resume_hold(text)


@pytest.mark.driver
def test_a_detached_hold_is_not_shortened_by_a_late_renewal(stops, threads):
    """The renewal was sent before the hold is detached."""
    late = stops.at("renew")
    hold = db_lock("export:7", ttl=2.4).acquire()
    late.wait()
    thread = threads(lambda: hold.detach(within=300))
    # The thread waits for the reply, or is done without it.
    thread.done.wait(0.2)
    late.go_on()
    thread.join(30)
    assert left("export:7") > 290
    resume_hold(thread.results[0]).release()


# Refused handovers.


def test_a_hold_that_could_not_be_detached_is_renewed(stops, until):
    """The server has shortened the lease, although its reply was lost."""
    hold = db_lock("export:7", ttl=60).acquire()

    def renew_without_reply(usual, claims):
        usual()
        raise LockBackendError("the reply was lost")

    with stops.replace("renew", renew_without_reply):
        with pytest.raises(LockBackendError):
            hold.detach(within=5)
    assert hold.remaining <= 5
    until(lambda: hold.remaining > 50)
    assert hold.held
    assert left("export:7") > 50
    hold.release()


@LEASES
def test_a_refused_handover_changes_no_hold(using):
    """A hold cannot be detached if it is nested, of a transaction, ended or lost."""
    lock = db_lock("export:7", using=using)
    with lock as hold:
        with lock, pytest.raises(RuntimeError, match="acquired it 2 times"):
            hold.detach()
        for within in (0, -1, "5", float("nan")):
            with pytest.raises((TypeError, ValueError), match="within"):
                hold.detach(within=within)
        hold.check()
    with pytest.raises(LockLost):
        hold.detach()
    if using != "memory":
        with transaction.atomic(), lock as hold:
            with pytest.raises(RuntimeError, match="scope='lease'"):
                hold.detach()
            assert hold.held
    hold = lock.acquire()
    expire(hold)
    with pytest.raises(LockLost, match="reports that this hold has ended"):
        hold.detach()
    with pytest.raises(LockLost):
        hold.check()


class WithoutHandover(MemoryBackend):
    supports_handover = False


def test_a_backend_may_not_support_a_handover(settings):
    settings.DLOCKS = {"default": {"BACKEND": f"{__name__}.WithoutHandover"}}
    with db_lock("export:7") as hold:
        with pytest.raises(RuntimeError, match="Handover cannot hand 'export:7' ov"):
            hold.detach()
        hold.check()


def test_a_forged_text_is_refused_before_any_query(django_assert_num_queries):
    text = db_lock("export:7").acquire().detach()
    with django_assert_num_queries(0):
        for wrong in (text[:-1], "x" + text, "", "made:up:text"):
            with pytest.raises(BadSignature, match="detach"):
                resume_hold(wrong)
    resume_hold(text).release()


# Policy and holder.


def test_a_resumed_hold_keeps_the_rest_of_its_policy():
    policy = {"ttl": 50, "reentrant": False, "release_at": "exit"}
    lost = []
    with override_locks("memory"), frozen_clock() as clock:
        hold = db_lock("export:7", max_hold=1000, min_hold=500, **policy).acquire()
        for _ in range(10):
            clock.tick(20)
        with resume_hold(hold.detach(), on_lost=lost.append) as resumed:
            lock = resumed.lock
            assert (lock.key, lock.scope) == ("export:7", "lease")
            assert (lock.ttl, lock.reentrant, lock.release_at) == (50, False, "exit")
            assert 290 < lock.min_hold <= 300
            assert 790 < lock.max_hold <= 800
            assert lock.on_lost == lost.append
        assert lock.holder().remaining > 250
    equal = db_lock("stock:7", min_hold=5.0, max_hold=5.0).acquire()
    with resume_hold(equal.detach()) as resumed:
        assert resumed.held
    ResourceLock.objects.all().delete()


# The backend interface.


@pytest.mark.storage
@FAMILY
def test_a_resumption_with_unknown_outcome_leaves_the_key_free(using, stops):
    text = db_lock("export:7", using=using).acquire().detach()

    def lose_the_reply(usual, *claims):
        usual()
        raise LockBackendError("the connection broke")

    with stops.replace("exchange", lose_the_reply), pytest.raises(LockBackendError):
        resume_hold(text)
    assert not is_taken("export:7", using)


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@FAMILY
def test_a_hold_is_detached_and_resumed_inside_transactions(using):
    """A rollback does not undo the lease, which is outside of the transactions."""
    with transaction.atomic():
        text = db_lock("export:7", using=using, scope="lease").acquire().detach()
        transaction.set_rollback(True)
    with transaction.atomic():
        hold = resume_hold(text)
        transaction.set_rollback(True)
    hold.check()
    hold.release()
    assert not is_taken("export:7", using)


# The documentation page.


def test_the_examples_of_the_handover_page(threads):
    page, sent = pages.run("how-to/handover"), []
    page.start_export(7, sent.append)
    assert is_taken("export:7")
    assert page.export(sent.pop()) == "exported export:7"
    assert not is_taken("export:7")

    def fail(text):
        raise KeyError

    with pytest.raises(KeyError):
        page.start_export(7, fail)
    assert not is_taken("export:7")
    if connection.vendor != "sqlite":
        page.start_export_after_commit(8, sent.append)
        assert page.export(sent.pop()) == "exported export:8"
    started = []
    page.start_import(
        lambda function, *arguments: started.append(
            threads(partial(function, *arguments))
        ),
        lambda: is_taken("import"),
    )
    started[0].join(20)
    assert started[0].results == [True]
    assert not is_taken("import")
