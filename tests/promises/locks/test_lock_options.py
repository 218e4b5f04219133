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
    Hold,
    LeaderElection,
    Lock,
    LockTimeout,
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

pytestmark = [pytest.mark.front, pytest.mark.once]


@pytest.fixture(autouse=True)
def memory_locks():
    with override_locks("memory"):
        yield


POLICY = (
    "timeout, ttl, max_hold, min_hold, reentrant, renew, scope, takeover, fair,"
    " release_at, on_lost, note"
)


def refused(*args, **options):
    """Return the message of db_lock(), which sends no query."""
    with pytest.raises(TypeError) as raised:
        db_lock(*args, **options)
    return str(raised.value)


# Names.


@pytest.mark.django_db
def test_an_unknown_option_is_refused_before_any_query(django_assert_num_queries):
    """The error says which options there are, and which one was meant."""
    options = f" Options: {POLICY}, shared, busy, using."
    with django_assert_num_queries(0):
        assert refused("a", blocking=False) == (
            f"db_lock() has no option 'blocking'.{options}"
            " For a lock that does not wait, use timeout=0."
        )
        assert refused("a", colour="red") == (
            f"db_lock() has no option 'colour'.{options}"
        )
        for wrong, right in (
            ("timout", "timeout"),
            ("timeouts", "timeout"),
            ("max_holds", "max_hold"),
            ("reentrent", "reentrant"),
            ("onlost", "on_lost"),
            ("bussy", "busy"),
            ("usin", "using"),
        ):
            assert refused("a", **{wrong: 3}) == (
                f"db_lock() has no option {wrong!r}. Did you mean {right!r}?{options}"
            )
        # A lock on several keys is no decorator, which takes one key.
        assert refused("a", "b", busy="skip") == (
            "db_lock() of several keys has no option 'busy'."
            f" Options: {POLICY}, shared, using. A decorator takes the lock on one key."
        )
        assert "of several keys has no option 'timout'. Did" in refused(
            "a", "b", timout=3
        )


@pytest.mark.django_db
def test_options_of_other_locks_say_what_to_use(django_assert_num_queries):
    """They are those of redis-py, python-redis-lock, django-pglock and others."""
    functions = db_lock, db_rwlock, functools.partial(db_semaphore, permits=3)
    for option, hint in (
        ("blocking_timeout", "To set how long to wait, use timeout=…."),
        ("expire", "To set how long the key stays taken after a crash, use ttl=…."),
        ("auto_renewal", "A lease is renewed in the background, unless renew=False."),
        ("xact", "A lock that is acquired inside atomic() is part of the transaction."),
        ("side_effect", "To skip the work while the key is held, use busy='skip'"),
        ("suppress_acquisition_exceptions", "To skip the work while the key is held"),
        ("sleep", "There is no interval, because waiters are notified."),
        ("thread_local", "Any thread may use a hold that it is given"),
        ("raise_on_release_error", "The end of a block raises LockLost"),
        ("id", "Each hold has a random owner, and hold.detach() passes it on"),
    ):
        for function in functions:
            with django_assert_num_queries(0), pytest.raises(TypeError) as raised:
                function("a", **{option: 3})
            message = str(raised.value)
            assert f" has no option {option!r}. Options: timeout, " in message
            assert f", using. {hint}" in message


@pytest.mark.django_db
def test_methods_of_other_locks_say_what_to_use(django_assert_num_queries):
    """So does ``acquire()`` with the arguments of ``threading.Lock`` or redis-py."""
    for lock in (db_lock("a"), db_lock("a", "b"), db_semaphore("a", 3)):
        for method, hint in (
            ("check", r"The hold has it, which acquire\(\) and 'with … as' return"),
            (
                "extend",
                r"renewed in the background, or, with renew=False, by hold\.ren",
            ),
            ("reacquire", r"renewed in the background"),
            ("owned", r"Use lock\.held\(\), or hold\.check\(\)"),
            ("get_owner_id", r"Use lock\.holder\(\)"),
            ("contenders", r"Use lock\.waiters\(\)"),
            ("reset", "Use 'manage.py clear_lock'"),
            ("start", r"Use lock\.acquire\(\)"),
        ):
            with pytest.raises(
                AttributeError, match=f"no attribute '{method}'. .*{hint}"
            ):
                getattr(lock, method)
        for args, options in (
            ((False,), {}),
            ((True, 5), {}),
            ((), {"timeout": 5}),
            ((), {"blocking": False}),
        ):
            with (
                django_assert_num_queries(0),
                pytest.raises(TypeError, match=r"db_lock\(key, timeout=5\)\. try_acq"),
            ):
                lock.acquire(*args, **options)
            with pytest.raises(TypeError, match=r"timeout=5\)\. atry_acquire\(\) does"):
                asyncio.run(lock.aacquire(*args, **options))


