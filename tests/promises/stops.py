"""Backends whose requests a test stops, replaces or counts.

They are named in the DLOCKS setting, as the backends of users are. The requests are the
methods of ``Backend`` in docs/reference/backends.md.
"""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from dlocks.backends.database import (
    InsertBackend,
    OptimisticBackend,
    PessimisticBackend,
)
from dlocks.backends.memory import MemoryBackend

REQUESTS = [
    "acquire",
    "acquire_all",
    "enqueue",
    "exchange",
    "holder",
    "pin",
    "poll",
    "refusal",
    "release",
    "release_all",
    "renew",
    "verify",
    "waiting",
]
# What to call instead of a request, by alias and name. "*" stands for every alias.
replaced: dict[tuple[str, str], Callable[..., Any]] = {}


class Stopping:
    alias: str


def _make_request(name: str) -> Callable[..., Any]:
    def request(self: Stopping, *args: Any, **kwargs: Any) -> Any:
        usual = partial(getattr(super(Stopping, self), name), *args, **kwargs)
        instead = replaced.get((self.alias, name)) or replaced.get(("*", name))
        return usual() if instead is None else instead(usual, *args)

    return request


for _name in REQUESTS:
    setattr(Stopping, _name, _make_request(_name))


class StoppingPessimistic(Stopping, PessimisticBackend):  # type: ignore[misc]
    pass


class StoppingOptimistic(Stopping, OptimisticBackend):  # type: ignore[misc]
    pass


class StoppingInsert(Stopping, InsertBackend):  # type: ignore[misc]
    pass


class StoppingMemory(Stopping, MemoryBackend):  # type: ignore[misc]
    pass


KINDS = ("Pessimistic", "Optimistic", "Insert", "Memory")


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

    def at(self, name: str, using: str = "*") -> Stop:
        """Return a stop in the next request of that name."""
        stop = Stop()
        self._all.append(stop)
        self.call(name, stop, using)
        return stop

    def call(self, name: str, function: Callable[[], object], using: str = "*") -> None:
        """Call a function before the next request of that name."""

        def once(usual: Callable[[], Any], *_: Any) -> Any:
            if replaced.pop((using, name), None) is not None:
                function()
            return usual()

        replaced[using, name] = once

    def replace(
        self, name: str, instead: Callable[..., Any], using: str = "*"
    ) -> ExitStack:
        """Call ``instead(usual, *args)`` for each request of that name.

        ``usual()`` sends the request. This lasts until the ``with`` or the test ends.
        """
        replaced[using, name] = instead
        end = ExitStack()
        end.callback(replaced.pop, (using, name), None)
        return end

    def end(self) -> None:
        replaced.clear()
        for stop in self._all:
            stop.go_on()


@pytest.fixture
def stops(settings):
    """Return ``Stops`` for all aliases of databases and of memory.

    There are also aliases of their own, whose names begin with "stopping".
    """
    paths = {f"{kind}Backend": f"{__name__}.Stopping{kind}" for kind in KINDS}
    usual = {
        alias: {**conf, "BACKEND": paths.get(kind, conf["BACKEND"])}
        for alias, conf in settings.DLOCKS.items()
        for kind in [conf["BACKEND"].rpartition(".")[2]]
    }
    own = {
        f"stopping {kind.lower()}": {"BACKEND": paths[f"{kind}Backend"]}
        for kind in KINDS
    }
    settings.DLOCKS = usual | own
    stops = Stops()
    yield stops
    stops.end()
