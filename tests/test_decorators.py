"""Functions and views under a lock, as docs/how-to/decorators.md has it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import math
import threading
from types import SimpleNamespace

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils.functional import SimpleLazyObject
from django.views import View

from dlocks import LockLost, LockTimeout, db_lock, locked_view
from dlocks.backends.memory import MemoryBackend
from dlocks.decorators import LockDecorator
from dlocks.testing import frozen_clock, held_elsewhere, lose
from tests import pages, typed_usage


@pytest.fixture(scope="module")
def page():
    return pages.run("how-to/decorators")


def key_of(template, function, *args, **kwargs):
    """Return the key under which the call is locked."""
    seen = []

    def busy(error, *args, **kwargs):
        seen.append(error.key)

    with held_elsewhere(probe := "probe"):
        decorated = db_lock(template, timeout=0, busy=busy)

        def lock(key):
            seen.append(key)
            return db_lock(probe, timeout=0)

        decorated.lock = lock
        decorated(function)(*args, **kwargs)
    return seen[0]


pytestmark = pytest.mark.usefixtures("memory_locks")


# The key.


def report(region, day="today", *rest, **options):
    return region


@pytest.mark.parametrize(
    ("template", "args", "kwargs", "key"),
    [
        ("report:{region}", ("north",), {}, "report:north"),
        ("report:{region}", (), {"region": "north"}, "report:north"),
        ("report:{region}:{day}", ("north",), {}, "report:north:today"),
        ("{region.pk}", (SimpleNamespace(pk=7),), {}, "7"),
        ("{region[0]}/{region[1].pk}", ([5, SimpleNamespace(pk=7)],), {}, "5/7"),
        ("{region[id]}", ({"id": 3},), {}, "3"),
        ("{region:03d}", (7,), {}, "007"),
        ("{region!r}", ("a",), {}, "'a'"),
        ("{{{region}}}", ("a",), {}, "{a}"),
        ("{rest[0]}", ("a", "b", "c"), {}, "c"),
        ("{extra}", ("a",), {"extra": "e"}, "e"),
        ("fixed", ("a",), {}, "fixed"),
        (lambda region, **kwargs: f"own:{region}", ("a",), {}, "own:a"),
        ("{region}:{day}", ("a",), {"day": "b:c"}, "a:b:c"),
    ],
)
def test_the_key_is_made_of_the_arguments_that_the_call_binds(template, args, kwargs, key):
    assert key_of(template, report, *args, **kwargs) == key


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("report:{regoin}", r"needs an argument 'regoin'; .*build\(\) takes 'region', 'day'"),
        ("{}", "not a field"),
        ("{0}", "not a field"),
        ("{region.__class__}", "underscore"),
        ("{region._private}", "underscore"),
        ("{region[0].__init__.__globals__}", "underscore"),
        ("{region", "not a template"),
        ("region}", "not a template"),
        ("{region:{day}}", "within its format"),
        ("{region!x}", "conversion"),
        ("{region}{day}", "something between"),
        ("", "empty"),
    ],
)
def test_a_template_that_cannot_be_right_is_refused_when_decorating(template, message):
    def build(region, day):
        raise AssertionError

    with pytest.raises(ValueError, match=message):
        db_lock(template, busy="skip")(build)


@pytest.mark.parametrize(("x", "y"), [("b:c", "d"), (":", ""), ("b:", "c")])
def test_calls_that_could_be_confused_are_refused_before_anything_is_locked(x, y):
    """a:{x}:{y} of ("b:c", "d") and of ("b", "c:d") would be the same key."""
    calls = []

    @db_lock("a:{x}:{y}")
    def work(x, y):
        calls.append((x, y))

    with pytest.raises(ValueError, match="could be taken for other values"):
        work(x, y)
    work("b", "c:d")
    assert calls == [("b", "c:d")]


def test_a_separator_of_several_characters_is_told_from_a_value_that_ends_with_its_first():
    @db_lock("{x}::{y}")
    def work(x, y):
        return "done"

    with pytest.raises(ValueError, match="taken for"):
        work("a:", "b")
    assert work("a", ":b") == "done"


def test_a_call_that_the_function_does_not_take_is_a_type_error_and_locks_nothing():
    @db_lock("{region}")
    def build(region):
        raise AssertionError

    with pytest.raises(TypeError, match=r"build\(\): missing a required argument: 'region'"):
        build()
    with pytest.raises(TypeError, match="unexpected keyword"):
        build("a", regoin=1)


def test_a_name_among_further_keywords_is_asked_for_at_the_call():
    @db_lock("{pk}")
    def view(request, **kwargs):
        return kwargs["pk"]

    assert view(None, pk=7) == 7
    with pytest.raises(TypeError, match="needs 'pk' here"):
        view(None)


def test_a_with_block_takes_the_key_as_it_is_written():
    with db_lock("a{b}") as hold:
        assert hold.key == "a{b}"


def test_what_is_for_calls_has_no_with_block():
    for lock in (db_lock("a", busy="skip"), db_lock(lambda: "a")):
        with pytest.raises(TypeError, match="context manager"):
            with lock:
                raise AssertionError


@pytest.mark.parametrize(
    ("policy", "error"),
    [({"timeout": -1}, ValueError), ({"ttl": "x"}, TypeError), ({"nonsense": 1}, TypeError), ({"busy": 3}, ValueError)],
)
def test_a_policy_that_makes_no_sense_is_refused_when_decorating(policy, error):
    with pytest.raises(error):
        db_lock(lambda: "a", **policy)


# What is decorated.


def test_the_lock_is_held_while_the_function_runs_and_not_after(is_busy):
    @db_lock("stock:{sku}")
    def sell(sku):
        assert is_busy("stock:7")
        return f"sold {sku}"

    assert sell(7) == "sold 7"
    assert not is_busy("stock:7")


def test_what_the_function_raises_passes_and_the_key_is_given_back(is_busy):
    @db_lock("stock:{sku}", busy="skip")
    def sell(sku):
        raise KeyError(sku)

    with pytest.raises(KeyError):
        sell(7)
    assert not is_busy("stock:7")


def test_a_decorated_function_is_still_itself():
    @db_lock("report:{region}")
    def build(region: str, day: str = "today") -> str:
        """Build it."""
        return region

    assert (build.__name__, build.__doc__) == ("build", "Build it.")
    assert str(inspect.signature(build)) == "(region: 'str', day: 'str' = 'today') -> 'str'"
    assert not inspect.iscoroutinefunction(build)


async def test_a_coroutine_function_stays_one_and_holds_over_its_awaits():
    @db_lock("stock:{sku}")
    async def sell(sku):
        await asyncio.sleep(0)
        other = asyncio.create_task(db_lock(f"stock:{sku}", timeout=0).atry_acquire())
        assert await other is None
        return "sold"

    assert inspect.iscoroutinefunction(sell)
    assert await sell(7) == "sold"
    assert not await db_lock("stock:7").alocked()


async def test_a_busy_coroutine_function_skips_or_answers():
    async def later(error, sku):
        await asyncio.sleep(0)
        return f"{sku} later"

    @db_lock("stock:{sku}", timeout=0, busy=later)
    async def sell(sku):
        raise AssertionError

    @db_lock("stock:{sku}", timeout=0, busy="skip")
    async def skip(sku):
        raise AssertionError

    @db_lock("stock:{sku}", timeout=0)
    async def insist(sku):
        raise AssertionError

    with held_elsewhere("stock:7"):
        assert await sell(7) == "7 later"
        assert await skip(7) is None
        with pytest.raises(LockTimeout):
            await insist(7)


def test_methods_are_decorated_with_their_instances():
    class Cart:
        def __init__(self, pk):
            self.pk = pk

        @db_lock("cart:{self.pk}", timeout=0, busy="skip")
        def pay(self):
            return f"paid {self.pk}"

        @classmethod
        @db_lock("carts", timeout=0)
        def count(cls):
            return cls.__name__

        @staticmethod
        @db_lock("carts:{n}")
        def some(n):
            return n

    with held_elsewhere("cart:7"):
        assert Cart(7).pay() is None
        assert Cart(8).pay() == "paid 8"
    assert (Cart.count(), Cart.some(3)) == ("Cart", 3)


def _generator():
    yield


async def _async_generator():
    yield


@pytest.mark.parametrize("function", [_generator, _async_generator])
def test_generators_are_refused_since_they_work_after_their_call(function):
    with pytest.raises(TypeError, match=r"is a generator: .*with db_lock"):
        db_lock("a")(function)


@pytest.mark.parametrize(
    "thing", [staticmethod(_generator), classmethod(_generator), property(), 7, int, SimpleNamespace]
)
def test_what_is_no_function_is_refused(thing):
    with pytest.raises(TypeError):
        db_lock("a")(thing)


def _through(function):
    @functools.wraps(function)
    def called(*args, **kwargs):
        return function(*args, **kwargs)

    return called


@pytest.mark.parametrize(
    "function", [_through(_generator), _through(_async_generator), contextlib.contextmanager(_generator)]
)
def test_what_turns_out_to_be_a_generator_is_refused_too(function):
    """Behind another decorator it does not look like one."""
    with pytest.raises(TypeError, match=r"would have worked after the lock was given back"):
        db_lock("a")(function)()
    assert not db_lock("a").locked()


def test_a_function_that_returns_a_coroutine_unawaited_is_refused(is_busy):
    """Its work would have begun when the lock was given back."""

    async def work():
        raise AssertionError

    @db_lock("a")
    def start():
        return work()

    with pytest.raises(TypeError, match="returned a coroutine"):
        start()
    assert not is_busy("a")


# When it is busy.


def test_busy_raises_skips_or_asks():
    def work(sku):
        raise AssertionError

    def answer(error, sku):
        return error.key, error.holder.holder, sku

    with held_elsewhere("stock:7", holder="web-2:1:x"):
        with pytest.raises(LockTimeout, match="held by web-2:1:x"):
            db_lock("stock:{sku}", timeout=0)(work)(7)
        assert db_lock("stock:{sku}", timeout=0, busy="skip")(work)(7) is None
        assert db_lock("stock:{sku}", timeout=0, busy=answer)(work)(7) == ("stock:7", "web-2:1:x", 7)


def test_a_time_out_inside_of_the_function_is_not_taken_for_its_own_lock_s():
    @db_lock("outer", busy="skip")
    def work():
        with db_lock("inner", timeout=0):
            raise AssertionError

    with held_elsewhere("inner"), pytest.raises(LockTimeout) as caught:
        work()
    assert caught.value.key == "inner"


def test_a_lost_lock_is_told_at_the_end_of_the_call():
    @db_lock("stock", busy="skip")
    def work():
        lose("stock")

    with pytest.raises(LockLost):
        work()


def test_the_same_thread_may_call_itself():
    @db_lock("deep", timeout=0)
    def work(n):
        return n if n == 0 else work(n - 1)

    assert work(3) == 0


# Views.


class Orders(View):
    def get(self, request, pk):
        assert threading.current_thread()
        return HttpResponse(f"order {pk}")


class AsyncOrders(View):
    async def get(self, request, pk):
        await asyncio.sleep(0)
        return HttpResponse(f"order {pk}")


REQUEST = RequestFactory().get("/")


@pytest.mark.parametrize(("status", "reason"), [(409, "Conflict"), (423, "Locked")])
def test_a_busy_view_answers_with_a_status_and_when_to_come_back(status, reason):
    @locked_view("order:{pk}", status=status)
    def view(request, pk):
        return HttpResponse("done")

    with held_elsewhere("order:7", ttl=29.5, holder="secret-host"):
        response = view(REQUEST, pk=7)
        assert (response.status_code, response.reason_phrase) == (status, reason)
        assert response["Retry-After"] in {"29", "30"}
        assert b"secret-host" not in response.content
        assert response["Content-Type"] == "text/plain"
        assert view(REQUEST, pk=8).status_code == 200
    assert view(REQUEST, pk=7).content == b"done"


def test_a_busy_view_may_have_an_argument_of_any_name():
    @locked_view("order:{error}")
    def view(request, error):
        raise AssertionError

    with held_elsewhere("order:7"):
        assert view(REQUEST, error=7).status_code == 409


def test_a_busy_view_answers_where_nobody_knows_how_long_it_takes(monkeypatch):
    """As behind a session lock of another process, which ends with its session."""
    holder = MemoryBackend.holder
    monkeypatch.setattr(
        MemoryBackend, "holder", lambda self, key: dataclasses.replace(holder(self, key), remaining=math.inf)
    )

    @locked_view("order:{pk}")
    def view(request, pk):
        raise AssertionError

    with held_elsewhere("order:7"):
        response = view(REQUEST, pk=7)
    assert (response.status_code, response["Retry-After"]) == (409, "1")


@pytest.mark.parametrize(("retry_after", "header"), [(5, "5"), (0, "0"), (False, None)])
def test_the_time_to_come_back_can_be_given_or_left_out(retry_after, header):
    @locked_view("order", retry_after=retry_after)
    def view(request):
        raise AssertionError

    with held_elsewhere("order"):
        assert view(REQUEST).get("Retry-After") == header


@pytest.mark.parametrize("wrong", [{"status": 200}, {"retry_after": -1}, {"retry_after": "soon"}, {"timeout": -1}])
def test_a_view_s_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        locked_view("order", **wrong)


def test_a_class_based_view_is_locked_as_a_whole(is_busy):
    @locked_view("order:{pk}")
    class Locked(Orders):
        def get(self, request, pk):
            assert is_busy(f"order:{pk}")
            return super().get(request, pk)

    view = Locked.as_view()
    assert view(REQUEST, pk=7).content == b"order 7"
    with held_elsewhere("order:7"):
        assert view(REQUEST, pk=7).status_code == 409
    assert Orders.as_view()(REQUEST, pk=7).status_code == 200


async def test_an_async_class_based_view_is_locked_until_its_response_is_there():
    @locked_view("order:{pk}")
    class Locked(AsyncOrders):
        async def get(self, request, pk):
            other = asyncio.create_task(db_lock(f"order:{pk}", timeout=0).atry_acquire())
            assert await other is None
            return await super().get(request, pk)

    view = Locked.as_view()
    assert (await view(REQUEST, pk=7)).content == b"order 7"
    with held_elsewhere("order:7"):
        assert (await view(REQUEST, pk=7)).status_code == 409


async def test_what_type_checkers_see_is_what_happens():
    await sync_to_async(typed_usage.check)()
    await typed_usage.acheck()


def test_a_decorator_knows_what_it_is():
    assert repr(db_lock("a:{b}", busy="skip")) == "<LockDecorator 'a:{b}' busy='skip'>"
    assert isinstance(db_lock("a", busy="raise"), LockDecorator)


# On the real databases.


@pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])
class TestOnTheDatabase:
    @pytest.fixture(autouse=True)
    def memory_locks(self):
        """Not here."""

    def test_of_many_callers_one_works_at_a_time(self, elsewhere, is_busy):
        @db_lock("stock:{sku}", timeout=0, busy="skip")
        def sell(sku):
            assert is_busy("stock:7")
            return elsewhere(sell, sku) or "sold once"

        assert sell(7) == "sold once"
        assert not is_busy("stock:7")

    def test_in_a_request_s_transaction_the_lock_ends_with_the_commit(self, is_busy):
        from django.db import connection, transaction

        @locked_view("order:{pk}")
        def view(request, pk):
            return HttpResponse("done")

        with transaction.atomic():
            assert view(REQUEST, pk=7).status_code == 200
            if connection.vendor != "sqlite":
                assert is_busy("order:7")
        assert not is_busy("order:7")


# The page.


class TestThePage:
    def test_functions(self, page):
        assert page.build_report("north") == "north today"
        with held_elsewhere("report:north"):
            assert page.build_report("north") is None
            assert page.build_report("south") == "south today"
        assert page.Cart(3).pay() == "paid"

    async def test_coroutine_functions(self, page):
        assert await page.ship(SimpleNamespace(pk=3)) == "shipped"

    def test_keys(self, page):
        assert page.merge("b", "a") == "ba"
        with held_elsewhere("pair:a-b"), frozen_clock(), pytest.raises(LockTimeout, match="pair:a-b"):
            page.merge("b", "a")

    def test_busy(self, page):
        assert page.count("x") == "x: 12"
        with held_elsewhere("count:x", holder="web-2"):
            assert page.count("x") == "x: ask web-2 later"

    def test_views(self, page):
        request = RequestFactory().post("/")
        with held_elsewhere("order:7"), held_elsewhere("invoice:7"):
            assert page.pay_order(request, pk=7).status_code == 409
            assert page.OrderView.as_view()(request, pk=7).status_code == 409
            assert page.InvoiceView.as_view()(request, pk=7).status_code == 409
        assert page.pay_order(request, pk=7).content == b"paid"
        assert page.OrderView.as_view()(request, pk=7).content == b"changed"
        assert page.InvoiceView.as_view()(request, pk=7).content == b"sent"

    async def test_the_key_of_a_coroutine_may_ask_the_database(self, page):
        """As the user of a request does, who is loaded when first looked at."""

        def load():
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return SimpleNamespace(pk=5)
            raise SynchronousOnlyOperation

        request = RequestFactory().post("/")
        request.user = SimpleLazyObject(load)
        assert (await page.export(request)).content == b"exported"

    async def test_views_with_coroutines(self, page):
        request = RequestFactory().post("/")
        request.user = SimpleNamespace(pk=5)
        with held_elsewhere("export:5"):
            response = await page.export(request)
            assert (response.status_code, response["Retry-After"]) == (423, "30")
        assert (await page.export(request)).content == b"exported"
