"""The key and the policy of a lock: their defaults and checks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

from dlocks.backends.base import Backend
from dlocks.conf import DEFAULT_ALIAS
from dlocks.values import KEY_LENGTH, LONGEST_WAIT, UNLIMITED, Scope, seconds


class FromSettings:
    """The value of an argument that was not given: the alias's settings decide."""

    def __repr__(self) -> str:
        return "<from settings>"

    def __reduce__(self) -> str:
        return "FROM_SETTINGS"


FROM_SETTINGS = FromSettings()


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class LockPolicy:
    """The key of a lock, and the options of ``db_lock()``."""

    key: str
    using: str = DEFAULT_ALIAS
    timeout: float | FromSettings | None = FROM_SETTINGS
    ttl: float | FromSettings = FROM_SETTINGS
    renew: bool = True
    reentrant: bool = True
    scope: Scope | None = None
    max_hold: float | None = None
    min_hold: float = 0.0
    takeover: bool = True
    fair: bool = True
    shared: bool = False
    permits: int = UNLIMITED
    release_at: Literal["transaction", "exit"] = "transaction"
    on_lost: Callable[[Any], object] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        check_key(self.key)
        if not isinstance(self.timeout, FromSettings) and self.timeout is not None:
            self._in_seconds("timeout", longest=LONGEST_WAIT)
        if not isinstance(self.ttl, FromSettings):
            self._in_seconds("ttl", above_zero=True)
        if self.max_hold is not None:
            self._in_seconds("max_hold", above_zero=True)
        self._in_seconds("min_hold")
        if self.max_hold is not None and self.min_hold > self.max_hold:
            raise ValueError(
                f"min_hold must not be greater than max_hold: {shown(self.min_hold)} s"
                f" and {shown(self.max_hold)} s"
            )
        for name in ("renew", "reentrant", "takeover", "fair", "shared"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {value!r}")
        if self.scope not in {None, "lease", "transaction"}:
            raise ValueError(
                f"scope must be 'lease', 'transaction' or None, not {self.scope!r}"
            )
        if self.release_at not in {"transaction", "exit"}:
            raise ValueError(
                f"release_at must be 'transaction' or 'exit', not {self.release_at!r}"
            )
        if isinstance(self.permits, bool) or not isinstance(self.permits, int):
            raise TypeError(
                f"permits must be an int, not {type(self.permits).__name__}"
            )
        if not 1 <= self.permits <= UNLIMITED:
            raise ValueError(
                f"permits must be between 1 and {UNLIMITED}, not {self.permits}"
            )
        if not isinstance(self.note, str):
            raise TypeError(f"note must be a string, not {type(self.note).__name__}")
        if self.on_lost is not None:
            if not callable(self.on_lost):
                raise TypeError(
                    f"on_lost must be callable, not {type(self.on_lost).__name__}"
                )
            # Or an object that is called like one.
            on_lost: Any = self.on_lost
            if any(map(inspect.iscoroutinefunction, (on_lost, on_lost.__call__))):
                raise TypeError(
                    "on_lost cannot be a coroutine function, because it is called in a"
                    " thread without an event loop."
                )

    def _in_seconds(self, name: str, **bounds: Any) -> None:
        """Check a duration, and replace a ``timedelta`` by its seconds."""
        value = getattr(self, name)
        number = seconds(name, value, **bounds)
        if isinstance(value, timedelta):
            object.__setattr__(self, name, number)

    def __repr__(self) -> str:
        keys = ", ".join(map(repr, self.keys))
        return f"<{type(self).__name__} {keys}{changed_options(self)}>"

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the key, or all keys of a lock on several."""
        return (self.key,)

    def _full_key(self, backend: Backend) -> str:
        key = backend.prefix + self.key
        if len(key) > KEY_LENGTH:
            raise ValueError(
                f"A key can have at most {KEY_LENGTH} characters with its prefix, not"
                f" {len(key)}: {key!r}"
            )
        return key


def check_key(key: object) -> None:
    """Raise TypeError or ValueError for an invalid key, on every backend alike."""
    if not isinstance(key, str):
        hint = (
            " To set how long to wait, use timeout=…."
            if isinstance(key, (int, float)) or key is None
            else ""
        )
        raise TypeError(
            f"A key must be a string, not {type(key).__name__}: {key!r}.{hint}"
        )
    if not key:
        raise ValueError("A key cannot be empty")
    if len(key) > KEY_LENGTH:
        raise ValueError(
            f"A key can have at most {KEY_LENGTH} characters, not {len(key)}:"
            f" {key[:40]!r}…"
        )
    if "\0" in key:
        raise ValueError(f"A key cannot contain a NUL character: {key!r}")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"A key must be encodable as UTF-8: {error}") from error


# The options of a lock.
DEFAULTS = {
    field.name: field.default for field in fields(LockPolicy) if field.name != "key"
}


def changed_options(lock: LockPolicy) -> str:
    """Return the options that differ from the defaults, as text."""
    return "".join(
        f" {name}={shown(value)}"
        for name, default in DEFAULTS.items()
        if (value := getattr(lock, name)) is not default and value != default
    )


def shown(value: Any) -> str:
    """Return an option's value as text. Functions are shown by their names."""
    if isinstance(value, float):
        return f"{value:.10g}"
    if callable(value):
        return str(getattr(value, "__qualname__", None) or repr(value))
    return repr(value)
