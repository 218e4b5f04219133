"""The responses of locked views: those of busy keys, and those produced later."""

from __future__ import annotations

import logging
import weakref
from asyncio import _get_running_loop
from contextlib import suppress
from functools import partial
from typing import Any

from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.template import TemplateDoesNotExist
from django.template.loader import render_to_string
from django.template.response import SimpleTemplateResponse
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext as _

from dlocks.core.entry import Entry
from dlocks.core.hold import Hold
from dlocks.exceptions import LockError, LockLost
from dlocks.runtime.keeper import keeper

logger = logging.getLogger("dlocks")


def busy_response(request: Any, status: int) -> HttpResponse:
    """Return a response in the media type that the request prefers."""
    # It does not name the holder, which is internal information.
    text = _("This is in use at the moment. Try again later.")
    types = ["text/plain", "text/html", "application/json"]
    wanted = request and request.get_preferred_type(types)
    response = HttpResponse(text, "text/plain", status)
    if wanted == "application/json":
        response = JsonResponse({"detail": text}, status=status)
    elif wanted == "text/html":
        with suppress(TemplateDoesNotExist):
            # Without context processors, which may use the database.
            context = {"text": text, "request": request}
            page = render_to_string("dlocks/busy.html", context)
            response = HttpResponse(page, status=status)
    patch_vary_headers(response, ["Accept"])
    return response


def hold_until_produced(hold: Hold, result: Any) -> None:
    """Keep a view's hold until its response has been rendered or closed.

    Other results change nothing. Neither does a hold in transaction scope, which the
    database keeps until the transaction ends.
    """
    is_template = isinstance(result, SimpleTemplateResponse) and not result.is_rendered
    if hold.scope == "transaction" or not (
        is_template or isinstance(result, StreamingHttpResponse)
    ):
        return
    entry = hold.response_entry()
    # Middleware may return another response instead of this one. Then this one is
    # neither rendered nor closed.
    forgotten = weakref.finalize(result, _leave_later, entry)
    # The keeper releases all holds at the end of the process.
    forgotten.atexit = False
    close = partial(_close, entry, forgotten)
    result._resource_closers.append(close)
    if is_template:
        # Another lock of the same view may have replaced it already.
        inner = vars(result).get("render")
        result.render = partial(_render, result, inner, close, entry, forgotten)
    # Last, so that an interrupt adds no entry without a response that leaves it.
    entry.hold.enter(entry, block=True)


def _render(response: Any, inner: Any, close: Any, entry: Entry, forgotten: Any) -> Any:
    # A cache pickles the response in a post-render callback, so this attribute must be
    # removed first.
    del response.render
    if inner is not None:
        response.render = inner
    with suppress(ValueError):
        # A closed response has no closers any more.
        response._resource_closers.remove(close)
    try:
        rendered = response.render()
    except BaseException as error:
        _leave(entry, forgotten, error)
        raise
    _leave(entry, forgotten)
    return rendered


def _close(entry: Entry, forgotten: Any) -> None:
    try:
        _leave(entry, forgotten)
    except LockLost:
        # The hold has logged it.
        pass
    except LockError as error:
        # Django ignores errors of the closers.
        logger.warning("%s", error)


def _leave(entry: Entry, forgotten: Any, error: BaseException | None = None) -> None:
    """Leave the entry, unless this response has already left it."""
    if not forgotten.alive:
        return
    leave, backend = partial(_leave_after, entry, error), entry.hold.backend
    # Django's asynchronous test client closes responses in the event loop.
    leave() if _get_running_loop() is None else keeper.run(leave, backend)
    # Last, so that the end of an interrupted response leaves the entry.
    forgotten.detach()


def _leave_after(entry: Entry, error: BaseException | None) -> None:
    try:
        entry.hold.leave(entry, failed=error is not None, at_block_end=True)
    except LockError as trouble:
        if error is None:
            raise
        error.add_note(f"{type(trouble).__name__}: {trouble}")


def _leave_later(entry: Entry) -> None:
    # Garbage collection runs in any thread at any moment. It must not do I/O.
    keeper.later(partial(_release, entry), 0.0, entry.hold.backend)


def _release(entry: Entry) -> None:
    with suppress(LockLost):
        entry.hold.leave(entry, failed=True)
