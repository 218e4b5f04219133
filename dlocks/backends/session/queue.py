"""The wait in the engine's queue, for which each key with waiters needs a session."""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from dlocks.backends.notifiers import Notifier
from dlocks.backends.session.claim_tables import REFUSED_FOR
from dlocks.backends.session.engine_sessions import Row, SessionDiedError
from dlocks.backends.session.polling import POLL_EVERY, Polling
from dlocks.backends.session.sessions import Entry, Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim, Grant, Ticket

logger = logging.getLogger("dlocks")

CANCEL_TIMEOUT = 5.0
# Seconds. After a shorter wait, the engine's queue was empty.
CLAIMS_PER_STATEMENT = 0.001
# These selectors notice a socket that is registered while they wait. Any other one, for
# example on Windows, waits for ``WAIT_UNNOTICED`` seconds at a time.
NOTICING = tuple(
    getattr(selectors, name)
    for name in ("EpollSelector", "KqueueSelector")
    if hasattr(selectors, name)
)
WAIT_UNNOTICED = 0.05


class EngineQueue(Polling):
    """The queue of waiters: the first of each key waits in the engine."""

    places: int

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        if claim.scope != "lease" or claim.beside or not self.places:
            return None
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                entry = Entry(claim, self._name(claim.key), waiting=True)
                self._entries[claim.owner] = entry
                self._queued.setdefault(entry.name, deque()).append(entry)
        self._advance()
        session = entry.session
        if channel and not entry.watched:
            entry.watched = True
            if session is not None:
                self._watch(entry, session)
        return Ticket(must_retry=entry.token is not None, position=entry.number)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        tickets = {}
        self._advance()
        self._poll()
        for claim in claims:
            entry = self._entries.get(claim.owner)
            if entry is not None and entry.waiting and entry.session is not None:
                self._settle(entry.session)
                entry = self._entries.get(claim.owner)
            if entry is None:
                continue
            if entry.token is not None:
                # The claim gets its lease when it is acquired again.
                tickets[claim.owner] = Ticket(grant=Grant(entry.token))
            else:
                polled = entry.session is None and entry.name not in self._foremost
                tickets[claim.owner] = Ticket(
                    position=entry.number,
                    next_check=POLL_EVERY if polled else float("inf"),
                )
        return tickets

    def waiting(self, key: str) -> int:
        name = self._name(key)
        row = self._ask_main("waiting", name)
        return (int(row[0]) if row else 0) + len(self._queued.get(name, ()))

    def notifier(self, channel: str) -> Notifier:
        return Grants(self)

    @property
    def selector(self) -> selectors.BaseSelector:
        """Return the selector that reports replies to waiting sessions."""
        with self._mutex:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
            return self._selector

    def answered(self, session: Session) -> Sequence[Entry]:
        """Read the reply of a session in the engine's queue.

        Return the claims that were granted.
        """
        if not session.mutex.acquire(blocking=False):
            # Another thread reads the reply.
            time.sleep(0.001)
            return ()
        try:
            with self._mutex:
                waiting = [
                    entry
                    for entries in session.at.values()
                    for entry in entries
                    if entry.waiting
                ]
            self._settle(session)
        finally:
            session.mutex.release()
        if self._queued:
            self._advance()
        return [entry for entry in waiting if entry.token is not None]

    def _advance(self, *, connecting: bool = True) -> None:
        """Send the first local waiter of each key to the engine's queue.

        Each needs a free session. With ``connecting``, new ones are opened up to the
        limit.
        """
        while True:
            with self._mutex:
                name = next(
                    (name for name in self._queued if name not in self._foremost), None
                )
                if name is None:
                    return
                session = self._free.pop() if self._free else None
                if session is None:
                    full = len(self._queueing) + self._reserved >= self.places
                    if (
                        full
                        or not connecting
                        or clock.now() < self._refused_at + REFUSED_FOR
                    ):
                        return
                    self._reserved += 1
                entry = self._queued[name].popleft()
                if not self._queued[name]:
                    del self._queued[name]
                self._foremost[name] = entry
            if session is None:
                try:
                    session = self._open()
                except BaseException as error:
                    with self._mutex:
                        self._refused_at = clock.now()
                        self._reserved -= 1
                        self._requeue_behind(entry)
                    if isinstance(error, LockBackendError):
                        logger.warning("%s", error)
                        return
                    raise
                with self._mutex:
                    self._queueing.add(session)
                    self._reserved -= 1
                    self._maintain_from(None)
            self._send(entry, session)

    def _send(self, entry: Entry, session: Session) -> None:
        try:
            with session.mutex:
                self._allow_idle(session, entry.claim)
                with self._mutex:
                    if entry.gone:
                        self._free.append(session)
                        return
                    session.add(entry)
                entry.asked_at = clock.now()
                if session.is_asked:
                    # A ping is under way.
                    session.settle_in_time()
                session.start(
                    "wait shared" if entry.claim.shared else "wait",
                    entry.name,
                    partial(self._grant_turn, entry),
                )
                if entry.watched:
                    self._watch(entry, session)
        except BaseException as error:
            self._close_session(session, error)
            with self._mutex:
                if entry.session is None:
                    self._requeue_behind(entry)
            if not isinstance(error, (SessionDiedError, LockBackendError)):
                raise

    def _requeue_behind(self, entry: Entry) -> None:
        """Put a claim back to the front of the local queue.

        The caller holds the mutex.
        """
        if self._foremost.get(entry.name) is entry:
            del self._foremost[entry.name]
        if not entry.gone:
            self._queued.setdefault(entry.name, deque()).appendleft(entry)

    def _watch(self, entry: Entry, session: Session) -> None:
        with session.mutex:
            if entry.waiting and not session.dead:
                selector = self.selector
                there = selector.get_map().get(session.wire.number)
                if there is not None and there.data is not session:
                    # The descriptor is still registered for a session whose lost
                    # connection has not been noticed.
                    selector.unregister(session.wire.number)
                    there = None
                if there is None:
                    selector.register(
                        session.wire.number, selectors.EVENT_READ, session
                    )

    def _grant_turn(self, entry: Entry, row: Row | None) -> None:
        session = entry.session
        if entry.watched and session is not None:
            self._unregister(session)
        if row is not None and row[0] is None:
            row = None
        if row is None and session is not None:
            self._ensure_released(entry, session)
        elif session is not None and clock.now() - entry.asked_at >= session.wire.idle:
            # After a pause, a process may read a grant although the server has since
            # ended the session as idle.
            try:
                self._ask_whether_it_stands(session)
            except LockBackendError as error:
                raise SessionDiedError(str(error)) from error
        with self._mutex:
            if self._foremost.get(entry.name) is entry:
                del self._foremost[entry.name]
            entry.waiting = False
            if row is None:
                self._forget(entry)
                return
            if clock.now() - entry.asked_at < CLAIMS_PER_STATEMENT:
                # The queue was empty.
                self.contended.discard(entry.claim.key)
            self._granted(entry, row)

    def _cancel(self, entry: Entry) -> None:
        """Leave the engine's queue, and release a key that was granted meanwhile."""
        session = entry.session
        if session is None:
            return
        late = False
        try:
            with session.mutex:
                if not session.settle():
                    late = True
                    row = self._ask_main("cancel", session.wire.identity)
                    if row is not None and row[0] == "0":
                        raise SessionDiedError("the server no longer knows it")
                    # Closing the session would lose its other holds, so a busy server
                    # gets some time.
                    if not session.settle(CANCEL_TIMEOUT):
                        raise SessionDiedError("it did not react to a cancellation")
        except (SessionDiedError, LockBackendError) as error:
            self._close_session(session, error)
            return
        if entry.token is not None and late:
            # The cancellation may still be on its way, and would hit the next statement
            # of this session. So the session is closed, which releases the key.
            self._close_session(session)
        elif entry.token is not None:
            self._release_entry(entry)
        if self._queued:
            self._advance(connecting=False)


class Grants(Notifier):
    """A listener on the sessions of a process in the engine's queue."""

    def __init__(self, backend: EngineQueue) -> None:
        self._backend = backend

    def wait(self, timeout: float) -> bool:
        selector = self._backend.selector
        if not isinstance(selector, NOTICING):
            timeout = min(timeout, WAIT_UNNOTICED)
            if not selector.get_map():
                # ``select()`` without sockets is an error on Windows.
                time.sleep(timeout)
                return False
        for key, _ in selector.select(timeout):
            for entry in self._backend.answered(key.data):
                # The claim gets its lease when it is acquired again.
                self.on_grant(
                    entry.claim.owner, Grant(entry.token or 0), entry.asked_at
                )
        return False

    def close(self) -> None:
        """Do nothing, since the sessions belong to the backend."""
