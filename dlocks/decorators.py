"""Decorators that run a function or a view under a lock.

They compute the key from the call's arguments and define what happens if it is busy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import fields
from datetime import timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Never,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import SynchronousOnlyOperation
from django.http import HttpResponse
from django.views import View

# It reports that the app is not installed, so the app cannot register it.
from dlocks import checks  # noqa: F401
from dlocks.conf import DEFAULT_ALIAS
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock, decorate_with
from dlocks.core.options import VIEW, ViewOptions, no_attribute, refuse_unknown
from dlocks.core.policy import LockPolicy, changed_options, shown
from dlocks.core.template import KeyOfCall, name_of
from dlocks.exceptions import LockNotAwaitable, LockTimeout
from dlocks.responses import busy_response, hold_until_produced
from dlocks.runtime.coroutines import run_in_sync_thread
from dlocks.values import Duration

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V", bound=View)
# The result of a call when the key is busy.
B = TypeVar("B", covariant=True)

Key = str | Callable[..., str]

# Why a lock decorates nothing that works after its call has returned.
TOO_LATE = (
    "which would work after the release of the lock. Use 'with db_lock(…)' inside the"
    " function."
)
WORKS_LATER = (
    types.GeneratorType,
    types.AsyncGeneratorType,
    contextlib._GeneratorContextManager,
    contextlib._AsyncGeneratorContextManager,
)


_current: ContextVar[Hold] = ContextVar("dlocks_current_hold")


def current_hold() -> Hold:
    """Return the hold of the decorated function, view or command that runs.

        current_hold().renew(max_hold=3600)

    If several run within each other, it is the innermost. It is known in the
    function's tasks and calls of ``sync_to_async()``, but not in its threads. Blocks
    do not change it. Raise RuntimeError if no decorated function runs.
    """
    hold = _current.get(None)
    if hold is None:
        raise RuntimeError(
            "No function runs here that a lock decorates. In a with block, use the hold"
            " itself: with db_lock(key) as hold."
        )
    return hold


@contextlib.contextmanager
def running(hold: Hold) -> Iterator[None]:
    """Let ``current_hold()`` return a hold in a block."""
    token = _current.set(hold)
    try:
        yield
    finally:
        # A coroutine may be collected as garbage, in another context.
        with contextlib.suppress(ValueError):
            _current.reset(token)


class LockDecorator(Generic[B]):
    """The decorator that puts a function under a lock.

    ``db_lock(…)`` creates it. It decorates functions, coroutine functions, methods and
    class-based views. Each call acquires the lock of the key that its arguments yield.
    The decorator cannot be used in a ``with`` statement: a block has no arguments and
    cannot be skipped.
    """

    def __init__(self, key: Key, *, busy: Any = "raise", **policy: Any) -> None:
        # Validate the options now. If the key is a function, the real one is known only
        # at the call.
        self._example = Lock(key="-" if callable(key) else key, **policy)
        if busy not in ("raise", "skip") and not callable(busy):
            raise ValueError(
                f"busy must be 'raise', 'skip' or a callable, not {busy!r}"
            )
        self.key = key
        self.busy = busy
        self.policy = policy

    def __repr__(self) -> str:
        policy = f"busy={shown(self.busy)}{changed_options(self._example)}"
        return f"<LockDecorator {shown(self.key)} {policy}>"

    if not TYPE_CHECKING:

        def __enter__(self) -> Never:
            raise TypeError(
                "A lock with busy=… or with a function as the key is a decorator and no"
                " context manager. In a with block, use db_lock(key), which raises"
                " LockTimeout, or db_lock(key).try_acquire(), which returns None."
            )

        def __exit__(self, *exc: object) -> None:
            """Do nothing: ``__enter__`` always raises."""

        __aenter__, __aexit__ = __enter__, __exit__

        def __getattr__(self, name: str) -> Never:
            hint = None
            if hasattr(Lock, name):
                hint = "It is a decorator. Without busy=…, db_lock(key) returns a lock."
            raise no_attribute(self, name, hint)

    def lock(self, key: str) -> Lock:
        """Return the lock of one call."""
        return Lock(key=key, **self.policy)

    async def alock(self, key: str) -> Lock:
        return self.lock(key)

    @overload
    def __call__(self, function: type[V]) -> type[V]: ...

    @overload
    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R | B]]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R | B]: ...

    def __call__(self, function: Any) -> Any:
        """Return the function under the lock.

        Raise TypeError or ValueError if the function cannot be decorated.
        """
        if isinstance(function, type):
            return self._view_class(function)
        refuse_undecoratable(function)
        is_asynchronous = iscoroutinefunction(function)
        return (self._asynchronous if is_asynchronous else self._sync)(function)

    def _key_of(self, function: Callable[..., Any]) -> Callable[..., str]:
        return self.key if callable(self.key) else KeyOfCall(self.key, function)

    def _sync(self, function: Callable[..., Any]) -> Callable[..., Any]:
        key_of = self._key_of(function)

        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            key, entered = key_of(*args, **kwargs), False
            try:
                with self.lock(key) as hold:
                    entered = True
                    with running(hold):
                        result = function(*args, **kwargs)
                    if inspect.iscoroutine(result):
                        result.close()
                        raise TypeError(
                            f"{name_of(function)} returned a coroutine, which would run"
                            " after the release of the lock. Make it an 'async def', or"
                            " mark it with asgiref.sync.markcoroutinefunction()."
                        )
                    return _checked(function, hold, result)
            except (LockTimeout, LockNotAwaitable) as error:
                # A LockTimeout from the function itself concerns another lock.
                if entered or self.busy == "raise":
                    raise
                return self._if_busy(error, key, args, kwargs)

        return locked

    def _asynchronous(self, function: Callable[..., Any]) -> Callable[..., Any]:
        key_of = self._key_of(function)

        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            try:
                key = key_of(*args, **kwargs)
            except SynchronousOnlyOperation:
                # The key needs the database, for example for ``request.user``.
                key = await run_in_sync_thread(
                    functools.partial(key_of, *args, **kwargs)
                )
            entered = False
            try:
                async with await self.alock(key) as hold:
                    entered = True
                    with running(hold):
                        result = await function(*args, **kwargs)
                    return _checked(function, hold, result)
            except (LockTimeout, LockNotAwaitable) as error:
                if entered or self.busy == "raise":
                    raise
                result = self._if_busy(error, key, args, kwargs)
                return await result if inspect.isawaitable(result) else result

        return locked

    def _if_busy(self, error: Any, key: str, args: Any, kwargs: Any) -> Any:
        if self.busy == "skip":
            return None
        if not isinstance(error, LockTimeout):
            # The caller could not wait for the key.
            error = LockTimeout(str(error), key=key, timeout=0.0, holder=error.holder)
        return self.busy(error, *args, **kwargs)

    def _view_class(self, view_class: type) -> type:
        if not issubclass(view_class, View):
            raise TypeError(
                f"{view_class.__qualname__} is not a class-based view. Decorate its"
                " methods instead."
            )
        dispatch = view_class.dispatch
        sync, asynchronous = self._sync(dispatch), self._asynchronous(dispatch)

        @functools.wraps(dispatch)
        def locked(self: View, *args: Any, **kwargs: Any) -> Any:
            # ``dispatch()`` is no coroutine function even if it returns a coroutine.
            return (asynchronous if type(self).view_is_async else sync)(
                self, *args, **kwargs
            )

        view_class.dispatch = locked  # type: ignore[method-assign]
        return view_class


def locked_view(
    key: Key,
    *,
    status: int = 409,
    retry_after: bool | int | timedelta = 1,
    timeout: Duration | None = 0,
    using: str = DEFAULT_ALIAS,
    **options: Unpack[ViewOptions],
) -> LockDecorator[HttpResponse]:
    """Decorate a view, so that a request that finds the key busy gets ``status``.

    The view can be a function or a class.

    ``status`` is 409 (Conflict) or another 4xx, or 503. The response is plain text, the
    template ``dlocks/busy.html`` or JSON, as the request prefers. ``retry_after`` is
    the header ``Retry-After``, as a number of seconds or a ``timedelta``. It is 1 by
    default, since a lock is usually held for much less time than its lease lasts.
    ``False`` omits it. ``timeout`` is the time for which a request waits first. By
    default it does not wait. The other options are those of ``db_lock()``.
    """
    policy: dict[str, Any] = {**options}
    refuse_unknown(
        "locked_view()",
        policy,
        VIEW,
        busy="To choose the response, use db_lock(key, busy=…) as the decorator.",
    )
    refuse_bare("locked_view", key)
    if isinstance(retry_after, timedelta):
        retry_after = math.ceil(retry_after.total_seconds())
    if not isinstance(status, int) or not (400 <= status < 500 or status == 503):
        raise ValueError(f"status must be 4xx or 503, not {status!r}")
    if not isinstance(retry_after, int) or retry_after < 0:
        raise ValueError(
            "retry_after must be False, a whole number of seconds or a timedelta, not"
            f" {retry_after!r}"
        )

    def busy(error: LockTimeout, /, *args: Any, **kwargs: Any) -> HttpResponse:
        # In a method, the request is the second argument.
        requests = (one for one in args if hasattr(one, "get_preferred_type"))
        response = busy_response(next(requests, None), status)
        if retry_after is not False:
            response["Retry-After"] = str(int(retry_after))
        return response

    return LockDecorator(key, busy=busy, timeout=timeout, using=using, **policy)


def refuse_bare(name: str, key: Any) -> None:
    """Raise TypeError if a decorator without parentheses decorates ``key``.

    ``key`` is then no key function but the decorated one. The decorator's caller is
    just defining it, and has not bound it to its name yet.
    """
    function = inspect.unwrap(key) if callable(key) else key
    if isinstance(function, types.FunctionType):
        frame, label = sys._getframe(2), function.__name__
        is_bare = (
            function.__code__ in frame.f_code.co_consts
            and label != "<lambda>"
            and not any(
                value is key or value is function
                for value in (*frame.f_locals.values(), frame.f_globals.get(label))
            )
        )
    else:
        # A key function returns a string. The only such classes are those of strings.
        is_bare = isinstance(key, type) and not issubclass(key, str)
    if is_bare:
        raise TypeError(
            f"@{name} on {function.__name__!r} has no key. Write it in parentheses, as"
            f" in @{name}('report')."
        )


def _checked(function: Any, hold: Any, result: T) -> T:
    """Return the result of a call, and extend the hold to a streaming response.

    Raise TypeError for a generator or a context manager, which works after the call has
    returned.
    """
    hold_until_produced(hold, result)
    if isinstance(result, WORKS_LATER):
        raise TypeError(
            f"{name_of(function)} returned a {type(result).__name__}, {TOO_LATE}"
        )
    return result


def refuse_undecoratable(function: Any) -> None:
    """Raise TypeError if the lock would not cover the function's work.

    This includes objects that are not functions, and generator functions, which work
    after their call has returned.
    """
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(
            f"Put the decorator of the lock below @{type(function).__name__}, next to"
            " the function."
        )
    if not callable(function):
        raise TypeError(
            "A lock decorates functions, methods and class-based views, not"
            f" {function!r}. Write the key in parentheses: @db_lock('report')."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name_of(function)} is a generator, {TOO_LATE}")


def _decorate(lock: Lock, function: Any) -> Any:
    policy = {field.name: getattr(lock, field.name) for field in fields(LockPolicy)}
    return LockDecorator[Never](**policy)(function)


decorate_with.append(_decorate)
