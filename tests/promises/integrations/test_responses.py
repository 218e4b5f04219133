"""Locked views whose templates and streams are produced after they return."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import threading

import pytest
from asgiref.testing import ApplicationCommunicator
from django.core.asgi import get_asgi_application
from django.core.cache import cache
from django.db import connection, transaction
from django.http import FileResponse, HttpResponse, StreamingHttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.utils.deprecation import MiddlewareMixin
from django.views import View
from django.views.decorators.cache import cache_page
from django.views.generic import TemplateView

from dlocks import LockLost, db_lock, locked_view
from dlocks.testing import held_elsewhere, lose

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

KEY = "order:7"
REQUEST = RequestFactory().get("/")
PAGE = engines["django"].from_string("{{ look }}")

# Whether each part of a response found the key busy for another caller.
seen: list[object] = []


@pytest.fixture(autouse=True)
def urls():
    seen.clear()
    cache.clear()
    with override_settings(
        ROOT_URLCONF=__name__, MIDDLEWARE=[f"{__name__}.AfterRendering"]
    ):
        yield


@pytest.fixture(autouse=True)
def look(is_busy, monkeypatch, frozen_lock_clock):
    """Let the parts of a response record whether the key is busy."""

    def note(what):
        # A second later, a hold whose thread or event loop has ended is released.
        frozen_lock_clock.tick(1)
        seen.append((what, is_busy(KEY)))
        return what

    monkeypatch.setitem(globals(), "note", note)
    return note


def note(what):
    raise AssertionError


class AfterRendering(MiddlewareMixin):
    """A middleware that acts when the response is rendered."""

    def process_template_response(self, request, response):
        if not response.is_rendered:
            # The response does not come from a cache.
            response.context_data["look"] = lambda: note("template")
        response.add_post_render_callback(rendered)
        return response


def rendered(response):
    seen.append(("callback", response.is_rendered))


@locked_view(KEY)
class Template(TemplateView):
    def get(self, request):
        note("view")
        return TemplateResponse(request, PAGE, {})


class Method(View):
    @method_decorator(locked_view(KEY))
    def get(self, request):
        return TemplateResponse(request, PAGE, {})


@locked_view(KEY)
def template(request):
    return TemplateResponse(request, PAGE, {})


@locked_view(KEY)
async def async_template(request):
    return TemplateResponse(request, PAGE, {})


@locked_view(KEY)
class AsyncTemplate(View):
    async def get(self, request):
        return TemplateResponse(request, PAGE, {})


@locked_view(KEY)
def fails(request):
    return TemplateResponse(request, PAGE, {"look": lambda: 1 / 0})


@locked_view(KEY)
def stream(request):
    return StreamingHttpResponse(note(part) for part in ("one", "two"))


async def parts():
    for part in ("one", "two"):
        yield await asyncio.to_thread(note, part)


@locked_view(KEY)
async def async_stream(request):
    return StreamingHttpResponse(parts())


@locked_view(KEY)
async def async_view_of_stream(request):
    return StreamingHttpResponse(note(part) for part in ("one", "two"))


@locked_view(KEY)
async def endless_stream(request):
    async def endless():
        while True:
            yield b"more"
            await asyncio.Event().wait()

    return StreamingHttpResponse(endless())


urlpatterns = [
    path("class/", Template.as_view()),
    path("method/", Method.as_view()),
    path("function/", template),
    path("async/", async_template),
    path("async-class/", AsyncTemplate.as_view()),
    path("stream/", stream),
    path("async-stream/", async_stream),
    path("async-view-of-stream/", async_view_of_stream),
    path("endless-stream/", endless_stream),
    path("two-locks/", locked_view("outer")(template)),
    path("two-locks-cached/", cache_page(60)(locked_view("outer")(template))),
    path("cached/", cache_page(60)(template)),
    path("cached-inside/", locked_view(KEY)(cache_page(60)(template.__wrapped__))),
]


@pytest.mark.usefixtures("memory_locks")
class TestTemplates:
    def test_a_lock_is_held_until_the_template_is_rendered(self, is_busy):
        """It is free once the response is complete. A busy view answers at once."""
        for page in ("class", "method", "function", "async", "async-class"):
            seen.clear()
            assert Client().get(f"/{page}/").content == b"template"
            assert [one for one in seen if one[0] != "view"] == [
                ("template", True),
                ("callback", True),
            ], page
            assert not is_busy(KEY)
        with held_elsewhere(KEY):
            assert Client().get("/class/").status_code == 409

    async def test_an_async_client_gets_a_template_rendered_under_the_lock(self):
        """It is rendered in another thread, or by the test itself."""
        for page in ("class", "function", "async", "async-class"):
            seen.clear()
            response = await AsyncClient().get(f"/{page}/")
            assert response.content == b"template"
            assert ("template", True) in seen, page
            assert not await db_lock(KEY).alocked()
        response = await async_template(REQUEST)
        assert await db_lock(KEY).alocked()
        response.render()
        assert not await db_lock(KEY).alocked()

    def test_a_lock_lost_before_rendering_is_an_error(self, is_busy):
        """It is raised at the end. The key of a template that fails is free."""
        response = fails(REQUEST)
        assert is_busy(KEY)
        with pytest.raises(ZeroDivisionError):
            response.render()
        assert not is_busy(KEY)
        response = Template.as_view()(REQUEST)
        lose(KEY)
        with pytest.raises(LockLost):
            response.render()

    def test_a_rendered_response_can_be_cached(self, is_busy):
        """A cache pickles the response in a post-render callback."""
        for url in ("/cached/", "/cached-inside/"):
            cache.clear()
            seen.clear()
            assert [Client().get(url).content for _ in range(2)] == [b"template"] * 2
            assert seen.count(("template", True)) == 1
            assert not is_busy(KEY)

    def test_two_locks_of_a_view_are_held_until_its_template_is_rendered(self, is_busy):
        """Both are released then, and a loss of either is an error."""
        for url in ("/two-locks/", "/two-locks-cached/"):
            seen.clear()
            assert Client().get(url).content == b"template"
            assert ("template", True) in seen
        view = locked_view("outer")(template)
        response = view(REQUEST)
        response.context_data["look"] = lambda: is_busy(KEY) and is_busy("outer")
        assert response.render().content == b"True"
        assert not is_busy(KEY)
        assert not is_busy("outer")
        for key in (KEY, "outer"):
            response = view(REQUEST)
            response.context_data["look"] = "done"
            lose(key)
            with pytest.raises(LockLost):
                response.render()
            assert not is_busy(KEY)
            assert not is_busy("outer")

    @pytest.mark.parametrize("view", [template, stream])
    def test_a_response_that_is_never_sent_frees_the_key(
        self, view, is_busy, frozen_lock_clock
    ):
        """So does one that is closed, plain, or rendered by the view itself."""
        response = view(REQUEST)
        assert is_busy(KEY)
        del response
        gc.collect()
        frozen_lock_clock.tick(1)
        assert not is_busy(KEY)
        response = view(REQUEST)
        response.close()
        assert not is_busy(KEY)
        if view is template:
            response.render()
            assert not is_busy(KEY)
        for make in (
            lambda request: HttpResponse("done"),
            lambda request: TemplateResponse(request, PAGE, {"look": "done"}).render(),
        ):
            response = locked_view(KEY)(make)(REQUEST)
            assert response.content == b"done"
            assert not is_busy(KEY)


@pytest.mark.usefixtures("memory_locks")
class TestStreams:
    def test_a_lock_is_held_until_the_stream_is_closed(self, is_busy):
        """Each part of the stream is produced under it."""
        response = Client().get("/stream/")
        assert is_busy(KEY)
        assert b"".join(response.streaming_content) == b"onetwo"
        assert seen == [("one", True), ("two", True)]
        assert not is_busy(KEY)
        # The client may disconnect early.
        response = stream(REQUEST)
        assert next(iter(response)) == b"one"
        response.close()
        assert not is_busy(KEY)
        # A FileResponse keeps its type, so a server may send it in its own way.
        file = FileResponse(io.BytesIO(b"invoice"), filename="invoice.txt")
        response = locked_view(KEY)(lambda request: file)(REQUEST)
        assert is_busy(KEY)
        assert response.file_to_stream.read() == b"invoice"
        response.close()
        assert not is_busy(KEY)

    async def test_an_async_stream_holds_until_it_has_ended(self):
        """An async iterator behaves in the same way."""
        response = await AsyncClient().get("/async-stream/")
        assert await db_lock(KEY).alocked()
        assert (
            b"".join([part async for part in response.streaming_content]) == b"onetwo"
        )
        assert seen == [("one", True), ("two", True)]
        assert not await db_lock(KEY).alocked()

    async def test_a_client_that_disconnects_frees_the_key(self):
        """An ASGI server cancels the stream then."""
        scope = {"type": "http", "method": "GET", "path": "/endless-stream/"}
        scope |= {"headers": [], "query_string": b""}
        communicator = ApplicationCommunicator(get_asgi_application(), scope)
        await communicator.send_input({"type": "http.request"})
        assert (await communicator.receive_output())["status"] == 200
        assert (await communicator.receive_output())["body"] == b"more"
        assert await db_lock(KEY).alocked()
        await communicator.send_input({"type": "http.disconnect"})
        with contextlib.suppress(asyncio.CancelledError):
            await communicator.wait()
        assert not await db_lock(KEY).alocked()

    def test_a_slow_client_of_an_async_view_keeps_the_lock(
        self, is_busy, frozen_lock_clock
    ):
        """Under WSGI its event loop is closed while the stream is sent."""
        response = Client().get("/async-view-of-stream/")
        for _ in range(5):
            # Half of the ttl.
            frozen_lock_clock.tick(15)
            assert is_busy(KEY)
        assert b"".join(response.streaming_content) == b"onetwo"
        assert seen == [("one", True), ("two", True)]
        assert not is_busy(KEY)

    def test_a_stream_that_has_ended_renews_no_forgotten_hold(
        self, until, is_busy, frozen_lock_clock
    ):
        """A thread ends without the release of a lock that its stream has used too."""

        def forget():
            db_lock(KEY).acquire()
            stream(REQUEST).close()

        thread = threading.Thread(target=forget)
        thread.start()
        thread.join()
        until(lambda: frozen_lock_clock.tick(1) or not is_busy(KEY))

    def test_each_stream_uses_a_shared_hold_for_itself(self, is_busy):
        """Neither a release nor the end of another stream ends its use."""
        with db_lock(KEY) as hold:
            first, second = stream(REQUEST), stream(REQUEST)
            hold.release()
            first.close()
            first.close()
        assert is_busy(KEY)
        second.close()
        assert not is_busy(KEY)

    def test_a_stream_outlives_the_block_around_its_view(self, is_busy):
        """A block around the view and the stream do not end each other's hold."""
        with db_lock(KEY):
            response = stream(REQUEST)
            response.close()
            response.close()
            assert is_busy(KEY)
            response = stream(REQUEST)
        assert is_busy(KEY)
        response.close()
        assert not is_busy(KEY)


@pytest.mark.django_db(transaction=True)
class TestOnTheDatabase:
    def test_a_transaction_keeps_its_lock_only_until_its_end(self, is_busy):
        """With ATOMIC_REQUESTS, Django renders the template after the commit."""
        with transaction.atomic():
            response = template(REQUEST)
            if connection.vendor != "sqlite":
                assert is_busy(KEY)
        assert not is_busy(KEY)
        response.context_data["look"] = "done"
        assert response.render().content == b"done"

    # On SQLite a lease cannot be acquired inside a transaction.
    @pytest.mark.engine("postgresql")
    def test_a_lease_outlasts_the_transaction_of_the_view(self, is_busy):
        """With ATOMIC_REQUESTS and ``scope="lease"``, the lock covers rendering."""
        view = locked_view(KEY, scope="lease")(template.__wrapped__)
        with transaction.atomic():
            response = view(REQUEST)
        response.context_data["look"] = lambda: note("template")
        assert response.render().content == b"template"
        assert seen == [("template", True)]
        assert not is_busy(KEY)
