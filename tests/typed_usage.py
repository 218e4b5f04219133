"""Decorated code as type checkers see it.

``make lint`` checks it, and a test runs it.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import assert_type

from django.http import HttpRequest, HttpResponse
from django.views import View

from dlocks import (
    Hold,
    Holder,
    LeaderElection,
    Lock,
    LockShutDown,
    LockTimeout,
    ReadWriteLock,
    Waiter,
    current_hold,
    db_lock,
    db_rwlock,
    db_semaphore,
    locked_view,
    run_once,
)
from dlocks.decorators import LockDecorator
from tests.models import Article, Machine


@db_lock("report:{region}")
def build(region: str, day: int = 1) -> list[str]:
    return [region]


@db_lock("report:{region}", busy="skip")
def skip(region: str) -> list[str]:
    return [region]


def seven(error: LockTimeout, region: str) -> int:
    return 7


@db_lock("report:{region}", busy=seven)
def otherwise(region: str) -> list[str]:
    return [region]


def key_of(region: str) -> str:
    return region


@db_lock(key_of)
def named(region: str) -> list[str]:
    return [region]


@db_lock("report:{region}")
async def later(region: str) -> list[str]:
    return [region]


@db_lock("report:{region}", busy="skip")
async def later_or_not(region: str) -> list[str]:
    return [region]


@run_once("job:{region}", min_hold=timedelta(minutes=1), max_hold=3600, note="job")
def job(region: str) -> list[str]:
    return [region]


@run_once("job:{region}", min_hold=60, busy="raise")
def job_or_not(region: str) -> list[str]:
    current_hold().renew(max_hold=timedelta(hours=1))
    return [region]


@run_once("job:{region}", min_hold=60, busy=seven)
def job_or_seven(region: str) -> list[str] | None:
    return None


@locked_view("report:{pk}", timeout=timedelta(seconds=1), note="report")
def view(request: HttpRequest, pk: int) -> HttpResponse:
    return HttpResponse()


@locked_view("report:{pk}")
class Reports(View):
    extra = 7


def check() -> None:
    assert_type(db_lock("report"), Lock)
    assert_type(db_lock("report", busy="skip"), LockDecorator[None])
    assert_type(build("north", day=2), list[str])
    assert_type(skip("north"), list[str] | None)
    assert_type(otherwise("north"), list[str] | int)
    assert_type(named("north"), list[str])
    assert_type(job("north"), list[str] | None)
    assert_type(job_or_not("south"), list[str])
    assert_type(job_or_seven("west"), list[str] | int | None)
    with suppress(RuntimeError):
        assert_type(current_hold(), Hold)
    assert_type(view(HttpRequest(), 7), HttpResponse)
    assert_type(Reports.extra, int)
    # Calls that fail at run time are rejected by the type checker too.
    try:
        build(7)  # type: ignore[arg-type]
        build("north", hour=2)  # type: ignore[call-arg]
    except (TypeError, LockTimeout):
        pass
    try:
        with db_lock("report", busy="skip"):  # type: ignore[attr-defined]
            pass
    except TypeError:
        pass


def check_names() -> None:
    # A misspelt name is rejected by the type checker too.
    with suppress(ImportError):
        from dlocks import db_lok  # type: ignore[attr-defined]

        assert not db_lok


def check_options() -> None:
    assert_type(db_lock("a", timeout=timedelta(seconds=3), ttl=30), Lock)
    assert_type(db_lock("a", min_hold=1, max_hold=None, scope="lease"), Lock)
    assert_type(db_rwlock("a", timeout=None), ReadWriteLock)
    assert_type(db_semaphore("a", 3, renew=False, note="count"), Lock)
    # A misspelt option is rejected by the type checker too.
    for wrong in (
        lambda: db_lock("a", timout=3),  # type: ignore[call-overload]
        lambda: db_lock("a", "b", timout=3),  # type: ignore[call-overload]
        lambda: db_lock("a:{b}", busy="skip", timout=3),  # type: ignore[call-overload]
        lambda: db_lock("a", ttl="3"),  # type: ignore[call-overload]
        lambda: db_lock("a", note=3),  # type: ignore[call-overload]
        lambda: db_rwlock("a", timout=3),  # type: ignore[call-arg]
        lambda: db_semaphore("a", 3, timout=3),  # type: ignore[call-arg]
        lambda: run_once("a", min_hold=1, timeout=3),  # type: ignore[call-overload]
        lambda: locked_view("a", timout=3),  # type: ignore[call-arg]
        # So are the arguments of threading.Lock and redis-py.
        lambda: db_lock("a").acquire(blocking=False),  # type: ignore[arg-type]
        lambda: db_lock("a", "b").acquire(True, 5),  # type: ignore[arg-type]
    ):
        try:
            wrong()
        except TypeError:
            continue
        raise AssertionError(wrong)


def check_several(keys: list[str]) -> None:
    assert_type(db_lock("a", "b"), Lock)
    with db_lock("a", "b", timeout=3) as hold:
        assert_type(hold, Hold)
        hold.renew(ttl=timedelta(minutes=1))
        assert_type([one.token for one in hold.holds], list[int])
    with db_lock("a", "b", "c").acquire() as hold:
        assert_type(hold.holds[0], Hold)
    assert_type(db_lock(*keys), Lock)
    tried = db_lock("a", "b").try_acquire(timeout=timedelta(seconds=1))
    assert_type(tried, Hold | None)
    if tried is not None:
        tried.release()


def check_elections() -> None:
    election = LeaderElection("a")
    assert_type(election.candidates(), list[Waiter])
    assert_type(election.leader(), Holder | None)
    assert_type(election.wait(timedelta(seconds=1)), bool)
    assert_type(election.stop(timeout=0), bool)
    assert_type(election.resign(), bool)


def check_tries() -> None:
    assert_type(db_lock("a").try_acquire(timeout=None), Hold | None)
    try:
        db_lock("b").try_acquire(timeout="3")  # type: ignore[arg-type]
    except LockShutDown as error:
        assert_type(error.key, str)
    except TypeError:
        db_lock("a").release()


def check_models() -> None:
    article = assert_type(Article.objects.create(title="Draft"), Article)
    assert_type(
        Article.objects.filter(pk=article.pk).only("title").first(), Article | None
    )
    assert_type(Article.objects.filter(pk=article.pk).update(title="Final"), int)
    assert_type(Article.objects.bulk_update([], ["title"]), int)
    with db_lock("press") as hold:
        machine = assert_type(Machine.objects.fenced(hold).create(state="on"), Machine)
        assert_type(Machine.objects.claim(machine.pk, hold), Machine)
        fenced = Machine.objects.fenced(hold).filter(state="on")
        assert_type(fenced.update(steps=1), int)


def check_callers() -> None:
    assert_type(db_lock("a").holders(), list[Holder])
    assert_type(db_lock("a", "b").waiters(), list[Waiter])


async def acheck_several() -> None:
    assert_type(await db_lock("a").aholders(), list[Holder])
    assert_type(await db_lock("a").awaiters(), list[Waiter])
    assert_type(await db_lock("a").atry_acquire(timeout=0.5), Hold | None)
    await db_lock("a").arelease()
    async with db_lock("a", "b") as hold:
        assert_type(hold, Hold)
        assert_type(await hold.aqueue_length(), int)
        await hold.arenew(ttl=60)


async def acheck() -> None:
    assert_type(await later("north"), list[str])
    assert_type(await later_or_not("north"), list[str] | None)
