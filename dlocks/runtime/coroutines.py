"""Calls from coroutines into threads, completed even if cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from asgiref.sync import AsyncToSync, SyncToAsync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation

from dlocks.runtime import clock
from dlocks.runtime.pools import call_privately
from dlocks.runtime.process import in_child
from dlocks.runtime.threads import Mutex, new_mutex
from dlocks.transactions import open_connections

T = TypeVar("T")

# Seconds after which a call checks whether Django's thread waits for a lock. Each check
# doubles them, because a thousand calls may wait for their turn.
FIRST_CHECK, LAST_CHECK = 0.05, 0.8

# Tasks that are acquiring a lock. Weak, because a task whose loop was closed never
# leaves.
acquiring = weakref.WeakSet[Any]()

# The threads that wait for a lock, and the executor whose calls they still make.
_waiting: list[Any] = []
# The sync threads that have made calls or waited, by what asgiref chooses them by, or
# None if the last call was in a transaction.
_sync_threads = weakref.WeakKeyDictionary[Any, threading.Thread | None]()
_spare: ThreadPoolExecutor


def refuse_in_a_coroutine(instead: str) -> None:
    """Raise SynchronousOnlyOperation where an event loop runs.

    This is no decorator like Django's ``async_unsafe()``. Up to Python 3.11, a signal
    is handled when a function returns to a caller that used ``*args``, and an acquired
    lock would have no owner. No exception is used to learn that no loop runs.
    """
    if _get_running_loop() is not None and not os.environ.get(
        "DJANGO_ALLOW_ASYNC_UNSAFE"
    ):
        raise SynchronousOnlyOperation(
            f"This call would block the event loop. In a coroutine, use {instead}."
        )


def is_away_from_tenant() -> bool:
    """Return whether this is an event loop, or the spare thread."""
    name = threading.current_thread().name
    return _get_running_loop() is not None or name.startswith("dlocks-spare")


def _place_in(executor: Any, loop: Any) -> Any:
    """Return what asgiref chooses the sync thread of this context by."""
    return executor or SyncToAsync.thread_sensitive_context.get(None) or loop


@contextmanager
def waiting_for_a_lock() -> Iterator[None]:
    """Record that this thread or coroutine waits for a lock.

    If it is Django's sync thread, it can do nothing else. While a coroutine waits in
    ``async_to_sync()``, that thread only makes its calls.
    """
    served = None
    thread: Any = threading.current_thread()
    if _get_running_loop() is not None:
        served = getattr(AsyncToSync.executors, "current", None)
        thread = getattr(served, "_work_thread", False)
    elif not open_connections():
        loop: Any = getattr(SyncToAsync.threadlocal, "main_event_loop", None)
        # An interrupt could leave the lock of ``AsyncToSync.executors`` locked, and all
        # other threads would hang.
        place = _place_in(AsyncToSync.loop_thread_executors.get(loop), loop)
        if place is not None:
            _sync_threads[place] = _sync_threads.get(place) or thread
    waits = [(thread, served)] if thread else []
    try:
        # An interrupt may strike when this call returns.
        _waiting.extend(waits)
        yield
    finally:
        for wait in waits:
            # No call lies before it, where another interrupt could strike.
            try:  # noqa: SIM105
                _waiting.remove(wait)
            except ValueError:
                pass


def _is_blocked(place: Any) -> bool:
    """Return whether the sync thread waits for a lock, in no caller's transaction."""
    thread = _sync_threads.get(place)
    return any(one is thread and served is not place for one, served in set(_waiting))


async def run_in_sync_thread(
    function: Callable[[], T], *, in_transaction_only: bool = False
) -> T:
    """Call a function in Django's one sync thread, and return its result.

    A cancellation is only raised when the outcome is known.

    That thread may itself wait for a lock, perhaps for the one to be released. A task
    may outlive its request or its loop, and with it the thread. The function is then
    called in the spare thread, so that holds are released and holders continue. A
    thread that is only busy may be in a transaction, which the spare thread cannot see.
    ``in_transaction_only`` forbids it, for the work of a transaction.
    """
    call = _Call(function)
    outcome = asyncio.wrap_future(call.outcome)
    way: asyncio.Task[None] | None = None
    cancelled: asyncio.CancelledError | None = None
    pause = FIRST_CHECK
    # A loop may end, so the task must not stay unfinished. The thread that collects it
    # as garbage would run its last lines, and get the context variables that they
    # restore.
    while way is None or not (outcome.done() and way.done()):
        if way is None or (way.cancelled() and not call.begun):
            # A loop that ends all of its tasks has cancelled this one.
            way = asyncio.create_task(sync_to_async(call)())
        if outcome.done() and call.is_in_worker:
            way.cancel()
        both: list[asyncio.Future[Any]] = [outcome, way]
        timeout = None if call.begun else pause
        pause = min(2 * pause, LAST_CHECK)
        try:
            await clock.wait_for_any(
                list(one for one in both if not one.done()), timeout
            )
        except asyncio.CancelledError as error:
            cancelled = error
        except GeneratorExit:
            if _get_running_loop() is None:
                _abandon(way)
            raise
        no_way = way.exception() if way.done() and not way.cancelled() else None
        if call.begun or call.is_in_worker:
            if no_way and not (call.is_in_worker or outcome.done()):
                # A signal handler raised before the outcome was stored.
                outcome.set_exception(no_way)
            continue
        if in_transaction_only:
            if no_way is not None:
                raise no_way
        elif no_way is not None or _is_blocked(call.place):
            call.run_in_worker()
    if cancelled is not None:
        outcome.exception()
        raise cancelled
    return outcome.result()


