"""How a coroutine has something done in a thread: to the end, whatever becomes of its task meanwhile."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections

from dlocks.forks import in_child
from dlocks.keeper import leave_pools

T = TypeVar("T")

# How long Django's thread is given to begin, while a thread of this process waits for a lock.
PATIENCE = 0.05

# Tasks on their way to a hold. Not for longer than they are there: one whose loop was closed never leaves.
acquiring: weakref.WeakSet[Any] = weakref.WeakSet()

_waiting: set[threading.Thread] = set()
_spare: ThreadPoolExecutor


def refuse_in_a_coroutine(instead: str) -> None:
    """
    Refuse where an event loop runs, as Django's ``async_unsafe()`` does.

    Called at the beginning, and no decorator: up to Python 3.11 a signal is seen as a function returns to one that was
    called with ``*args``, and what that has taken would be nobody's. Nor is it told by an exception that no loop runs.
    """
    if _get_running_loop() is not None and not os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        raise SynchronousOnlyOperation(f"This would stop the event loop: in a coroutine it is {instead}.")


@contextmanager
def waiting_for_a_lock() -> Iterator[None]:
    """Note that this thread waits for a lock: if it is Django's one thread, nothing else gets done there."""
    thread = threading.current_thread()
    _waiting.add(thread)
    try:
        yield
    finally:
        _waiting.discard(thread)


async def in_django_thread(function: Callable[[], T], *, only_there: bool = False) -> T:
    """
    Call a function in Django's one thread; return when its outcome is known, and let a cancellation go on only then.

    Two things must not keep a hold from being given back, nor its holder from going on. That thread may wait for a
    lock itself, perhaps for the very one that is to be given back. And a task may outlive its request or its loop,
    and so the thread. Then the function is called in the spare thread; unless ``only_there``, for what is part of a
    transaction.
    """
    call = _Call(function)
    outcome = asyncio.wrap_future(call.outcome)
    way: asyncio.Task[None] | None = None
    cancelled: asyncio.CancelledError | None = None
    patience: float | None = PATIENCE
    while not outcome.done():
        if way is None or (way.cancelled() and not call.begun):
            # Cancelled by a loop that ends all of its tasks.
            way = asyncio.create_task(sync_to_async(call)())
        ends: list[asyncio.Future[Any]] = [outcome] if way.done() else [outcome, way]
        try:
            await asyncio.wait(ends, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
        no_way = way.exception() if way.done() and not way.cancelled() else None
        if call.begun:
            patience = None
        elif no_way is not None and only_there:
            raise no_way
        elif patience is not None and (no_way is not None or (_waiting and not only_there)):
            call.elsewhere()
            patience = None
    # Nor is the way itself left in the middle, where a loop may end: whichever thread then collected it as garbage
    # would go through its last lines, and get the context variables that it puts back.
    while way is not None and not way.done():
        if call.is_elsewhere:
            way.cancel()
        try:
            await asyncio.wait([way])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        outcome.exception()
        raise cancelled
    return outcome.result()


class _Call(Generic[T]):
    """One call, made by whichever thread comes to it first."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.outcome: Future[T] = Future()
        self._function = function
        self._turn = threading.Lock()
        self.is_elsewhere = False

    @property
    def begun(self) -> bool:
        return self._turn.locked()

    def __call__(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 (it is the caller's)
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)

    def elsewhere(self) -> None:
        """Have it made in the spare thread, with a connection of its own."""
        self.is_elsewhere = True
        context = contextvars.copy_context()

        def run() -> None:
            try:
                leave_pools()
                context.run(self)
            finally:
                connections.close_all()

        _spare.submit(run)


def _make_spare() -> None:
    global _spare
    _spare = ThreadPoolExecutor(1, "dlocks-spare")


def _forked() -> None:
    # Of the threads and tasks there is only one left, and that neither waits nor is on its way.
    _waiting.clear()
    acquiring.clear()
    _make_spare()


_make_spare()
in_child(_forked)
