"""The options of locks: their types, and the errors for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

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


class LockOptions(_Wait, _Times, RunOptions, total=False):
    """The options of ``db_rwlock()`` and ``db_semaphore()``."""


class KeyOptions(LockOptions, _Shared, total=False):
    """The options of ``db_lock()``, which describes them."""


class ViewOptions(_Times, RunOptions, _Shared, total=False):
    """The options that ``locked_view()`` shares with ``db_lock()``."""


# The names of all options, for messages.
LOCK = (*LockOptions.__annotations__, "using")
KEYS = (*KeyOptions.__annotations__, "using")
KEY = (*KeyOptions.__annotations__, "busy", "using")
RUN = ("min_hold", "max_hold", *RunOptions.__annotations__, "using")
VIEW = ("status", "retry_after", "timeout", *ViewOptions.__annotations__, "using")

# What to use instead of the options of other libraries and of other locks.
HINTS = {
    **dict.fromkeys(
        ("block", "blocking", "nowait", "wait"),
        "For a lock that does not wait, use timeout=0.",
    ),
    "permits": "For a semaphore, use db_semaphore(key, permits).",
    "shared": "For a read lock, use db_rwlock(key).read().",
}


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