def _abandon(task: asyncio.Task[None]) -> None:
    """Close the coroutine of a task whose loop may never run again.

    The garbage collector would close it in the middle of any code. Its last lines
    restore context variables, and CPython crashes if that is within another ``set()``.
    """
    # If the loop runs again, the task finds its coroutine closed.
    task.add_done_callback(lambda one: one.cancelled() or one.exception())
    with suppress(RuntimeError, ValueError):
        contextvars.copy_context().run(task.get_coro().close)


@dataclass(eq=False)
class Undoable:
    """The requests of a coroutine, which may be closed while one is made."""

    # Undoes what they have done, and lets another thread do so.
    undo: Callable[[], object]
    undo_later: Callable[[], object]
    # Whether they are part of the caller's transaction.
    in_transaction: Callable[[], bool]
    # A finalizer may close the coroutine within a section of its own thread.
    _mutex: Mutex = field(default_factory=new_mutex)
    _is_made: bool = False
    _is_closed: bool = False

    async def complete(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work, which makes the requests, and undo them unless it succeeds."""
        try:
            try:
                return await work
            except GeneratorExit:
                raise
            except BaseException:
                # Cancelled, or a signal handler has raised in the thread of a request.
                await self.make(self.undo)
                raise
        except GeneratorExit:
            # For example, the garbage collector closes a task whose loop was closed.
            # Nothing can be awaited.
            self._close()
            raise

    async def make(self, request: Callable[[], T]) -> T:
        """Make a request in Django's thread, and return the answer."""
        answer = await run_in_sync_thread(
            partial(self._make, request), in_transaction_only=self.in_transaction()
        )
        return cast("T", answer)

    def _make(self, request: Callable[[], T]) -> T | None:
        """Make a request, and undo it if the coroutine was closed."""
        with self._mutex:
            self._is_made = True
            is_closed = self._is_closed
        try:
            return None if is_closed else request()
        finally:
            with self._mutex:
                self._is_made = False
                is_closed = self._is_closed
            if is_closed:
                self.undo()

    def _close(self) -> None:
        """Undo everything after the request, or in the background."""
        with self._mutex:
            self._is_closed = True
            is_made = self._is_made
        if not is_made:
            self.undo_later()


async def make_undoable(
    request: Callable[[], T],
    undo: Callable[[], object],
    undo_later: Callable[[], object],
    *,
    in_transaction: bool = False,
) -> T:
    """Make one request, and undo it if its task is cancelled, closed or interrupted."""
    requests = Undoable(undo, undo_later, lambda: in_transaction)
    return await requests.complete(requests.make(request))


class _Call(Generic[T]):
    """One call, made by the first thread that reaches it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.outcome: Future[T] = Future()
        self._function = function
        executor = getattr(AsyncToSync.executors, "current", None)
        self.place = _place_in(executor, _get_running_loop())
        self._turn = threading.Lock()
        self.is_in_worker = False

    @property
    def begun(self) -> bool:
        return self._turn.locked()

    def __call__(self) -> None:
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not self.is_in_worker:
                thread = threading.current_thread()
                _sync_threads[self.place] = None if open_connections() else thread
            result = self._function()
        except StopIteration as error:
            # Some versions of Python cannot pass it on to a task, which would wait
            # without end.
            stopped = RuntimeError("The function raised StopIteration")
            stopped.__cause__ = error
            self.outcome.set_exception(stopped)
        except BaseException as error:  # noqa: BLE001 (passed to the caller)
            self.outcome.set_exception(error)
        else:
            self.outcome.set_result(result)

    def run_in_worker(self) -> None:
        """Make the call in the spare thread, on a connection of its own."""
        self.is_in_worker = True
        call = partial(contextvars.copy_context().run, self)
        _spare.submit(call_privately, call)


def _reset() -> None:
    global _spare
    _spare = ThreadPoolExecutor(1, "dlocks-spare")


_reset()
in_child(_reset)