def test_a_decorator_and_a_read_write_lock_say_how_to_acquire():
    """This holds for coroutines too. Other attributes are only missing."""

    async def enter(lock):
        async with lock:
            raise AssertionError

    rwlock = db_rwlock("a")
    for decorator in (
        db_lock("a", busy="skip"),
        db_lock(lambda: "a"),
        run_once("a", min_hold=1),
    ):
        for block in (decorator.__enter__, lambda it=decorator: asyncio.run(enter(it))):
            with pytest.raises(TypeError, match=r"a decorator .*\.try_acquire\(\)"):
                block()
        with pytest.raises(AttributeError, match="'acquire'. It is a decorator. With"):
            decorator.acquire()
        with pytest.raises(AttributeError, match="'colour'$"):
            assert decorator.colour
    for block in (rwlock.__enter__, lambda: asyncio.run(enter(rwlock))):
        with pytest.raises(TypeError, match=r"cannot be entered itself"):
            block()
    for method in ("acquire", "aacquire", "release", "locked"):
        hint = rf"Use read\(\)\.{method} or write\(\)\.{method}, of one"
        with pytest.raises(AttributeError, match=hint):
            getattr(rwlock, method)
    with pytest.raises(AttributeError, match="'colour'$"):
        assert rwlock.colour
    assert copy.deepcopy(rwlock) == rwlock


def test_shared_locks_refuse_unknown_options():
    for make, function in (
        (functools.partial(db_rwlock, "a"), "db_rwlock"),
        (functools.partial(db_semaphore, "a", 3), "db_semaphore"),
    ):
        with pytest.raises(TypeError) as raised:
            make(timout=3)
        assert str(raised.value) == (
            f"{function}() has no option 'timout'. Did you mean 'timeout'?"
            f" Options: {POLICY}, using."
        )
        with pytest.raises(TypeError, match="For a read lock, use db_rwlock"):
            make(shared=True)
    for make in (db_lock, db_rwlock):
        with pytest.raises(
            TypeError,
            match=r"has no option 'permits'\. .* use db_semaphore\(key, permits\)\.$",
        ):
            make("a", permits=3)


def test_schedules_views_and_commands_refuse_other_options():
    """A schedule never waits, and a view has a response of its own."""
    for name in ("timeout", "ttl", "reentrant"):
        with pytest.raises(TypeError) as raised:
            run_once("a", min_hold=1, **{name: 3})
        assert str(raised.value) == (
            f"run_once() has no option {name!r}. Options: min_hold, max_hold, busy,"
            " renew, scope, takeover, fair, release_at, on_lost, note, using. It does"
            " not wait while the key is held. To change that, use db_lock() as the"
            " decorator."
        )
    with pytest.raises(
        ValueError, match=r"^busy must be 'raise', 'skip' or a callable"
    ):
        run_once("a", min_hold=1, busy="wait")
    with pytest.raises(TypeError, match="Did you mean 'max_hold'"):
        run_once("a", min_hold=1, maxhold=3)
    with pytest.raises(TypeError) as raised:
        locked_view("a", retry=3)
    assert str(raised.value) == (
        "locked_view() has no option 'retry'. Did you mean 'retry_after'? Options:"
        " status, retry_after, timeout, ttl, max_hold, min_hold, reentrant, renew,"
        " scope, takeover, fair, release_at, on_lost, note, shared, using."
    )
    with pytest.raises(
        TypeError, match=r"To choose the response, use db_lock\(key, busy=…\)"
    ):
        locked_view("a", busy="skip")
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


BARE = {
    "a function": "@db_lock\ndef build(region): pass",
    "a coroutine function": "@db_lock\nasync def build(region): pass",
    "a cached function": "@db_lock\n@functools.cache\ndef build(region): pass",
    "a view": "@db_lock\nclass build(View): pass",
    "a method": "class Jobs:\n @db_lock\n def build(self): pass",
    "a static method": "class Jobs:\n @db_lock\n @staticmethod\n def build(): pass",
}


def test_a_decorator_without_parentheses_fails_when_decorating():
    """The first call, at which it could fail instead, may come much later."""
    names = {"db_lock": db_lock, "functools": functools, "View": View}
    for what, code in BARE.items():
        # The code of a module, and that of a function.
        inner = "def define():\n " + code.replace("\n", "\n ") + "\ndefine()"
        for text in (code, inner):
            with pytest.raises(TypeError) as raised:
                exec(text, {"__name__": "jobs", **names})
            assert str(raised.value) == (
                "@db_lock on 'build' has no key. Write it in parentheses, as in"
                " @db_lock('report')."
            ), what
    with pytest.raises(TypeError, match="@locked_view on 'show' has no key"):

        @locked_view
        def show(request):
            """Never called."""


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

    @db_lock(functools.cache(local), timeout=0)
    def build_often(value):
        return value

    assert build_often("7") == "7"

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


