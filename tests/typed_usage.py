"""What type checkers make of decorated code; ``make lint`` checks it, and a test runs it."""

from __future__ import annotations

from typing import assert_type

from django.http import HttpRequest, HttpResponse
from django.views import View

from dlocks import Lock, LockTimeout, db_lock, locked_view, run_once
from dlocks.decorators import LockDecorator


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


@db_lock(lambda region: region)
def named(region: str) -> list[str]:
    return [region]


@db_lock("report:{region}")
async def later(region: str) -> list[str]:
    return [region]


@db_lock("report:{region}", busy="skip")
async def later_or_not(region: str) -> list[str]:
    return [region]


@run_once("job:{region}", at_least=60)
def job(region: str) -> list[str]:
    return [region]


@locked_view("report:{pk}")
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
    assert_type(view(HttpRequest(), 7), HttpResponse)
    assert_type(Reports.extra, int)
    # What is not there in calls is not there for the checker either.
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


async def acheck() -> None:
    assert_type(await later("north"), list[str])
    assert_type(await later_or_not("north"), list[str] | None)
