"""Functions and views under a lock: the key from the call's arguments, and what happens when it is busy."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import string
import types
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, overload

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import SynchronousOnlyOperation
from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.views import View

from dlocks.conf import DEFAULT_ALIAS
from dlocks.coroutines import in_django_thread
from dlocks.exceptions import LockNotAwaitable, LockTimeout
from dlocks.locks import Lock

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
V = TypeVar("V", bound=View)
# What a call gives when the key is busy.
B = TypeVar("B", covariant=True)

Key = str | Callable[..., str]

WORKS_LATER = (
    types.GeneratorType,
    types.AsyncGeneratorType,
    contextlib._GeneratorContextManager,
    contextlib._AsyncGeneratorContextManager,
)

FIELD = re.compile(r"(?P<name>[^\W\d]\w*)(?:\.[^\W\d]\w*|\[[^\[\]]+\])*")


class LockDecorator(Generic[B]):
    """
    What ``db_lock(…)`` puts around a function, a coroutine function, a method or a class-based view.

    Each call takes the lock whose key its own arguments say. It has no ``with`` block: there is no call to take the
    arguments from, and a block cannot be skipped.
    """

    def __init__(self, key: Key, *, busy: Any = "raise", **policy: Any) -> None:
        if not callable(key):
            Lock(key=key, **policy)
        else:
            # To have the policy judged now; the key is known only at the call.
            Lock(key="-", **policy)
        if busy not in ("raise", "skip") and not callable(busy):
            raise ValueError(f"busy must be 'raise', 'skip' or a callable, not {busy!r}")
        self.key = key
        self.busy = busy
        self.policy = policy

    def __repr__(self) -> str:
        return f"<LockDecorator {self.key!r} busy={self.busy!r}>"

    def lock(self, key: str) -> Lock:
        """Return the lock of one call."""
        return Lock(key=key, **self.policy)

    async def alock(self, key: str) -> Lock:
        return self.lock(key)

    @overload
    def __call__(self, function: type[V]) -> type[V]: ...

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R | B]]: ...

    @overload
    def __call__(self, function: Callable[P, R]) -> Callable[P, R | B]: ...

    def __call__(self, function: Any) -> Any:
        """Return the function under the lock, or raise TypeError or ValueError for what cannot be put under it."""
        if isinstance(function, type):
            return self._view_class(function)
        refuse_what_has_no_end(function)
        key_of = self.key if callable(self.key) else _KeyOfCall(self.key, function)
        return self._asynchronous(function, key_of) if iscoroutinefunction(function) else self._sync(function, key_of)

    def _sync(self, function: Callable[..., Any], key_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def locked(*args: Any, **kwargs: Any) -> Any:
            lock, entered = self.lock(key_of(*args, **kwargs)), False
            try:
                with lock:
                    entered = True
                    result = function(*args, **kwargs)
                    if inspect.iscoroutine(result):
                        result.close()
                        raise TypeError(
                            f"{_name(function)} returned a coroutine, which would have run after the lock was given "
                            "back. Make it an 'async def', or mark it with asgiref.sync.markcoroutinefunction()."
                        )
                    return _done(function, result)
            except (LockTimeout, LockNotAwaitable) as error:
                # One of the function's own is not about this lock.
                if entered or self.busy == "raise":
                    raise
                return None if self.busy == "skip" else self.busy(_as_timeout(lock, error), *args, **kwargs)

        return locked

    def _asynchronous(self, function: Callable[..., Any], key_of: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def locked(*args: Any, **kwargs: Any) -> Any:
            try:
                key = key_of(*args, **kwargs)
            except SynchronousOnlyOperation:
                # It asks the database, as request.user does.
                key = await in_django_thread(functools.partial(key_of, *args, **kwargs))
            lock, entered = await self.alock(key), False
            try:
                async with lock:
                    entered = True
                    return _done(function, await function(*args, **kwargs))
            except (LockTimeout, LockNotAwaitable) as error:
                if entered or self.busy == "raise":
                    raise
                result = None if self.busy == "skip" else self.busy(_as_timeout(lock, error), *args, **kwargs)
                return await result if inspect.isawaitable(result) else result

        return locked

    def _view_class(self, view_class: type) -> type:
        if not issubclass(view_class, View):
            raise TypeError(f"{view_class.__qualname__} is not a view: decorate its methods.")
        dispatch = view_class.dispatch
        key_of = self.key if callable(self.key) else _KeyOfCall(self.key, dispatch)
        sync, asynchronous = self._sync(dispatch, key_of), self._asynchronous(dispatch, key_of)

        @functools.wraps(dispatch)
        def locked(self: View, *args: Any, **kwargs: Any) -> Any:
            # dispatch() is no coroutine function even where it returns a coroutine.
            return (asynchronous if type(self).view_is_async else sync)(self, *args, **kwargs)

        view_class.dispatch = locked  # type: ignore[method-assign]
        return view_class


def locked_view(
    key: Key,
    *,
    status: Literal[409, 423] = 409,
    retry_after: bool | int = True,
    timeout: float | None = 0,
    using: str = DEFAULT_ALIAS,
    **policy: Any,
) -> LockDecorator[HttpResponse]:
    """
    Put a view, a function or a class, under a lock; a request that finds it busy is answered with ``status``.

    409 is Conflict and 423 Locked. ``retry_after`` adds the header: the seconds that the holder's lease still has,
    at least 1, or the number given. ``timeout`` is how long a request waits first, by default not at all. The rest
    is the policy of ``db_lock()``.
    """
    if status not in {409, 423}:
        raise ValueError(f"status must be 409 or 423, not {status!r}")
    if not isinstance(retry_after, int) or retry_after < 0:
        raise ValueError(f"retry_after must be True, False or a whole number of seconds, not {retry_after!r}")

    def busy(error: LockTimeout, /, *args: Any, **kwargs: Any) -> HttpResponse:
        # Not who has it: that is nothing for the outside.
        response = HttpResponse(_("Somebody else is at work on this. Try again later."), "text/plain", status)
        if retry_after is True:
            left = error.holder.remaining if error.holder is not None else 0.0
            # Not every backend knows it.
            response["Retry-After"] = str(max(1, math.ceil(left)) if math.isfinite(left) else 1)
        elif retry_after is not False:
            response["Retry-After"] = str(retry_after)
        return response

    return LockDecorator(key, busy=busy, timeout=timeout, using=using, **policy)


def _as_timeout(lock: Lock, error: LockTimeout | LockNotAwaitable) -> LockTimeout:
    """Return what a function for busy keys is called with, also where the key could not be waited for."""
    if isinstance(error, LockTimeout):
        return error
    return LockTimeout(str(error), key=lock.key, timeout=0.0, holder=error.holder)


def _done(function: Any, result: T) -> T:
    """Return the result of a call; raise TypeError for one whose work is still to come."""
    if isinstance(result, WORKS_LATER):
        raise TypeError(
            f"{_name(function)} returned a {type(result).__name__}, which would have worked after the lock was given "
            "back. Use 'with db_lock(…)' inside of it."
        )
    return result


def refuse_what_has_no_end(function: Any) -> None:
    """Raise TypeError for what is no function, or goes on after its call has returned."""
    if isinstance(function, (staticmethod, classmethod)):
        raise TypeError(f"Put the lock under @{type(function).__name__}, next to the function.")
    if not callable(function):
        raise TypeError(
            f"A lock decorates functions, methods and class-based views, not {function!r}. Write the key in "
            "parentheses: @db_lock('report')."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{_name(function)} is a generator: it works after its call has returned, when the lock would have been "
            "given back. Use 'with db_lock(…)' inside of it."
        )


class Template(string.Formatter):
    """A key with fields in it, as ``str.format()`` has them; ``names`` are the names that the fields begin with."""

    def __init__(self, template: str) -> None:
        self.template = template
        try:
            self.pieces = list(self.parse(template))
        except ValueError as error:
            raise ValueError(f"{template!r} is not a template: {error}.") from error
        self.names: list[str] = []
        for number, (_literal, field, spec, conversion) in enumerate(self.pieces):
            if field is None:
                continue
            self._check(field, spec or "", conversion)
            self.names.append(_first_of(field))
            if number + 1 < len(self.pieces) and not self.pieces[number + 1][0]:
                raise ValueError(
                    f"{template!r} needs something between {{{field}}} and the field after it, or calls with "
                    "different arguments would have the same key."
                )

    def render(self, values: Mapping[str, Any]) -> str:
        key, fields_left = "", len(self.names)
        for number, (literal, field, spec, conversion) in enumerate(self.pieces):
            key += literal
            if field is None:
                continue
            fields_left -= 1
            value, _first = self.get_field(field, (), values)
            text = self.format_field(self.convert_field(value, cast("Any", conversion)), spec or "")
            if fields_left:
                # A field that ends where this is first met can be told from what follows; the last may hold anything.
                following = self.pieces[number + 1][0]
                if (text + following).find(following) != len(text):
                    raise ValueError(
                        f"{{{field}}} of {self.template!r} is {text!r} here, which with {following!r} after it could "
                        "be taken for other values. Put that field last, choose another separator, or pass a function "
                        "as the key."
                    )
            key += text
        return key

    def _check(self, field: str, spec: str, conversion: str | None) -> None:
        if not FIELD.fullmatch(field):
            raise ValueError(
                f"{self.template!r}: {{{field}}} is not a field. Name an argument, as in {{order}}, {{order.pk}} or "
                "{items[0]}; double the braces that stand for themselves."
            )
        if any(name.startswith("_") for name in re.findall(r"\.(\w+)", re.sub(r"\[[^\]]*\]", "", field))):
            raise ValueError(f"{self.template!r}: {{{field}}} reaches for an attribute that begins with an underscore.")
        if conversion not in {None, "r", "s", "a"}:
            raise ValueError(f"{self.template!r}: {{{field}!{conversion}}} has a conversion other than !r, !s and !a.")
        if "{" in spec:
            raise ValueError(f"{self.template!r}: {{{field}}} has a field within its format.")


class _KeyOfCall:
    """The key of a call: the template over the arguments that the call binds, defaults too."""

    def __init__(self, template: str, function: Callable[..., Any]) -> None:
        self.template = Template(template)
        self.function = function
        # method_decorator() says of a bound method that it wraps the function, which has one argument more.
        self.signature = inspect.signature(function, follow_wrapped=not isinstance(function, functools.partial))
        kinds = {parameter.kind: name for name, parameter in self.signature.parameters.items()}
        self.others = kinds.get(inspect.Parameter.VAR_KEYWORD)
        for name in self.template.names:
            if name not in self.signature.parameters and self.others is None:
                raise ValueError(
                    f"{template!r} needs an argument {name!r}; {_name(function)} takes "
                    f"{', '.join(map(repr, self.signature.parameters)) or 'none'}."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{_name(self.function)}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        if self.others is not None:
            values = {**values[self.others], **values}
        for name in self.template.names:
            if name not in values:
                raise TypeError(f"{_name(self.function)} needs {name!r} here, for {self.template.template!r}.")
        return self.template.render(values)


def _first_of(field: str) -> str:
    return re.split(r"[.\[]", field, maxsplit=1)[0]


def _name(function: Any) -> str:
    return f"{getattr(function, '__qualname__', None) or repr(function)}()"
