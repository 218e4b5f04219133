"""Functions and views under a lock, as in docs/how-to/decorators.md."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import math
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock
from uuid import UUID

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.http import HttpResponse
from django.test import RequestFactory
from django.utils import translation
from django.utils.functional import SimpleLazyObject
from django.views import View

from dlocks import (
    LockLost,
    LockTimeout,
    SingleInstance,
    db_lock,
    lock_acquired,
    locked_view,
    run_once,
)
from dlocks.testing import frozen_clock, held_elsewhere, lose
from tests import pages, typed_usage
from tests.models import Counter
from tests.promises.interposed import REPORTING, Reporting


@pytest.fixture(scope="module")
def page():
    return pages.run("how-to/decorators")


def key_of(template, function, *args, **kwargs):
    """Return the key that a call locks."""
    seen = []

    def note(hold, **_):
        seen.append(hold.key)

    lock_acquired.connect(note)
    db_lock(template)(function)(*args, **kwargs)
    lock_acquired.disconnect(note)
    (key,) = seen
    return key


pytestmark = [pytest.mark.front, pytest.mark.usefixtures("memory_locks")]


# The key.


def report(region, day="today", *rest, **options):
    return region


def test_the_key_is_built_from_the_bound_arguments():
    """Only None itself is refused. In a with-block, the key is used literally."""
    ids = SimpleNamespace(pk=7)
    for template, args, kwargs, key in (
        ("report:{region}", ("north",), {}, "report:north"),
        ("report:{region}", (), {"region": "north"}, "report:north"),
        ("report:{region}:{day}", ("north",), {}, "report:north:today"),
        ("{region.pk}", (ids,), {}, "7"),
        ("{region[0]}/{region[1].pk}", ([5, ids],), {}, "5/7"),
        ("{region[id]}", ({"id": 3},), {}, "3"),
        ("{region:03d}", (7,), {}, "007"),
        ("{region!r}", ("a",), {}, "'a'"),
        ("{{{region}}}", ("a",), {}, "{a}"),
        ("{rest[0]}", ("a", "b", "c"), {}, "c"),
        ("{extra}", ("a",), {"extra": "e"}, "e"),
        ("fixed", ("a",), {}, "fixed"),
        (lambda region, **kwargs: f"own:{region}", ("a",), {}, "own:a"),
        ("{region}:{day}", ("a",), {"day": "b:c"}, "a:b:c"),
        ("counter:{region}", (Counter(pk=7, name="north"),), {}, "counter:north"),
        ("report:{region}", ("None",), {}, "report:None"),
        ("report:{region}", ("",), {}, "report:"),
    ):
        assert key_of(template, report, *args, **kwargs) == key
    with db_lock("a{b}") as hold:
        assert hold.key == "a{b}"


def test_an_invalid_template_is_refused_when_decorating():
    """So are an invalid policy, and options for calls in a with-block."""

    def build(region, day):
        raise AssertionError

    misspelt = r"needs an argument 'regoin', but .*build\(\) has 'region', 'day'"
    for template, message in (
        ("report:{regoin}", misspelt),
        ("{}", "not a valid field"),
        ("{0}", "not a valid field"),
        ("{region.__class__}", "underscore"),
        ("{region._private}", "underscore"),
        ("{region[0].__init__.__globals__}", "underscore"),
        ("{region", "not a valid key"),
        ("region}", "not a valid key"),
        ("{region:{day}}", "in its format specifier"),
        ("{region!x}", "conversion"),
        ("{region}{day}", "needs a separator between {region}"),
        ("", "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            db_lock(template, busy="skip")(build)
    for policy, error in (
        ({"timeout": -1}, ValueError),
        ({"ttl": "x"}, TypeError),
        ({"nonsense": 1}, TypeError),
        ({"busy": 3}, ValueError),
    ):
        with pytest.raises(error):
            db_lock(lambda: "a", **policy)
    for lock in (db_lock("a", busy="skip"), db_lock(lambda: "a")):
        with pytest.raises(TypeError, match="context manager"):
            with lock:
                raise AssertionError


def test_calls_with_ambiguous_keys_are_refused_before_locking():
    """``a:{x}:{y}`` would give ("b:c", "d") and ("b", "c:d") the same key."""
    calls = []

    @db_lock("a:{x}:{y}")
    def work(x, y):
        calls.append((x, y))

    @db_lock("{x}::{y}")
    def separated(x, y):
        calls.append((x, y))

    for function, x, y in (
        (work, "b:c", "d"),
        (work, ":", ""),
        (work, "b:", "c"),
        (separated, "a:", "b"),
    ):
        with pytest.raises(ValueError, match="other values could have the same key"):
            function(x, y)
    work("b", "c:d")
    separated("a", ":b")
    assert calls == [("b", "c:d"), ("a", ":b")]


def test_a_field_without_a_name_is_refused_before_locking():
    """Its text is an address in memory, or depends on rows that were read."""

    class Plain:
        pass

    class Cart:
        def __str__(self):
            return "cart 7"

        def number(self):
            return 7

    def build(order):
        raise AssertionError

    cart, plain = Cart(), Plain()
    for template, order, what in (
        ("order:{order}", plain, r"<.*Plain object at 0x\w+> in this call"),
        ("order:{order!r}:x", plain, r"<.*Plain object at 0x\w+> in this call"),
        ("order:{order}", [plain], r"\[<.*>\] in this call"),
        ("order:{order.number}", cart, r".*Cart\.number\(\) itself"),
        ("order:{order}", lambda: 7, r".*<lambda>\(\) itself"),
        ("order:{order}", "a".upper, r"str\.upper\(\) itself"),
        ("order:{order}", Counter.objects.all(), "a QuerySet"),
        ("order:{order}", Counter.objects.raw("SELECT 1"), "a RawQuerySet"),
        ("order:{order}", Counter.objects, "a Manager"),
    ):
        # A query would be an error in this test.
        with pytest.raises(
            ValueError, match=rf"\}} of .* is {what}.*Name an attribute"
        ):
            db_lock(template)(build)(order)
    for order, key in (
        (cart, "order:cart 7"),
        ("<X object at 0x7f>", "order:<X object at 0x7f>"),
        (Path("/a b"), "order:/a b"),
        (UUID(int=7), f"order:{UUID(int=7)}"),
        (Counter, f"order:{Counter}"),
    ):
        assert key_of("order:{region}", report, order) == key


async def test_a_field_that_is_none_is_refused_before_locking():
    """So is an unsaved object, in functions, coroutines, views, jobs and commands."""

    def work(order, request=None):
        raise AssertionError

    async def awork(order, request=None):
        raise AssertionError

    north = Counter(name="north")
    for template, order, message in (
        ("order:{order}", None, r"\{order\} of 'order:\{order\}' is None"),
        ("order:{order!r}", None, r"\{order\} of .* is None"),
        ("order:{order.pk}", Counter(), r"\{order.pk\} of .* is None"),
        ("order:{order[id]}:paid", {"id": None}, r"\{order\[id\]\} of .* is None"),
        ("order:{order}", north, r"\{order\} .* is a Counter without a primary key"),
    ):
        for decorate in db_lock, functools.partial(run_once, min_hold=1), locked_view:
            with pytest.raises(ValueError, match=message):
                decorate(template)(work)(order)
            with pytest.raises(ValueError, match=message):
                await decorate(template)(awork)(order=order)
        command = type("Command", (SingleInstance,), {"lock_key": template})()
        with pytest.raises(ValueError, match=message):
            command.get_lock(order=order)


def test_a_call_with_wrong_arguments_locks_nothing():
    @db_lock("{region}")
    def build(region):
        raise AssertionError

    @db_lock("{pk}")
    def view(request, **kwargs):
        return kwargs["pk"]

    missing = r"build\(\): missing a required argument: 'region'"
    with pytest.raises(TypeError, match=missing):
        build()
    with pytest.raises(TypeError, match="unexpected keyword"):
        build("a", regoin=1)
    assert view(None, pk=7) == 7
    with pytest.raises(TypeError, match="needs the argument 'pk' in this call"):
        view(None)


# Decorated functions.


def test_the_lock_is_held_while_the_function_runs_and_not_after(is_busy):
    """Errors, timeouts inside and a loss are raised. It may be recursive."""

    @db_lock("stock:{sku}", timeout=0, busy="skip")
    def sell(sku, then=lambda: None):
        assert is_busy(f"stock:{sku}")
        then()
        return f"sold {sku}"

    def fail():
        raise KeyError

    assert sell(7, lambda: sell(7)) == "sold 7"
    assert not is_busy("stock:7")
    with pytest.raises(KeyError):
        sell(7, fail)
    assert not is_busy("stock:7")
    with held_elsewhere("inner"), pytest.raises(LockTimeout) as caught:
        sell(7, db_lock("inner", timeout=0).acquire)
    assert caught.value.key == "inner"
    with pytest.raises(LockLost):
        sell(7, lambda: lose("stock:7"))


def test_a_decorated_function_keeps_its_metadata():
    @db_lock("report:{region}")
    def build(region: str, day: str = "today") -> str:
        """Build it."""
        return region

    assert (build.__name__, build.__doc__) == ("build", "Build it.")
    signature = str(inspect.signature(build))
    assert signature == "(region: 'str', day: 'str' = 'today') -> 'str'"
    assert not inspect.iscoroutinefunction(build)


async def test_a_coroutine_function_holds_across_its_awaits():
    @db_lock("stock:{sku}")
    async def sell(sku):
        await asyncio.sleep(0)
        other = asyncio.create_task(db_lock(f"stock:{sku}", timeout=0).atry_acquire())
        assert await other is None
        return "sold"

    assert inspect.iscoroutinefunction(sell)
    assert await sell(7) == "sold"
    assert not await db_lock("stock:7").alocked()


async def test_busy_raises_skips_or_calls_a_function():
    """This holds for functions and for coroutine functions."""

    def work(sku):
        raise AssertionError

    async def awork(sku):
        raise AssertionError

    def answer(error, sku):
        return error.key, error.holder.holder, sku

    async def later(error, sku):
        await asyncio.sleep(0)
        return f"{sku} later"

    def decorated(function, **policy):
        return db_lock("stock:{sku}", timeout=0, **policy)(function)

    with held_elsewhere("stock:7", holder="web-2:1:x"):
        assert await decorated(awork, busy=later)(7) == "7 later"
        for call in sync_to_async(decorated(work)), decorated(awork):
            with pytest.raises(LockTimeout, match="held by web-2:1:x"):
                await call(7)
        skip = {"busy": "skip"}
        for call in sync_to_async(decorated(work, **skip)), decorated(awork, **skip):
            assert await call(7) is None
        answered = sync_to_async(decorated(work, busy=answer))
        assert await answered(7) == ("stock:7", "web-2:1:x", 7)


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


def _through(function):
    @functools.wraps(function)
    def called(*args, **kwargs):
        return function(*args, **kwargs)

    return called


def test_a_wrapped_generator_is_refused_at_the_call():
    """Its body would run only after the release of the lock, as a coroutine's would.

    Only behind another decorator a generator does not look like one. A generator
    itself, and other things that are no functions, are refused when decorating.
    """

    async def work():
        raise AssertionError

    late = "would work after the release of the lock"
    for function, message in (
        (_through(_generator), late),
        (_through(_async_generator), late),
        (contextlib.contextmanager(_generator), late),
        (lambda: work(), "returned a coroutine"),
    ):
        with pytest.raises(TypeError, match=message):
            db_lock("a")(function)()
        assert not db_lock("a").locked()
    for function in (_generator, _async_generator):
        with pytest.raises(TypeError, match=r"is a generator, .*with db_lock"):
            db_lock("a")(function)
    wrapped = staticmethod(_generator), classmethod(_generator)
    for thing in (*wrapped, property(), 7, int, SimpleNamespace):
        with pytest.raises(TypeError):
            db_lock("a")(thing)


# Views.


class Orders(View):
    def get(self, request, pk):
        return HttpResponse(f"order {pk}")


class AsyncOrders(View):
    async def get(self, request, pk):
        await asyncio.sleep(0)
        return HttpResponse(f"order {pk}")


REQUEST = RequestFactory().get("/")


def test_a_busy_view_responds_with_a_status_and_retry_after():
    """The header can be set or omitted. A view may have an argument of any name.

    It does not depend on the holder's lease, which outlives most holds by far.
    """
    for status, reason in (
        (409, "Conflict"),
        (423, "Locked"),
        (429, "Too Many Requests"),
        (503, "Service Unavailable"),
    ):

        @locked_view("order:{error}", status=status)
        def view(request, error):
            return HttpResponse("done")

        with held_elsewhere("order:7", ttl=29.5, holder="secret-host"):
            response = view(REQUEST, error=7)
            assert (response.status_code, response.reason_phrase) == (status, reason)
            assert response["Retry-After"] == "1"
            assert b"secret-host" not in response.content
            assert response["Content-Type"] == "text/plain"
            assert view(REQUEST, error=8).status_code == 200
        assert view(REQUEST, error=7).content == b"done"
    for retry_after, header in ((5, "5"), (0, "0"), (True, "1"), (False, None)):
        view = locked_view("order", retry_after=retry_after)(lambda request: None)
        with held_elsewhere("order"):
            assert view(REQUEST).get("Retry-After") == header


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_busy_view_responds_in_the_preferred_type():
    """A browser gets a page, an API client JSON, and curl plain text."""
    locked = locked_view("order:{pk}")
    function = locked(lambda request, pk: None)
    as_class = locked(type("Locked", (Orders,), {})).as_view()
    for accept, media_type in (
        (BROWSER, "text/html"),
        ("application/json", "application/json"),
        ("application/json;q=0.5, text/plain", "text/plain"),
        ("*/*", "text/plain"),
        ("image/png", "text/plain"),
    ):
        request = RequestFactory().get("/", headers={"accept": accept})
        with held_elsewhere("order:7"), translation.override("zh-hans"):
            responses = function(request, pk=7), as_class(request, pk=7)
        for response in responses:
            assert response.status_code == 409
            assert response["Content-Type"].split(";")[0] == media_type, accept
            assert response["Vary"] == "Accept"
            text = response.content.decode()
            said = text
            if media_type == "application/json":
                ((name, said),) = json.loads(text).items()
                assert name == "detail"
            assert "请稍后重试" in said
            assert ('<html lang="zh-hans">' in text) == (media_type == "text/html")


def test_a_project_may_replace_the_busy_page(settings, tmp_path):
    """By ``dlocks/busy.html``. Without templates the response is plain text."""
    page = tmp_path / "dlocks/busy.html"
    page.parent.mkdir()
    page.write_text("<p>{{ request.path }}: {{ text }}</p>")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    view = locked_view("order")(lambda request: None)
    request = RequestFactory().get("/orders/", headers={"accept": BROWSER})
    with held_elsewhere("order"):
        assert b"<p>/orders/: This is in use" in view(request).content
        settings.TEMPLATES = []
        assert view(request)["Content-Type"] == "text/plain"


def test_a_busy_view_responds_if_the_remaining_time_is_unknown(settings, monkeypatch):
    """As that of a session lock is, which ends with its session."""
    settings.DLOCKS = {"default": REPORTING}
    monkeypatch.setattr(Reporting, "known", {"remaining": math.inf})
    view = locked_view("order:{pk}")(lambda request, pk: None)
    with held_elsewhere("order:7"):
        response = view(REQUEST, pk=7)
    assert (response.status_code, response["Retry-After"]) == (409, "1")


def test_an_invalid_policy_of_a_view_is_refused():
    for policy in (
        {"status": 200}, {"status": 502}, {"status": "409"}, {"retry_after": -1},
        {"retry_after": "soon"}, {"timeout": -1},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(policy))):
            locked_view("order", **policy)


async def test_a_class_based_view_is_locked_as_a_whole(is_busy):
    """An async one is locked until its response. The base class is not locked."""

    @locked_view("order:{pk}")
    class Locked(Orders):
        def get(self, request, pk):
            assert is_busy(f"order:{pk}")
            return super().get(request, pk)

    @locked_view("order:{pk}")
    class AsyncLocked(AsyncOrders):
        async def get(self, request, pk):
            assert await asyncio.to_thread(is_busy, f"order:{pk}")
            return await super().get(request, pk)

    for view in (sync_to_async(Locked.as_view()), AsyncLocked.as_view()):
        assert (await view(REQUEST, pk=7)).content == b"order 7"
        with held_elsewhere("order:7"):
            assert (await view(REQUEST, pk=7)).status_code == 409
    assert (await sync_to_async(Orders.as_view())(REQUEST, pk=7)).status_code == 200


async def test_the_typed_examples_run():
    await sync_to_async(typed_usage.check)()
    typed_usage.check_names()
    typed_usage.check_options()
    await sync_to_async(typed_usage.check_tries)()
    await sync_to_async(typed_usage.check_callers)()
    await sync_to_async(typed_usage.check_elections)()
    await sync_to_async(typed_usage.check_several)(["a", "b"])
    await typed_usage.acheck_several()
    await typed_usage.acheck()


# The documentation page.


class TestThePage:
    def test_the_examples_on_functions_and_views(self, page):
        assert page.build_report("north") == "north today"
        with held_elsewhere("report:north"):
            assert page.build_report("north") is None
            assert page.build_report("south") == "south today"
        assert page.Cart(3).pay() == "paid"
        assert page.merge("b", "a") == "ba"
        with held_elsewhere("pair:a-b"), frozen_clock():
            with pytest.raises(LockTimeout, match="pair:a-b"):
                page.merge("b", "a")
        assert page.count("x") == "x: 12"
        with held_elsewhere("count:x", holder="web-2"):
            assert page.count("x") == "x: ask web-2 later"
        request = RequestFactory().post("/")
        with held_elsewhere("order:7"), held_elsewhere("invoice:7"):
            assert page.pay_order(request, pk=7).status_code == 409
            assert page.OrderView.as_view()(request, pk=7).status_code == 409
            assert page.InvoiceView.as_view()(request, pk=7).status_code == 409
        assert page.pay_order(request, pk=7).content == b"paid"
        assert page.OrderView.as_view()(request, pk=7).content == b"changed"
        assert page.InvoiceView.as_view()(request, pk=7).content == b"sent"

    async def test_the_key_of_a_coroutine_may_query_the_database(self, page):
        """The key is built where database queries are allowed.

        For example, ``request.user`` is loaded at its first use. An anonymous user has
        no key, and is sent to the login first.
        """

        def load():
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                return SimpleNamespace(pk=5)
            raise SynchronousOnlyOperation

        assert await page.ship(SimpleNamespace(pk=3)) == "shipped"
        request = RequestFactory().post("/")
        request.user = SimpleLazyObject(load)
        request.auser = AsyncMock(return_value=SimpleNamespace(is_authenticated=True))
        with held_elsewhere("export:5"):
            response = await page.export(request)
            assert (response.status_code, response["Retry-After"]) == (423, "30")
        assert (await page.export(request)).content == b"exported"
        request.auser.return_value.is_authenticated = False
        assert (await page.export(request)).status_code == 302
