"""Receiving the notifications for the callers of this process."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from dlocks.backends.base import Backend
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.delays import SHORTEST_POLL_DELAY
from dlocks.runtime.waiter import Waiter
from dlocks.runtime.workers import IDLE_CLOSE_AFTER
from dlocks.values import Claim, Message

logger = logging.getLogger("dlocks")

# Seconds to wait until a caller's thread stops listening.
LISTENER_TIMEOUT = 1.5


class Receiver:
    """The part of ``Waiters`` that receives messages and wakes the callers.

    One of three threads listens: the background thread, the thread of a caller, or a
    second thread of the listener.
    """

    backend: Backend
    channel: str
    _mutex: threading.RLock
    _changed: threading.Condition
    _waiters: dict[str, Waiter]
    # When the next poll is due, and whether it is for all waiters.
    _poll_at: float
    _poll_all: bool
    # The channel to ask the backend for.
    _name: str
    # Set once the backend has been asked.
    _ready: threading.Event
    # Set if a caller's own thread can listen. Its turn then wakes no other thread
    # first.
    _listener: Notifier | None
    # Whether the listener queries the server, and when it last received all messages.
    _listener_queries: bool
    _received_at: float
    # The listener of the second thread.
    _second_listener: Notifier | None
    # Whether a caller listens, and which keys were reported as free.
    _caller_listens: bool
    _freed_keys: deque[str]

    if TYPE_CHECKING:

        @property
        def _must_poll(self) -> bool: ...

    def listen(self, wakeup: threading.Event, until: float | None) -> bool:
        """Listen for a caller's turn, in its own thread.

        Return True when ``wakeup`` is set or ``until`` has come. Return False if
        another thread listens or should listen. The background thread should if a poll
        is due.
        """
        listener, is_listening = self._listener, False
        if listener is None or listener.receive_lock is None:
            return False
        try:
            if not listener.receive_lock.acquire(blocking=False):
                return False
            self._caller_listens = is_listening = True
            while not wakeup.is_set():
                now = clock.now()
                if until is not None and now >= until:
                    return True
                if (
                    self._listener is not listener
                    or self._freed_keys
                    or self._must_poll
                    or now >= self._poll_at
                ):
                    return False
                self._deliver(
                    self._receive(
                        listener,
                        self._poll_at if until is None else min(until, self._poll_at),
                    )
                )
            return True
        except LockBackendError:
            # The background thread notices this with its next request.
            return False
        finally:
            if is_listening:
                self._caller_listens = False
            try:  # noqa: SIM105 (a signal within suppress() would leave the mutex locked)
                listener.receive_lock.release()
            except RuntimeError:
                # An RLock knows its owner, whatever was interrupted.
                pass
            if is_listening and (
                self._freed_keys or not wakeup.is_set() or len(self._waiters) > 1
            ):
                with self._mutex:
                    self._changed.notify()

    def _connect_listener(self) -> Notifier | None:
        try:
            listener = self.backend.notifier(self._name)
        except LockBackendError as error:
            # Polling finds out whether the backend is reachable again.
            logger.warning("%s", error)
            listener = None
        second = None if listener is None else listener.beside
        with self._mutex:
            self.channel = "" if listener is None else listener.channel or self._name
            self._listener, self._second_listener = listener, second
            self._listener_queries = listener is not None and listener.asks
        if second is not None:
            try:
                threading.Thread(
                    target=self._handle_messages,
                    args=(second,),
                    name="dlocks-hearing",
                    daemon=True,
                ).start()
            except RuntimeError as error:
                logger.warning(
                    "Waiting callers poll, as no thread could be started: %s", error
                )
                self._disconnect(listener, broken=False)
                self.channel, listener = "", None
        self._ready.set()
        return listener

    def _handle_messages(self, second: Notifier) -> None:
        """Receive messages while the background thread does something else."""
        while self._second_listener is second:
            self._deliver(second.wait(IDLE_CLOSE_AFTER, ()))

    def _disconnect(self, listener: Notifier | None, *, broken: bool) -> None:
        with self._mutex:
            if self._listener is listener:
                # Otherwise it belongs to a later thread.
                self._listener = self._second_listener = None
        with suppress(LockBackendError), self._exclusively(listener):
            if listener is not None and not broken:
                listener.close()
        self.backend.close()

    @contextmanager
    def _exclusively(self, listener: Notifier | None) -> Iterator[None]:
        """Use the connection on which another thread may listen."""
        if listener is None or listener.receive_lock is None:
            yield
            return
        # A listening thread stops in time for a poll.
        if not listener.receive_lock.acquire(timeout=LISTENER_TIMEOUT):
            raise LockBackendError(
                "A listening thread was interrupted and did not stop."
            )
        self._caller_listens = False
        try:
            yield
        finally:
            listener.receive_lock.release()

    def _should_listen(self, listener: Notifier | None) -> bool:
        """Return whether to wait for messages now, instead of for new waiters."""
        if listener is None or listener.beside is listener:
            return False
        if listener.receive_lock is None and not listener.asks:
            return True
        if self._freed_keys:
            return True
        if self._caller_listens or (listener.asks and self._must_poll):
            return False
        return any(
            waiter.is_queued and not waiter.woken for waiter in self._waiters.values()
        )

    def _listen_once(self, listener: Notifier) -> None:
        if listener.receive_lock is None:
            self._deliver(self._receive(listener, self._poll_at))
        elif listener.receive_lock.acquire(blocking=False):
            try:
                self._deliver(
                    self._receive(listener, 0.0 if self._freed_keys else self._poll_at)
                )
            finally:
                listener.receive_lock.release()
        elif not self._caller_listens:
            # A caller's thread has just begun to listen, or is about to stop.
            time.sleep(SHORTEST_POLL_DELAY)
        while self._freed_keys:
            with self._exclusively(listener):
                listener.advance(self._freed_keys.popleft())
            with self._mutex:
                self._poll_at, self._poll_all = 0.0, True

    def _deliver(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.free:
                # The transaction that held the key has ended. The background thread
                # sends the request for it.
                self._freed_keys.append(message.free)
            elif (waiter := self._waiters.get(message.owner)) is not None:
                waiter.apply_message(message)
                waiter.wake()

    def _receive(self, listener: Notifier, until: float) -> Sequence[Message]:
        """Return the messages that arrive until ``until``."""
        pause = max(0.0, min(until - clock.now(), IDLE_CLOSE_AFTER))
        claims: list[Claim] = []
        if listener.asks:
            with self._mutex:
                if pause == 0 or not self._should_listen(listener):
                    return ()
                # Also claims that are about to be queued, because their turn may come
                # by then.
                claims = [
                    waiter.claim
                    for waiter in self._waiters.values()
                    if not waiter.woken
                ]
        messages = listener.wait(pause, claims)
        self._received_at = clock.now()
        return messages
