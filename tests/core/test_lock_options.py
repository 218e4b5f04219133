"""The options of locks: their names, and durations as numbers or ``timedelta``."""

import asyncio
import copy
import functools
from datetime import timedelta

import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from django.views import View

from dlocks import (
    LeaderElection,
    Lock,
    LockTimeout,
    MultiHold,
    MultiLock,
    ReadWriteLock,
    SingleInstance,
    db_lock,
    db_rwlock,
    db_semaphore,
    locked_view,
    resume_hold,
    run_once,
)
from dlocks.optimistic import retry_on_conflict
from dlocks.testing import frozen_clock, held_elsewhere, override_locks
from tests.internals import BackendHandler, LockDecorator, MemoryBackend

pytestmark = [pytest.mark.front, pytest.mark.once]


@pytest.fixture(autouse=True)
def memory_locks():
    with override_locks("memory"):
        yield


POLICY = (
    "timeout, ttl, max_hold, min_hold, reentrant, renew, scope, takeover, fair,"
    " release_at, on_lost"
)


# Names.


@pytest.mark.django_db
def test_an_unknown_option_is_refused_before_any_query(django_assert_num_queries):
    """The error says which options there are, and how not to wait."""
    with django_assert_num_queries(0), pytest.raises(TypeError) as raised:
        db_lock("a", blocking=False)
    assert str(raised.value) == (
        f"db_lock() has no option 'blocking'. Options: {POLICY}, shared, busy, using."
        " For a lock that does not wait, use timeout=0."
    )


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("timout", "timeout"),
        ("blocking_timeout", "timeout"),
        ("max_holds", "max_hold"),
        ("reentrent", "reentrant"),
        ("onlost", "on_lost"),
        ("bussy", "busy"),
        ("usin", "using"),
    ],
)
def test_a_misspelt_option_is_named_with_the_right_one(wrong, right):
    """One letter too many or too few does not have to be searched for."""
    with pytest.raises(TypeError) as raised:
        db_lock("a", **{wrong: 3})
    assert str(raised.value) == (
        f"db_lock() has no option {wrong!r}. Did you mean {right!r}?"
        f" Options: {POLICY}, shared, busy, using."
    )


def test_an_option_unlike_any_other_has_no_suggestion():
    with pytest.raises(TypeError) as raised:
        db_lock("a", colour="red")
    assert str(raised.value) == (
        f"db_lock() has no option 'colour'. Options: {POLICY}, shared, busy, using."
    )


def test_a_lock_on_several_keys_has_no_busy():
    """It is no decorator, which takes one key."""
    with pytest.raises(TypeError) as raised:
        db_lock("a", "b", busy="skip")
    assert str(raised.value) == (
        "db_lock() of several keys has no option 'busy'."
        f" Options: {POLICY}, shared, using. A decorator takes the lock on one key."
    )
    with pytest.raises(TypeError, match=r"several keys has no option 'timout'\. Did"):
        db_lock("a", "b", timout=3)


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (functools.partial(db_rwlock, "a"), "db_rwlock"),
        (functools.partial(db_semaphore, "a", 3), "db_semaphore"),
    ],
)
def test_shared_locks_refuse_unknown_options(make, function):
    with pytest.raises(TypeError) as raised:
        make(timout=3)
    assert str(raised.value) == (
        f"{function}() has no option 'timout'. Did you mean 'timeout'?"
        f" Options: {POLICY}, using."
    )
    with pytest.raises(TypeError, match="For a read lock, use db_rwlock"):
        make(shared=True)


@pytest.mark.parametrize("make", [db_lock, db_rwlock])
def test_permits_are_an_option_of_semaphores_only(make):
    with pytest.raises(
        TypeError,
        match=r"has no option 'permits'\. .* use db_semaphore\(key, permits\)\.$",
    ):
        make("a", permits=3)


def test_a_schedule_refuses_options_of_other_locks():
    """It never waits, and its times are those of the schedule."""
    for name in ("timeout", "ttl", "busy", "reentrant"):
        with pytest.raises(TypeError) as raised:
            run_once("a", min_hold=1, **{name: 3})
        assert str(raised.value) == (
            f"run_once() has no option {name!r}. Options: min_hold, max_hold, renew,"
            " scope, takeover, fair, release_at, on_lost, using. It does not wait, and"
            " skips the job while the key is held. To change that, use db_lock() as"
            " the decorator."
        )
    with pytest.raises(TypeError, match="Did you mean 'max_hold'"):
        run_once("a", min_hold=1, maxhold=3)


