"""The keeper: one background thread that looks after the holds of this process."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connections

from dlocks import clock

if TYPE_CHECKING:
    from dlocks.holds import Hold

T = TypeVar("T")

logger = logging.getLogger("dlocks")

# How long a private connection stays open when nothing needs it: less than a DROP DATABASE waits for it to go.
LINGER = 0.5

FOREVER = float("inf")


class Keeper:
    """
    Renews leases in batches, notices what is lost, and speaks to the database from outside of a transaction.

    The thread starts when first needed. What Django connects in it are the keeper's private connections, one for each
    database, closed when nothing needs them. Holds are referred to weakly: one that nobody has any more ends with
    its ttl.
    """

    def __init__(self) -> None:
        self._reset()
        self._inherited: list[Any] = []
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self.close)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._holds: weakref.WeakSet[Hold] = weakref.WeakSet()
        self._jobs: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wakes_at = FOREVER
        self._idle_at: float | None = None
        self._connected: list[Any] = []

    @property
    def is_current(self) -> bool:
        """Whether this is the keeper's own thread."""
        return threading.current_thread() is self._thread

    def keep(self, hold: Hold) -> None:
        """Look after a hold, from now until it is dropped."""
        with self._changed:
            self._holds.add(hold)
            # A hold is looked at first long after the last one was added: rarely is there a need to wake up.
            if self._thread is None or not self._thread.is_alive() or hold.due_at < self._wakes_at:
                self._wake()

    def drop(self, hold: Hold) -> None:
        """Look after a hold no longer."""
        with self._changed:
            self._holds.discard(hold)
            if self._connected and not self._holds:
                # To close them; a keeper that is not there has none.
                self._changed.notify()

    def look(self) -> None:
        """Look at all holds now, since the state of one has changed."""
        with self._changed:
            self._wake()

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in the keeper's thread, where no transaction of the caller's is open; return its result."""
        if self.is_current:
            return function()
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def job() -> None:
            try:
                results.append(function())
            except BaseException as error:  # noqa: BLE001 (it is the caller's)
                errors.append(error)
            finally:
                done.set()

        with self._changed:
            self._jobs.append(job)
            self._wake()
        done.wait()
        if errors:
            raise errors[0]
        return results[0]

    def close(self) -> None:
        """Give back all that this process still holds: at its exit."""
        with self._changed:
            holds = list(self._holds)
        for hold in holds:
            hold.end_at_exit()

    # The thread.

    def _wake(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._loop, name="dlocks-keeper", daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._wakes_at = self._next()
                pause = self._wakes_at - clock.now()
                if not self._jobs and pause > 0:
                    self._changed.wait(None if pause == FOREVER else pause)
                jobs = list(self._jobs)
                self._jobs.clear()
                holds = list(self._holds)
            for job in jobs:
                job()
            try:
                self._renew(holds)
                for hold in holds:
                    hold.look()
                self._close_idle(bool(jobs) or bool(holds))
            except BaseException:  # the keeper outlives whatever happens to one round
                logger.exception("The keeper of dlocks failed, and goes on")
                time.sleep(LINGER)
            # A reference kept over the pause would keep the hold alive.
            del jobs, holds
            job = hold = None  # type: ignore[assignment]

    def _next(self) -> float:
        due = min((hold.due_at for hold in self._holds), default=FOREVER)
        return min(due, FOREVER if self._idle_at is None else self._idle_at)

    def _renew(self, holds: Iterable[Hold]) -> None:
        renewable = [hold for hold in holds if hold.renewable]
        now = clock.now()
        for backend in {hold.backend for hold in renewable if hold.renew_at <= now}:
            # All of the backend's, not only those that are due: one statement each time.
            by_owner = {hold.claim.owner: hold for hold in renewable if hold.backend is backend}
            claims = [hold.next_claim() for hold in by_owner.values()]
            sent = clock.now()
            try:
                left = backend.renew(claims)
            except Exception as error:  # noqa: BLE001 (one backend's trouble is not the others')
                # Not lost: unknown, until the deadline of each.
                logger.warning("Could not renew %d holds: %s", len(claims), error)
                for hold in by_owner.values():
                    hold.put_off_renewal()
                continue
            for owner, hold in by_owner.items():
                if owner in left:
                    hold.extend(sent, left[owner])
                else:
                    hold.lose("the backend says it is no longer this hold's")

    def _close_idle(self, busy: bool) -> None:
        opened = [connection for connection in connections.all(initialized_only=True) if connection.connection]
        self._connected = [connection.connection for connection in opened]
        if busy or not opened:
            self._idle_at = clock.now() + LINGER if opened else None
        elif self._idle_at is None or clock.now() >= self._idle_at:
            for connection in opened:
                connection.close()
            self._connected = []
            self._idle_at = None

    def _forked(self) -> None:
        # The parent's connections: to collect them here could say good-bye to the server in the parent's name.
        self._inherited += self._connected
        self._reset()


keeper = Keeper()