def test_an_on_lost_that_nothing_would_await_is_refused():
    """A loss would be reported to no code."""

    async def on_lost(hold):
        pass

    class Lost:
        async def __call__(self, hold):
            pass

    for one in on_lost, functools.partial(on_lost), Lost(), Lost().__call__:
        with pytest.raises(TypeError, match="on_lost cannot be a coroutine function"):
            db_lock("a", on_lost=one)


def test_an_impossible_timedelta_is_refused():
    for name in ("timeout", "ttl", "max_hold", "min_hold"):
        for wrong in (timedelta(seconds=-1), timedelta(days=200_000)):
            with pytest.raises(ValueError, match=f"{name} must be "):
                db_lock("a", **{name: wrong})
        with pytest.raises(TypeError, match="of seconds or a timedelta, not str"):
            db_lock("a", **{name: "3"})


def test_other_functions_accept_a_timedelta(until, settings):
    """This holds for decorators, elections, handovers, settings and test helpers."""
    runs = []

    @run_once("job", min_hold=timedelta(hours=1), max_hold=timedelta(hours=2))
    def job():
        runs.append(1)

    @locked_view(
        "page",
        timeout=timedelta(milliseconds=1),
        retry_after=timedelta(milliseconds=2500),
    )
    def page(request):
        return HttpResponse("done")

    job()
    job()
    assert runs == [1]
    with pytest.raises(ValueError, match="max_hold"):
        run_once("job", min_hold=timedelta(seconds=2), max_hold=1)
    request = RequestFactory().get("/")
    assert page(request).content == b"done"
    with held_elsewhere("page"):
        assert page(request)["Retry-After"] == "3"
    retry_on_conflict(backoff=timedelta(0), max_backoff=SECONDS)
    with pytest.raises(ValueError, match="backoff must be"):
        retry_on_conflict(backoff=timedelta(seconds=-1))
    election = LeaderElection("a", ttl=timedelta(seconds=5))
    waited = []
    election.on_elected = lambda hold: waited.append(
        election.wait(timedelta(milliseconds=1))
    )
    with election:
        until(lambda: waited)
        assert election.stop(timedelta(seconds=30))
    assert waited == [True]
    hold = db_lock("a").acquire()
    for wrong in (timedelta(0), timedelta(seconds=-3)):
        with pytest.raises(ValueError, match="within must be above 0"):
            hold.detach(within=wrong)
    with frozen_clock():
        text = hold.detach(within=SECONDS)
        assert db_lock("a").holder().remaining == pytest.approx(90, abs=2)
    resume_hold(text).release()
    with frozen_clock() as clock, held_elsewhere("a", ttl=SECONDS):
        clock.tick(timedelta(seconds=89))
        assert db_lock("a").locked()
        clock.tick(timedelta(seconds=2))
        assert not db_lock("a").locked()
    names = ("ttl", "timeout", "slow_wait", "slow_hold")
    kind = "dlocks.backends.memory.MemoryBackend"
    options = dict.fromkeys(names, SECONDS)
    settings.DLOCKS = {"default": {"BACKEND": kind, "OPTIONS": options}}
    with db_lock("a") as hold:
        assert 80 < hold.remaining <= 90


def test_the_kinds_of_locks_have_their_types():
    """The repr shows what differs from the defaults."""

    async def length(hold):
        return await hold.aqueue_length()

    assert type(db_lock("a")) is Lock
    assert type(db_lock("a", "b")) is Lock
    assert type(db_rwlock("a")) is ReadWriteLock
    with db_lock("a", "b") as hold:
        assert type(hold) is Hold
        assert [one.key for one in hold.holds] == ["a", "b"]
        assert hold.queue_length() == asyncio.run(length(hold)) == 0
    for lock, shown in (
        (db_lock("a"), "<Lock 'a'>"),
        (db_lock("a", timeout=None), "<Lock 'a' timeout=None>"),
        (
            db_lock("a", timeout=3, ttl=0.5, renew=False, using="other"),
            "<Lock 'a' using='other' timeout=3 ttl=0.5 renew=False>",
        ),
        (db_lock("a", max_hold=timedelta(days=30)), "<Lock 'a' max_hold=2592000>"),
        (db_lock("a", on_lost=print), "<Lock 'a' on_lost=print>"),
        (db_lock("a", note="b"), "<Lock 'a' note='b'>"),
        (db_lock("b", "a", timeout=0), "<Lock 'a', 'b' timeout=0>"),
        (db_semaphore("a", 3), "<Lock 'a' shared=True permits=3>"),
        (db_rwlock("a").read(), "<Lock 'a' shared=True>"),
        (db_rwlock("a", scope="lease"), "<ReadWriteLock 'a' scope='lease'>"),
        (db_lock("a", busy="skip"), "<LockDecorator 'a' busy='skip'>"),
        (
            db_lock("a:{b}", busy="raise", timeout=SECONDS),
            "<LockDecorator 'a:{b}' busy='raise' timeout=90>",
        ),
    ):
        assert repr(lock) == shown
