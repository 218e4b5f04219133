"""Backends that stop in a request, so that a test decides the order of its threads.

A test names them in the DLOCKS setting, by the fixture ``stops``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from django.utils.module_loading import import_string

# What to call once, before a request of that name.
hooks: dict[str, Callable[[], object]] = {}


def _call(name: str) -> None:
    hook = hooks.pop(name, None)
    if hook is not None:
        hook()


class Stopping:
    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        _call("acquire")
        return super().acquire(*args, **kwargs)  # type: ignore[misc]

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        _call("verify")
        return super().verify(*args, **kwargs)  # type: ignore[misc]

    def renew(self, *args: Any, **kwargs: Any) -> Any:
        _call("renew")
        return super().renew(*args, **kwargs)  # type: ignore[misc]

    def refusal(self, *args: Any, **kwargs: Any) -> Any:
        _call("refusal")
        return super().refusal(*args, **kwargs)  # type: ignore[misc]


class StoppingPessimistic(
    Stopping,
    import_string("dlocks.backends.database.PessimisticBackend"),  # type: ignore[misc]
):
    pass


class StoppingOptimistic(
    Stopping,
    import_string("dlocks.backends.database.OptimisticBackend"),  # type: ignore[misc]
):
    pass


class StoppingInsert(
    Stopping,
    import_string("dlocks.backends.database.InsertBackend"),  # type: ignore[misc]
):
    pass


class StoppingMemory(
    Stopping,
    import_string("dlocks.backends.memory.MemoryBackend"),  # type: ignore[misc]
):
    pass


class Stop:
    """A request that waits until the test lets it go on."""

    def __init__(self) -> None:
        self._reached, self._go_on = threading.Event(), threading.Event()
        self._error: Exception | None = None

    def __call__(self) -> None:
        self._reached.set()
        assert self._go_on.wait(20), "the test did not let the request go on"
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when the request has been reached."""
        assert self._reached.wait(20), "the request was not reached"

    def go_on(self, error: Exception | None = None) -> None:
        """Let the request go on, or raise an error instead of it."""
        self._error = error
        self._go_on.set()


class Stops:
    def __init__(self) -> None:
        self._all: list[Stop] = []

    def at(self, name: str) -> Stop:
        """Return a stop in the next request of that name."""
        hooks[name] = stop = Stop()
        self._all.append(stop)
        return stop

    def call(self, name: str, function: Callable[[], object]) -> None:
        """Call a function before the next request of that name."""
        hooks[name] = function

    def end(self) -> None:
        hooks.clear()
        for stop in self._all:
            stop.go_on()


@pytest.fixture
def stops(settings):
    """Return ``Stops`` for the aliases whose names begin with "stopping"."""
    settings.DLOCKS = {
        **settings.DLOCKS,
        **{
            f"stopping {name.lower()}": {"BACKEND": f"{__name__}.Stopping{name}"}
            for name in ("Pessimistic", "Optimistic", "Insert", "Memory")
        },
    }
    stops = Stops()
    yield stops
    stops.end()
