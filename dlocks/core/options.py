"""The options of locks: their types, and the errors for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Never, TypedDict

from dlocks.values import Duration, Scope

if TYPE_CHECKING:
    from dlocks.core.hold import Hold


class _Wait(TypedDict, total=False):
    timeout: Duration | None


class _Times(TypedDict, total=False):
    ttl: Duration
    max_hold: Duration | None
    min_hold: Duration
    reentrant: bool


class _Shared(TypedDict, total=False):
    shared: bool


class RunOptions(TypedDict, total=False):
    """The options that ``run_once()`` shares with ``db_lock()``."""

    renew: bool
    scope: Scope | None
    takeover: bool
    fair: bool
    release_at: Literal["transaction", "exit"]
    on_lost: Callable[[Hold], object] | None
    note: str


class LockOptions(_Wait, _Times, RunOptions, total=False):
    """The options of ``db_rwlock()`` and ``db_semaphore()``."""


class KeyOptions(_Wait, _Times, RunOptions, _Shared, total=False):
    """The options of ``db_lock()``, which describes them."""


class ViewOptions(_Times, RunOptions, _Shared, total=False):
    """The options that ``locked_view()`` shares with ``db_lock()``."""


# The names of all options, for messages.
LOCK = (*LockOptions.__annotations__, "using")
KEYS = (*KeyOptions.__annotations__, "using")
KEY = (*KeyOptions.__annotations__, "busy", "using")
RUN = ("min_hold", "max_hold", "busy", *RunOptions.__annotations__, "using")
VIEW = ("status", "retry_after", "timeout", *ViewOptions.__annotations__, "using")

# What to use instead of the options of other libraries and of other locks.
HINTS = {
    **dict.fromkeys(
        ("block", "blocking", "nowait", "wait"),
        "For a lock that does not wait, use timeout=0.",
    ),
    **dict.fromkeys(
        ("blocking_timeout", "wait_time"), "To set how long to wait, use timeout=…."
    ),
    **dict.fromkeys(
        ("expire", "auto_release_time", "lease_time"),
        "To set how long the key stays taken after a crash, use ttl=….",
    ),
    **dict.fromkeys(
        ("side_effect", "suppress_acquisition_exceptions"),
        "To skip the work while the key is held, use busy='skip' in a decorator, or"
        " try_acquire().",
    ),
    "auto_renewal": "A lease is renewed in the background, unless renew=False.",
    "id": "Each hold has a random owner, and hold.detach() passes it on as text.",
    "permits": "For a semaphore, use db_semaphore(key, permits).",
    "raise_on_release_error": "The end of a block raises LockLost if it was lost.",
    "shared": "For a read lock, use db_rwlock(key).read().",
    "sleep": "There is no interval, because waiters are notified.",
    "thread_local": "Any thread may use a hold that it is given, in a with block.",
    "xact": "A lock that is acquired inside atomic() is part of the transaction.",
}

# What to use instead of the methods of other libraries' locks.
METHODS = {
    **dict.fromkeys(
        ("arenew", "check", "acheck", "remaining", "token", "owner", "atomic"),
        "The hold has it, which acquire() and 'with … as' return.",
    ),
    **dict.fromkeys(
        ("extend", "reacquire"),
        "A lease is renewed in the background, or, with renew=False, by hold.renew().",
    ),
    "owned": "Use lock.held(), or hold.check(), which asks the backend.",
    "get_owner_id": "Use lock.holder().",
    "reset": "Use 'manage.py clear_lock'.",
    "contenders": "Use lock.waiters(), or 'manage.py list_locks --waiting'.",
    "start": "Use lock.acquire().",
    "stop": "Use lock.release().",
}


def no_attribute(obj: object, name: str, hint: str | None) -> AttributeError:
    """Return the error for an attribute that an object does not have."""
    text = f"{type(obj).__name__!r} object has no attribute {name!r}"
    return AttributeError(f"{text}. {hint}" if hint else text, name=name, obj=obj)


def refuse_arguments(method: str, attempt: str) -> Never:
    """Raise TypeError for arguments of ``acquire()``, as those of other locks."""
    raise TypeError(
        f"{method}() has no arguments: the wait is an option of the lock, as in"
        f" db_lock(key, timeout=5). {attempt}() does not wait, or waits with timeout=5,"
        " and returns None."
    )


def refuse_unknown(
    function: str, options: Mapping[str, Any], names: tuple[str, ...], **hints: str
) -> None:
    """Raise TypeError for the first option that is not one of ``names``.

    ``hints`` has a sentence for some of the options that are not there.
    """
    for name in options:
        if name in names:
            continue
        message = f"{function} has no option {name!r}."
        hint = {**HINTS, **hints}.get(name)
        if hint is None and (close := difflib.get_close_matches(name, names, 1)):
            message += f" Did you mean {close[0]!r}?"
        message += f" Options: {', '.join(names)}."
        raise TypeError(message if hint is None else f"{message} {hint}")
