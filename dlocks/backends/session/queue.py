"""The wait in the engine's queue, for which each key with waiters needs a session."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from dlocks.backends.notifiers import Notifier
from dlocks.backends.session.claims import Claims, Entry
from dlocks.backends.session.session import Session, SessionDiedError
from dlocks.backends.session.sessions import Sessions
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.requests import request
from dlocks.runtime.threads import BackgroundThread, Latch, PythonIsExitingError
from dlocks.values import Claim, Grant, Ticket

logger = logging.getLogger("dlocks")

# Cancellations of a wait, and the seconds between two of them.
CANCEL_AT_MOST = 50
CANCEL_EVERY = 0.1
# Seconds. After a shorter wait, the engine's queue was empty.
QUICK_WAIT = 0.001
# Seconds between two attempts to acquire a key whose waiter has no session, and the
# number of keys for one round of attempts.
POLL_EVERY = 0.1
KEYS_PER_POLL = 32
# Seconds for which no session is opened for waiters after a failure.
REFUSED_FOR = 1.0


class EngineQueue:
    """The threads that wait in the engine, each for the first waiter of a key.

    The session of a thread then carries the hold, since no session can transfer a lock
    to another.
    """

    def __init__(
        self,
        claims: Claims,
        sessions: Sessions,
        places: int,
        comment_of: Callable[[Entry], str],
    ) -> None:
        self._claims = claims
        self._sessions = sessions
        # The number of threads, and the function that comments a statement that waits.
        self.places = places
        self._comment_of = comment_of
        self._polled_at = 0.0
        self._refused_at = -REFUSED_FOR
        self.notifier = Grants()
        self._threads = [
            # A finalizer that strikes in these threads finds the tables half changed.
            # So its requests are refused.
            BackgroundThread("dlocks-session-waiter", partial(request, self._serve))
            for _ in range(places)
        ]

    def join(self, claim: Claim) -> Ticket:
        with self._claims.mutex:
            entry = self._claims.entries.get(claim.owner)
            if entry is None:
                entry = self._sessions.entry(claim)
                self._claims.enqueue(entry)
        self.advance()
        return Ticket(must_retry=entry.token is not None, position=entry.number)

    def poll(self, claims: Sequence[Claim]) -> Mapping[str, Ticket]:
        self.advance()
        self._try_queued({claim.owner for claim in claims})
        tickets = {}
        with self._claims.mutex:
            for claim in claims:
                if (entry := self._claims.entries.get(claim.owner)) is None:
                    continue
                first = self._claims.queued.get(entry.name, (entry,))[0]
                tickets[claim.owner] = Ticket(
                    # The claim gets its lease when it is acquired again.
                    grant=None if entry.token is None else Grant(entry.token),
                    position=entry.number,
                    next_check=POLL_EVERY if first.session is None else math.inf,
                )
        return tickets

    def release(self, entry: Entry) -> bool:
        """Release a key or leave its queue, and return whether the claim had the key.

        The wait of a waiter in the engine is cancelled.
        """
        with self._claims.mutex:
            entry.leaving = True
            session = self._claims.session_of(entry) if entry.waiting else None
            # Another thread may release it first, and the session then has another one.
            over = Latch() if session is None else session.wait_over
        if session is not None and session in self._sessions.for_waiters:
            self._cancel(entry, session, over)
        else:
            self._sessions.release(entry)
        self.advance()
        return entry.was_held

    def _cancel(self, entry: Entry, session: Session, over: Latch) -> None:
        """End the wait of a claim that is leaving."""
        with suppress(LockBackendError):
            # A cancellation that may still be on its way would hit the next statement
            # of this session.
            if self._cancellations(session, over) <= entry.interrupted:
                self._sessions.release(entry)
                return
        self._sessions.close(session, of=entry)

    def _cancellations(self, session: Session, over: Latch) -> float:
        """Cancel a wait until it is over, and return how often this was requested.

        The number is infinite if the server does not react, or has lost the session.
        """
        for number in range(CANCEL_AT_MOST):
            if over.wait(CANCEL_EVERY if number else 0):
                return number
            # It has no identity before it is connected.
            if session.identity:
                row = self._sessions.ask("cancel", session.identity)
                if row and row[0] == 0:
                    break
        return math.inf

    def wait_without(self, claim: Claim) -> None:
        """Repeat the waits whose comments say that their callers have this hold."""
        for entry in self._claims.nested:
            owners = {held.owner for held in entry.claim.holding}
            if (session := entry.session) and claim.owner in owners:
                with suppress(LockBackendError):
                    self._sessions.ask("cancel", session.identity)

    # The threads.

    def advance(self) -> None:
        """Let a thread wait for the next waiter, if there is a place for it.

        The thread finds its waiter by itself, so an interrupt here blocks no waiter.
        """
        with self._claims.mutex:
            has_next = self._next() is not None
        if has_next:
            # Threads that are busy look for the next waiter by themselves.
            with suppress(PythonIsExitingError):
                any(map(BackgroundThread.start, self._threads))

    def _next(self) -> tuple[Entry, Session | None] | None:
        """Return the next waiter, and an unused session if there is one.

        Return None if there is no place for a waiter. The caller holds the mutex.
        """
        # A waiter whose caller holds other keys waits in the engine in any case. Other
        # processes look for deadlocks there.
        waiters = self._claims.without_session() or [
            entry for entry in self._claims.nested if entry.session is None
        ]
        if not waiters or clock.now() < self._refused_at + REFUSED_FOR:
            return None
        for session in self._sessions.for_waiters:
            if not session.at:
                return waiters[0], session
        if len(self._sessions.for_waiters) < self.places:
            return waiters[0], None
        return None

    def _serve(self) -> None:
        while True:
            with self._claims.mutex:
                if (found := self._next()) is None:
                    # The next waiter starts a thread.
                    for thread in list(one for one in self._threads if one.is_current):
                        thread.end()
                    return
                entry, unused = found
                session = unused or self._sessions.new()
                self._sessions.for_waiters.add(session)
                over = session.wait_over = Latch()
                self._claims.assign(entry, session)
            self._claims.start_maintenance()
            self._wait(entry, session, over)

    def _wait(self, entry: Entry, session: Session, over: Latch) -> None:
        try:
            comment = self._comment_of(entry)
            entry.interrupted = self._sessions.send("wait", entry, session, comment)
        except SessionDiedError as error:
            self._sessions.close(session, error)
        except Exception as error:  # noqa: BLE001 (the key is polled meanwhile)
            self._refused_at = clock.now()
            self._sessions.close(session, error, of=entry)
            logger.warning("A waiter for a lock has no session: %s", error)
        finally:
            # The session may carry the next wait by now.
            over.set()
        if entry.token is not None:
            if clock.now() - session.stood_at < QUICK_WAIT:
                self._claims.contended.discard(entry.claim.key)
            # The claim gets its lease when it is acquired again.
            grant = Grant(entry.token)
            self.notifier.on_grant(entry.claim.owner, grant, session.stood_at)
            return
        with self._claims.mutex:
            # The caller that cancels a claim also frees its session.
            if entry.session is session and not entry.leaving:
                self._claims.unassign(entry)
            # Other waiters may have had no place in the meantime.
            self._claims.move_back([entry.name])

    # The waiters without a session.

    def _try_queued(self, owners: Collection[str]) -> None:
        """Try to acquire keys for those of these claims that have no session.

        The others are not tried, because an interrupt of this caller would end them.
        """
        now = clock.now()
        with self._claims.mutex:
            if now < self._polled_at + POLL_EVERY * 0.9:
                return
            heads = self._claims.without_session()
            own = list(one for one in heads if one.claim.owner in owners)
            tried = own[:KEYS_PER_POLL]
            is_served = self._claims.are_awaited()
            self._claims.move_back([entry.name for entry in tried])
        if not is_served:
            # An unreachable server must not look like a busy key. A key is not tried if
            # a thread is about to wait for it.
            self._sessions.ask("ping", 0)
        for entry in tried:
            # After a shared claim was granted, the next one can share the key too.
            while entry.claim.owner in owners and self._attempt(entry):
                entry = self._claims.queued.get(entry.name, (entry,))[0]
        # Not after an error, which the next poll reports as well.
        self._polled_at = now

    def _attempt(self, entry: Entry) -> int | None:
        return self._sessions.run(partial(self._sessions.attempt, entry))


class Grants(Notifier):
    """A notifier whose grants are sent by the threads that wait."""

    def __init__(self) -> None:
        # Until the waiters of this process listen. They poll at first.
        self.on_grant = lambda *_: None

    def wait(self, timeout: float) -> bool:
        time.sleep(timeout)
        return False
