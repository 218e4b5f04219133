"""The wait in the engine's queue, for which each key with waiters needs a session."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

from dlocks.backends.notifiers import Notifier
from dlocks.backends.session.claims import Claims
from dlocks.backends.session.sessions import Entry, Session, SessionDiedError
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.threads import BackgroundThread, Latch, PythonIsExitingError
from dlocks.values import Claim, Grant, Ticket

logger = logging.getLogger("dlocks")

# Seconds for a cancelled wait to end, and between two cancellations.
CANCEL_TIMEOUT = 5.0
CANCEL_EVERY = 0.1
# Seconds. After a shorter wait, the engine's queue was empty.
QUICK_WAIT = 0.001
# Seconds between two attempts to acquire a key whose waiter has no session, and the
# number of keys for one round of attempts.
POLL_EVERY = 0.1
KEYS_PER_POLL = 32
# Seconds for which no session is opened for waiters after a failure, and after which a
# thread without a waiter ends.
REFUSED_FOR = 1.0
IDLE_END_AFTER = 1.0


class EngineQueue(Claims):
    """The queue of waiters: a thread waits in the engine for the first of each key.

    Its session then carries the hold, since no session can transfer a lock to another.
    """

    places: int

    def _reset(self) -> None:
        super()._reset()
        self._polled_at = 0.0
        self._refused_at = -REFUSED_FOR
        self._notifier: Notifier | None = None
        self._threads = [
            BackgroundThread("dlocks-session-waiter", self._serve)
            for _ in range(self.places)
        ]
        self._idle = 0
        self._work: SimpleQueue[None] = SimpleQueue()

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        if claim.scope != "lease" or claim.beside or not self.places:
            return None
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                entry = Entry(claim, name=self._name(claim.key), waiting=True)
                entry.since = time.time()
                # First the table in which a cancellation finds it.
                self._entries[claim.owner] = entry
                if claim.holding:
                    self._nested[entry] = None
                before = self._queued.get(entry.name, ())
                self._queued[entry.name] = (*before, entry)
        self._advance()
        return Ticket(must_retry=entry.token is not None, position=entry.number)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        self._advance()
        self._try_queued({claim.owner for claim in claims})
        tickets = {}
        with self._mutex:
            for claim in claims:
                if (entry := self._entries.get(claim.owner)) is None:
                    continue
                is_polled = self._queued.get(entry.name, [entry])[0].session is None
                tickets[claim.owner] = Ticket(
                    # The claim gets its lease when it is acquired again.
                    grant=None if entry.token is None else Grant(entry.token),
                    position=entry.number,
                    next_check=POLL_EVERY if is_polled else math.inf,
                )
        return tickets

    def waiting(self, key: str) -> int:
        name = self._name(key)
        (in_engine,) = self._ask_main("waiting", name) or (0,)
        with self._mutex:
            return int(in_engine) + sum(
                entry.session not in self._for_waiters
                for entry in self._queued.get(name, ())
            )

    def notifier(self, channel: str) -> Notifier:
        self._notifier = Grants()
        return self._notifier

    # The threads.

    def _advance(self) -> None:
        """Let a thread wait for the next waiter, if there is a place for it.

        The thread finds its waiter by itself, so an interrupt here blocks no waiter.
        """
        with self._mutex:
            # A session that is discarded closes itself, outside of the mutex.
            found = self._next()
            if found is None:
                return
            if self._idle:
                self._idle -= 1
                self._work.put(None)
                return
            # Threads that are busy look for the next waiter by themselves.
            with suppress(PythonIsExitingError):
                any(thread.start() for thread in self._threads)

    def _next(self) -> tuple[Entry, Session] | None:
        """Return the next waiter and its session; the caller holds the mutex."""
        # A waiter whose caller holds other keys waits in the engine in any case. Other
        # processes look for deadlocks there.
        waiters = self._without_session() or [
            entry for entry in self._nested if entry.session is None
        ]
        if not waiters or clock.now() < self._refused_at + REFUSED_FOR:
            return None
        for session in self._for_waiters:
            if not session.at:
                return waiters[0], session
        if len(self._for_waiters) < self.places:
            return waiters[0], self._new_session()
        return None

    def _without_session(self) -> list[Entry]:
        """Return the first waiters of keys that have no session."""
        heads = [entries[0] for entries in self._queued.values()]
        return [entry for entry in heads if entry.session is None]

    def _serve(self) -> None:
        while True:
            with self._mutex:
                if found := self._next():
                    entry, session = found
                    self._for_waiters.add(session)
                    session.wait_over = Latch()
                    session.add(entry)
                    self._maintain_from()
                else:
                    self._idle += 1
            if found:
                self._wait(entry, session)
                del entry, session, found
                continue
            try:
                self._work.get(timeout=IDLE_END_AFTER)
            except Empty:
                with self._mutex:
                    if self._idle:
                        self._idle -= 1
                        next(one for one in self._threads if one.is_current).end()
                        return

    def _wait(self, entry: Entry, session: Session) -> None:
        try:
            entry.interrupted = False
            self._request(entry, session, "wait")
        except SessionDiedError as error:
            self._close_session(session, error)
        except Exception as error:  # noqa: BLE001 (the key is polled meanwhile)
            self._refused_at = clock.now()
            self._close_session(session, error)
            logger.warning("A waiter for a lock has no session: %s", error)
        finally:
            session.wait_over.set()
        if entry.token is not None:
            if clock.now() - session.stood_at < QUICK_WAIT:
                self.contended.discard(entry.claim.key)
            if self._notifier is not None:
                # The claim gets its lease when it is acquired again.
                self._notifier.on_grant(
                    entry.claim.owner, Grant(entry.token), session.stood_at
                )
            return
        with self._mutex:
            # The caller that cancels a claim also frees its session.
            if entry.session is session and not entry.leaving:
                session.remove(entry)
            # Other waiters may have had no place in the meantime.
            self._move_back([entry.name])

    def _cancel(self, entry: Entry) -> None:
        """Leave the engine's queue, and release a key that was granted meanwhile."""
        if (session := entry.session) is None:
            self._release_entry(entry)
            return
        cancelled = 0
        try:
            while True:
                if session.wait_over.wait(CANCEL_EVERY if cancelled else 0):
                    break
                if cancelled * CANCEL_EVERY >= CANCEL_TIMEOUT:
                    raise SessionDiedError("it did not react to a cancellation")
                cancelled += 1
                # It has no identity before it is connected.
                if not session.identity:
                    continue
                row = self._ask_main("cancel", session.identity)
                if row is None or row[0] != 0:
                    continue
                raise SessionDiedError("the server no longer knows it")
            if cancelled > entry.interrupted:
                # A cancellation may still be on its way, and would hit the next
                # statement of this session.
                raise SessionDiedError("it may be cancelled late")
            self._release_entry(entry)
        except (SessionDiedError, LockBackendError):
            self._close_session(session)
            self._advance()

    # The waiters without a session.

    def _move_back(self, names: Collection[str | int]) -> None:
        """Begin with other keys the next time; the caller holds the mutex."""
        # One assignment, so that an interrupt loses no waiter.
        self._queued = dict(sorted(self._queued.items(), key=lambda at: at[0] in names))

    def _try_queued(self, owners: Collection[str]) -> None:
        """Try to acquire keys for those of these claims that have no session.

        The others are not tried, because an interrupt of this caller would end them.
        """
        now = clock.now()
        with self._mutex:
            if now < self._polled_at + POLL_EVERY * 0.9:
                return
            self._polled_at = now
            heads = self._without_session()
            own = list(one for one in heads if one.claim.owner in owners)
            tried = own[:KEYS_PER_POLL]
            self._move_back([entry.name for entry in tried])
        for entry in tried:
            main = self._session_for()
            try:
                # After a shared claim was granted, the next one can share the key too.
                while True:
                    if entry.claim.owner not in owners or not self._try(entry, main):
                        break
                    if not (found := self._queued.get(entry.name)):
                        break
                    entry = found[0]
            except SessionDiedError as error:
                self._close_session(main, error)
            except LockBackendError as error:
                logger.warning("%s", error)
                return


class Grants(Notifier):
    """A notifier whose grants are sent by the threads that wait."""

    def wait(self, timeout: float) -> bool:
        time.sleep(timeout)
        return False
