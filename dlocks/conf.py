"""The backends of the DLOCKS setting, one per alias and process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import connections
from django.utils.module_loading import import_string
from django.views.decorators.debug import sensitive_variables

from dlocks.backends.base import Backend, Runtime
from dlocks.runtime.keeper import OUTSIDE_TIMEOUT, keeper
from dlocks.runtime.requests import request

T = TypeVar("T")

DEFAULT_ALIAS = "default"
DEFAULT_BACKEND = "dlocks.backends.database.PessimisticBackend"


class UnknownDatabaseError(ImproperlyConfigured):
    """The database of a DLOCKS alias is missing from DATABASES."""


class KeeperRuntime(Runtime):
    """The runtime that uses the threads and the holds of the keeper."""

    def run(self, function: Callable[[], T]) -> T:
        if not keeper.is_current:
            # A worker is in a request already.
            function = partial(request, function)
        return keeper.run(function, self.backend, timeout=OUTSIDE_TIMEOUT)

    def call_later(self, function: Callable[[], None], seconds: float) -> None:
        keeper.later(function, seconds, self.backend)

    def on_lost(self, owners: Collection[str], why: str) -> None:
        keeper.report_lost(owners, why)

    def backend_of(self, alias: str) -> Backend:
        return backends[alias]


class BackendHandler:
    """The backends by alias, created on first access."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}

    @property
    def settings(self) -> dict[str, Any]:
        configured = getattr(settings, "DLOCKS", {})
        if not isinstance(configured, dict):
            raise ImproperlyConfigured(
                f"DLOCKS must be a dict of aliases, not {type(configured).__name__}."
            )
        return {DEFAULT_ALIAS: {}, **configured}

    def __getitem__(self, alias: str) -> Backend:
        known = self._backends
        try:
            return known[alias]
        except KeyError:
            # No mutex: a child that is forked meanwhile would wait for it without end.
            # Of two threads, one discards its backend, which is not connected yet.
            return known.setdefault(alias, self._make(alias))

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def reset(self) -> None:
        """Discard the backends, so that changed settings take effect."""
        # A backend that another thread is creating does not get in here.
        self._backends = {}

    # The options may contain a password, which an error must not show.
    @sensitive_variables()
    def _make(self, alias: str) -> Backend:
        if alias not in self.settings:
            raise ImproperlyConfigured(
                f"DLOCKS has no alias {alias!r}; it has"
                f" {', '.join(map(repr, self.settings))}."
            )
        conf = self.settings[alias]
        options = conf.get("OPTIONS", {}) if isinstance(conf, dict) else None
        if not isinstance(options, dict):
            raise ImproperlyConfigured(
                f"DLOCKS[{alias!r}] and its 'OPTIONS' must be dicts."
            )
        conf, options = dict(conf), dict(options)
        path = conf.pop("BACKEND", DEFAULT_BACKEND)
        conf.pop("OPTIONS", None)
        describe = conf.pop("HOLDER", None)
        if conf:
            raise ImproperlyConfigured(
                f"DLOCKS[{alias!r}] has unknown keys {', '.join(map(repr, conf))}; it"
                " accepts 'BACKEND', 'HOLDER' and 'OPTIONS'."
            )
        backend_class = _imported(alias, "BACKEND", path)
        if not (isinstance(backend_class, type) and issubclass(backend_class, Backend)):
            raise ImproperlyConfigured(
                f"DLOCKS[{alias!r}]['BACKEND'], {path!r}, is not a dlocks backend."
            )
        known = options_of(backend_class)
        for option in options:
            if option not in known:
                raise ImproperlyConfigured(
                    f"DLOCKS[{alias!r}]['OPTIONS'] has an unknown option {option!r};"
                    f" {backend_class.__name__} accepts {', '.join(sorted(known))}."
                )
        try:
            backend = backend_class(alias, **options)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"DLOCKS[{alias!r}]['OPTIONS']: {error}"
            ) from error
        if (
            "database" in known
            and (database := backend.database) not in connections.settings
        ):
            raise UnknownDatabaseError(
                f"DLOCKS[{alias!r}]['OPTIONS']['database'] is {database!r}, which is"
                " not in DATABASES; it has"
                f" {', '.join(map(repr, connections.settings))}."
            )
        if describe is not None:
            backend.describe_caller = _imported(alias, "HOLDER", describe)
            if not callable(backend.describe_caller):
                raise ImproperlyConfigured(
                    f"DLOCKS[{alias!r}]['HOLDER'], {describe!r}, is not a function."
                )
        backend.runtime = KeeperRuntime(backend)
        return backend


def _imported(alias: str, name: str, path: Any) -> Any:
    """Return what a dotted path in the setting of an alias names."""
    if not isinstance(path, str):
        raise ImproperlyConfigured(
            f"DLOCKS[{alias!r}][{name!r}] must be a dotted path, not {path!r}."
        )
    try:
        return import_string(path)
    except (ImportError, ValueError) as error:
        raise ImproperlyConfigured(
            f"DLOCKS[{alias!r}][{name!r}], {path!r}, cannot be imported: {error}"
        ) from error


def options_of(backend_class: type) -> set[str]:
    """Return the names of the options that a backend's constructors take."""
    return {
        name
        for base in backend_class.__mro__
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(
            vars(base)["__init__"]
        ).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


backends = BackendHandler()


def _setting_changed(*, setting: str, enter: bool | None = None, **kwargs: Any) -> None:
    if setting != "DLOCKS":
        return
    if enter is False:
        _forget_holds()
    backends.reset()


def _forget_holds() -> None:
    """End the holds that a test has left in this process.

    The next test has new backends, and would otherwise enter these holds again.
    """
    from dlocks.backends.dummy import DummyBackend
    from dlocks.backends.memory import MemoryBackend
    from dlocks.core.callers import holds

    theirs = [
        one
        for one in backends._backends.values()
        if isinstance(one, (MemoryBackend, DummyBackend))
    ]
    for hold in holds():
        if hold.backend in theirs:
            hold.life.exit()
            hold.end_silently()


setting_changed.connect(_setting_changed, dispatch_uid="dlocks.conf")
