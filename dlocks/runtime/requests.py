"""Requests of a thread, which never begin inside of another one.

A signal handler, or a ``__del__()`` that the garbage collector calls, can strike in the
middle of a request. On the same connection, each of the two would read the reply to the
other.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from threading import get_ident
from types import FrameType
from typing import Any, TypeVar

from django.views.decorators.debug import sensitive_variables

from dlocks.exceptions import LockBackendError
from dlocks.runtime.threads import this_thread

T = TypeVar("T")

# The threads that are in a request. An exception of a signal handler may leave one.
_threads: set[int] = set()

REFUSED = (
    "A lock request was not sent, because it would interrupt another request of the"
    " same thread. It comes from a signal handler or a __del__() method. Use locks in"
    " another thread there, or only note what has to be done."
)


# The variables of backends and drivers contain owners. Error mails must not show them.
@sensitive_variables()
def request(function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Call a function that sends requests in this thread.

    Raise LockBackendError, and do not call it, inside of another request.
    """
    thread = get_ident()
    if thread in _threads and _is_within_request(sys._getframe(1)):
        raise nested_request()
    try:
        _threads.add(thread)
        return function(*arguments, **keywords)
    finally:
        _threads.discard(thread)


def let_renewals_pass() -> None:
    """Send the renewals that wait for this thread, between two tries of a request.

    Another session may keep a row locked for seconds. Meanwhile no other hold must lose
    its lease, because one thread sends all requests of a server. So it earns promise 2
    of docs/safety.md.
    """
    send = this_thread.send_renewals
    if send is None:
        return
    thread, is_request = get_ident(), get_ident() in _threads
    this_thread.send_renewals = None
    _threads.discard(thread)
    try:
        send()
    finally:
        this_thread.send_renewals = send
        if is_request:
            _threads.add(thread)


def refuse_nested() -> None:
    """Raise LockBackendError if this thread is in the middle of a request.

    Call it before a change of state that only the request would complete.
    """
    if get_ident() in _threads and _is_within_request(sys._getframe(1)):
        raise nested_request()


def is_nested() -> bool:
    """Return whether this thread is in the middle of a request."""
    return get_ident() in _threads and _is_within_request(sys._getframe(1))


def _is_within_request(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _REQUEST:
        frame = frame.f_back
    return frame is not None


def nested_request() -> LockBackendError:
    """Return the error of a request that was not sent."""
    error = LockBackendError(REFUSED)
    error.changed_nothing = True
    return error


_REQUEST = inspect.unwrap(request).__code__
