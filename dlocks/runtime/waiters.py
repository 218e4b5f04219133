"""The callers of this process that wait in the queue of a key, and their thread."""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections import deque

from dlocks.backends.base import Backend
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.delays import (
    HEARTBEAT_EVERY,
    LONGEST_POLL_DELAY,
    SHORTEST_POLL_DELAY,
    PollDelays,
)
from dlocks.runtime.poller import Poller
from dlocks.runtime.pools import leave_pools
from dlocks.runtime.process import in_child
from dlocks.runtime.receiver import Receiver
from dlocks.runtime.waiter import Waiter
from dlocks.runtime.workers import IDLE_CLOSE_AFTER

logger = logging.getLogger("dlocks")

# Seconds for which waiters get no error if the database is unreachable. A restart is
# quicker.
CONNECT_TIMEOUT = 10.0


class Waiters(Poller, Receiver):
    """The callers of this process that are queued for keys of one backend.

    One daemon thread serves all of them, so thousands of waiting tasks cost one
    connection and an occasional request. Some listeners use a second thread to receive
    messages.

    The thread listens where the backend notifies. Elsewhere, and for a while after a
    grant without a notification, it polls all claims at once. It polls most often for
    the first one in the queue.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._reset()
        _all_waiters.add(self)

    def _reset(self) -> None:
        # Entered in place of the condition. It is written in C, so a signal in the
        # middle leaves nothing locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiters = {}
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._poll_at = 0.0
        self._poll_all = False
        self._poll_until = 0.0
        self._delays = PollDelays()
        # When a waiter was last removed.
        self._removed_at = 0.0
        self._listener = self._second_listener = None
        self._listener_queries = self._caller_listens = False
        self._received_at = 0.0
        self._freed_keys = deque()
        self._name = f"dlocks_{secrets.token_hex(8)}"
        self.channel = ""

    def enter(self, waiter: Waiter) -> None:
        """Add a waiter, and return once it can be notified of a grant."""
        with self._mutex:
            self._waiters[waiter.claim.owner] = waiter
            if self._thread is None or not self._thread.is_alive():
                self._ready = threading.Event()
                self._thread = threading.Thread(
                    target=self._loop, name="dlocks-waiting", daemon=True
                )
                self._thread.start()
        self._ready.wait(max(0.0, min(1.0, waiter.until - clock.now())))

    def mark_queued(self, waiter: Waiter) -> None:
        """Poll for a waiter's claim in time, now that it is queued."""
        with self._mutex:
            waiter.is_queued = True
            # Most turns come before a poll is needed.
            waiter.poll_at = clock.now() + HEARTBEAT_EVERY / 2
            # With notifications, a heartbeat in time is enough.
            if not self.channel or self._must_poll or waiter.unnotified:
                self._poll_all = True
                self._poll_at = min(self._poll_at, clock.now() + SHORTEST_POLL_DELAY)
                self._changed.notify()
            elif self._listener_queries or not (waiter.listens or self._caller_listens):
                self._changed.notify()

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter. From now on nothing returns its claim to the queue."""
        with waiter.mutex:
            waiter.has_left = True
        with self._mutex:
            self._waiters.pop(waiter.claim.owner, None)
            self._removed_at = clock.now()

    # The background thread.

    def _loop(self) -> None:
        this = threading.current_thread()
        listener: Notifier | None = None
        try:
            leave_pools()
            listener = self._connect_listener()
            listens = listener is not None
            failing_since: float | None = None
            heartbeat_at = clock.now()
            while True:
                with self._mutex:
                    if self._thread is not this:
                        # The start of this thread was interrupted, and another one has
                        # started since.
                        return
                    now = clock.now()
                    if not self._waiters:
                        if now >= self._removed_at + IDLE_CLOSE_AFTER:
                            self._thread = None
                            return
                        self._poll_at = self._removed_at + IDLE_CLOSE_AFTER
                    if self._poll_at > now and not self._should_listen(listener):
                        self._changed.wait(min(self._poll_at - now, IDLE_CLOSE_AFTER))
                try:
                    if listener is not None and listener.beside is not listener:
                        self._listen_once(listener)
                    now = clock.now()
                    if now < self._poll_at:
                        continue
                    is_notified = self.channel and not self._must_poll
                    heartbeat = (
                        is_notified or now >= heartbeat_at + HEARTBEAT_EVERY * 0.9
                    )
                    heartbeat_at = now if heartbeat else heartbeat_at
                    pause = HEARTBEAT_EVERY
                    with self._exclusively(listener):
                        self._cancel_abandoned()
                        poll_in = self._heartbeat(listener)
                        if poll_in is None and listener is not None and listener.asks:
                            # This connection is for nothing else.
                            self._listener = None
                            listener.close()
                            listener = None
                        if poll_in is None:
                            poll_in, nearest = self._poll(heartbeat=heartbeat)
                            pause = (
                                HEARTBEAT_EVERY / 2
                                if self.channel and not self._must_poll
                                else self._delays.pause(nearest)
                            )
                    with self._mutex:
                        pause = (
                            SHORTEST_POLL_DELAY
                            if self._poll_all
                            else min(
                                HEARTBEAT_EVERY,
                                max(poll_in, SHORTEST_POLL_DELAY),
                                pause,
                            )
                        )
                        self._poll_at = clock.now() + pause
                    failing_since = None
                    if listens and listener is None and not self._must_poll:
                        listener = self._connect_listener()
                        if listener is not None and not listener.asks:
                            with self._mutex:
                                # A turn that came since the last poll was not notified.
                                self._poll_at, self._poll_all = 0.0, True
                except LockBackendError as error:
                    if failing_since is None:
                        failing_since = clock.now()
                        logger.warning(
                            "The waiting callers could not be served. Retrying: %s",
                            error,
                        )
                    if clock.now() - failing_since >= CONNECT_TIMEOUT:
                        self._fail(error)
                    self._disconnect(listener, broken=True)
                    listener, self.channel = None, ""
                    time.sleep(LONGEST_POLL_DELAY)
                    with self._mutex:
                        # A poll has to come before any thread listens.
                        self._poll_at, self._poll_all = 0.0, True
        except BaseException as error:
            logger.exception("The thread that serves waiting callers failed")
            self._fail(
                LockBackendError(f"Waiting callers could not be served: {error}"), this
            )
        finally:
            self._disconnect(listener, broken=False)
            with self._mutex:
                if self._thread is this:
                    self._thread = None

    def _cancel_abandoned(self) -> None:
        """Cancel the claims of waiters that will never continue."""
        with self._mutex:
            abandoned = [
                waiter for waiter in self._waiters.values() if waiter.is_abandoned
            ]
        for waiter in abandoned:
            self.remove(waiter)
            self.backend.release(waiter.claim, failed=True)

    def _fail(
        self, error: LockBackendError, thread: threading.Thread | None = None
    ) -> None:
        with self._mutex:
            if self._thread is thread:
                # The next waiter needs a new thread.
                self._thread = None
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.error = error
            waiter.wake()


_all_waiters: weakref.WeakSet[Waiters] = weakref.WeakSet()


def _forked() -> None:
    global _create_mutex
    _create_mutex = threading.Lock()
    for waiters in list(_all_waiters):
        waiters._reset()


in_child(_forked)


_create_mutex = threading.Lock()


def waiters_of(backend: Backend) -> Waiters:
    """Return the waiters of a backend in this process."""
    waiters: Waiters | None
    with _create_mutex:
        # They have the same lifetime.
        if (waiters := backend.waiters) is None:
            waiters = backend.waiters = Waiters(backend)
        return waiters