def test_a_view_refuses_unknown_options():
    with pytest.raises(TypeError) as raised:
        locked_view("a", retry=3)
    assert str(raised.value) == (
        "locked_view() has no option 'retry'. Did you mean 'retry_after'? Options:"
        " status, retry_after, timeout, ttl, max_hold, min_hold, reentrant, renew,"
        " scope, takeover, fair, release_at, on_lost, shared, using."
    )
    with pytest.raises(
        TypeError, match=r"To choose the response, use db_lock\(key, busy=…\)"
    ):
        locked_view("a", busy="skip")


def test_a_command_refuses_unknown_options():
    command = SingleInstance()
    command.lock_policy = {"timout": 3}
    with pytest.raises(TypeError) as raised:
        command.get_lock()
    assert str(raised.value) == (
        "lock_policy has no option 'timout'. Did you mean 'timeout'?"
        f" Options: {POLICY}, shared, using."
    )


# A decorator without parentheses.


def key_of(value):
    return f"key:{value}"


@functools.cache
def made_key(value):
    return f"key:{value}"


def test_a_decorator_without_parentheses_fails_when_decorating():
    """Not at the first call, which may be much later."""
    expected = "has no key. Write it in parentheses"
    with pytest.raises(TypeError, match=expected) as raised:

        @db_lock
        def build(region):
            """Never called."""

    assert str(raised.value) == (
        "@db_lock on 'build' has no key. Write it in parentheses, as in"
        " @db_lock('report')."
    )
    with pytest.raises(TypeError, match=expected):

        @db_lock
        async def build_later(region):
            """Never called."""

    with pytest.raises(TypeError, match=expected):

        @db_lock
        @functools.cache
        def build_once(region):
            """Never called."""

    with pytest.raises(TypeError, match=expected):

        class Jobs:
            @db_lock
            def build(self):
                """Never called."""

            @db_lock
            @staticmethod
            def build_static():
                """Never called."""

    with pytest.raises(TypeError, match=expected):

        class Others:
            @db_lock
            @staticmethod
            def build_static():
                """Never called."""

    with pytest.raises(TypeError, match=expected):

        @db_lock
        class Reports(View):
            """Never called."""

    with pytest.raises(TypeError, match="@locked_view on 'show' has no key"):

        @locked_view
        def show(request):
            """Never called."""


def test_module_code_is_decorated_with_parentheses_too():
    code = "from dlocks import db_lock\n@db_lock\ndef build(region): pass\n"
    with pytest.raises(TypeError, match="@db_lock on 'build' has no key"):
        exec(code, {"__name__": "jobs"})


class Keys:
    @staticmethod
    def static(value):
        return f"key:{value}"

    def method(self, value):
        return f"key:{value}"

    def __call__(self, value):
        return f"key:{value}"


def test_a_function_as_the_key_can_have_any_form():
    """Only a function that is just being defined counts as the decorated one."""

    def local(value):
        return f"key:{value}"

    another = local
    for key in (
        key_of,
        made_key,
        local,
        another,
        lambda value: f"key:{value}",
        Keys.static,
        Keys().method,
        Keys(),
        functools.partial("{}:{}".format, "key"),
    ):

        @db_lock(key, timeout=0)
        def build(value):
            assert db_lock(f"key:{value}").locked()
            return value

        assert build("7") == "7"

    class Private:
        def __key(value):  # noqa: N805 (a key function)
            return f"key:{value}"

        @staticmethod
        @db_lock(__key, timeout=0)
        def build(value):
            return value

    assert Private.build("7") == "7"

    @db_lock(str, timeout=0)
    def build_text(value):
        return value

    assert build_text("7") == "7"


# Durations.


SECONDS = timedelta(minutes=1, seconds=30)


def test_every_duration_of_a_lock_can_be_a_timedelta():
    """It is the same lock as with the number of seconds."""
    names = ("timeout", "ttl", "max_hold", "min_hold")
    options = dict.fromkeys(names, SECONDS)
    for make in (db_lock, db_rwlock, functools.partial(db_semaphore, permits=3)):
        assert make("a", **options) == make("a", **dict.fromkeys(names, 90))
    for lock in (db_lock("a", **options), db_lock("a", "b", **options)):
        assert [getattr(lock, name) for name in names] == [90.0] * 4
        assert lock == copy.copy(lock)
    with held_elsewhere("a"), pytest.raises(LockTimeout) as raised:
        db_lock("a", timeout=timedelta(milliseconds=20)).acquire()
    assert raised.value.timeout == 0.02


@pytest.mark.parametrize("name", ["timeout", "ttl", "max_hold", "min_hold"])
def test_an_impossible_timedelta_is_refused(name):
    for wrong in (timedelta(seconds=-1), timedelta(days=40_000)):
        with pytest.raises(ValueError, match=f"{name} must be "):
            db_lock("a", **{name: wrong})
    with pytest.raises(TypeError, match="a number of seconds or a timedelta, not str"):
        db_lock("a", **{name: "3"})


def test_schedules_and_views_accept_a_timedelta():
    runs = []

    @run_once("job", min_hold=timedelta(hours=1), max_hold=timedelta(hours=2))
    def job():
        runs.append(1)

    job()
    job()
    assert runs == [1]
    with pytest.raises(ValueError, match="max_hold"):
        run_once("job", min_hold=timedelta(seconds=2), max_hold=1)

    @locked_view(
        "page",
        timeout=timedelta(milliseconds=1),
        retry_after=timedelta(milliseconds=2500),
    )
    def page(request):
        return HttpResponse("done")

    request = RequestFactory().get("/")
    assert page(request).content == b"done"
    with held_elsewhere("page"):
        assert page(request)["Retry-After"] == "3"


def test_elections_accept_a_timedelta(until):
    election = LeaderElection("a", ttl=timedelta(seconds=5))
    assert election._lock.ttl == 5.0
    waited = []
    election.on_elected = lambda hold: waited.append(
        election.wait(timedelta(milliseconds=1))
    )
    with election:
        until(lambda: waited)
        assert election.stop(timedelta(seconds=30))
    assert waited == [True]


@pytest.mark.parametrize("wrong", [timedelta(0), timedelta(seconds=-3)])
def test_a_detached_hold_can_be_kept_for_a_timedelta(wrong):
    hold = db_lock("a").acquire()
    with pytest.raises(ValueError, match="within must be above 0"):
        hold.detach(within=wrong)
    with frozen_clock():
        text = hold.detach(within=SECONDS)
        assert db_lock("a").holder().remaining == pytest.approx(90, abs=2)
    resume_hold(text).release()


def test_the_helpers_for_tests_accept_a_timedelta():
    with frozen_clock() as clock, held_elsewhere("a", ttl=SECONDS):
        clock.tick(timedelta(seconds=89))
        assert db_lock("a").locked()
        clock.tick(timedelta(seconds=2))
        assert not db_lock("a").locked()


def test_a_retry_accepts_a_timedelta():
    retry_on_conflict(backoff=timedelta(0), max_backoff=SECONDS)
    with pytest.raises(ValueError, match="backoff must be"):
        retry_on_conflict(backoff=timedelta(seconds=-1))


def test_settings_accept_a_timedelta(settings):
    settings.DLOCKS = {
        "default": {
            "BACKEND": f"{MemoryBackend.__module__}.MemoryBackend",
            "OPTIONS": {
                "ttl": SECONDS,
                "timeout": SECONDS,
                "slow_wait": SECONDS,
                "slow_hold": SECONDS,
            },
        }
    }
    backend = BackendHandler()["default"]
    assert (backend.ttl, backend.timeout) == (90.0, 90.0)
    assert (backend.slow_wait, backend.slow_hold) == (90.0, 90.0)


# What is shown.


@pytest.mark.parametrize(
    ("lock", "shown"),
    [
        (db_lock("a"), "<Lock 'a'>"),
        (db_lock("a", timeout=None), "<Lock 'a' timeout=None>"),
        (
            db_lock("a", timeout=3, ttl=0.5, renew=False, using="other"),
            "<Lock 'a' using='other' timeout=3 ttl=0.5 renew=False>",
        ),
        (db_lock("a", max_hold=timedelta(days=30)), "<Lock 'a' max_hold=2592000>"),
        (db_lock("a", on_lost=print), "<Lock 'a' on_lost=print>"),
        (db_lock("b", "a", timeout=0), "<MultiLock 'a', 'b' timeout=0>"),
        (db_semaphore("a", 3), "<Lock 'a' shared=True permits=3>"),
        (db_rwlock("a").read(), "<Lock 'a' shared=True>"),
        (db_rwlock("a", scope="lease"), "<ReadWriteLock 'a' scope='lease'>"),
        (db_lock("a", busy="skip"), "<LockDecorator 'a' busy='skip'>"),
        (
            db_lock("a:{b}", busy="raise", timeout=SECONDS),
            "<LockDecorator 'a:{b}' busy='raise' timeout=90>",
        ),
    ],
)
def test_the_repr_shows_what_differs_from_the_defaults(lock, shown):
    assert repr(lock) == shown


def test_the_kinds_of_locks_have_their_types():
    assert type(db_lock("a")) is Lock
    assert type(db_lock("a", "b")) is MultiLock
    assert type(db_rwlock("a")) is ReadWriteLock
    assert type(db_lock(key_of)) is LockDecorator
    with db_lock("a", "b") as hold:
        assert type(hold) is MultiHold
        assert [one.key for one in hold.holds] == ["a", "b"]


def test_the_queue_length_is_a_method_of_both_kinds():
    async def length(hold):
        return await hold.aqueue_length()

    for lock in (db_lock("a"), db_lock("a", "b")):
        with lock as hold:
            assert hold.queue_length() == 0
            assert asyncio.run(length(hold)) == 0
