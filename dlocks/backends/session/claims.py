"""The claims of one process: how they are requested, released and ended."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

# functools has a mutex in Python 3.11, which a forked child could find locked.
from django.utils.functional import cached_property

from dlocks.backends.local_claims import LocalClaims
from dlocks.backends.session.mysql import MySQLSession
from dlocks.backends.session.postgresql import PostgreSQLSession
from dlocks.backends.session.sessions import (
    LONGEST_SLICE,
    SHORTEST_SLICE,
    Entry,
    Row,
    Session,
    SessionDiedError,
    Table,
    remove,
)
from dlocks.backends.session.waiting_claims import comment_of
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim

T = TypeVar("T")

logger = logging.getLogger("dlocks")

SESSIONS = {"postgresql": PostgreSQLSession, "mysql": MySQLSession}


class Claims(LocalClaims):
    """The tables of claims and sessions, which one mutex guards."""

    maintainer_name = "dlocks-sessions"
    session_pooling: bool
    linger: float
    _advance: Callable[[], None]
    _entries: dict[str, Entry]
    _kept: set[Entry]

    def _reset(self) -> None:
        super()._reset()
        # The session that never waits for a lock, and the sessions of waiters.
        self._main: Session | None = None
        self._for_waiters: set[Session] = set()
        # The waiters by name, and those whose callers hold other keys. Only the latter
        # and the first one of a name have sessions.
        self._queued: Table = {}
        self._nested: dict[Entry, None] = {}

    @cached_property
    def _kind(self) -> type[Session]:
        vendor = connections[self.database].vendor
        if vendor not in SESSIONS:
            raise ImproperlyConfigured(
                "Session locks need PostgreSQL, MariaDB or MySQL, but database"
                f" {self.database!r} is {vendor}. Use"
                " dlocks.backends.database.PessimisticBackend."
            )
        return SESSIONS[vendor]

    def _name(self, key: str) -> str | int:
        if self._kind.shares:
            digest = hashlib.sha256(key.encode()).digest()
            return int.from_bytes(digest[:8], "big", signed=True)
        # The names of GET_LOCK are case-insensitive, and shared by all databases of a
        # server.
        text = f"{connections[self.database].settings_dict['NAME']}\0{key}"
        return "dlocks:" + hashlib.sha256(text.encode()).hexdigest()[:48]

    # The sessions.

    def _new_session(self) -> Session:
        idle = self.ttl + self.grace
        return self._kind(self.database, idle, pooled=self.session_pooling)

    def _sessions(self) -> list[Session]:
        return [*([self._main] if self._main else []), *self._for_waiters]

    def _session_for(self, claim: Claim | None = None) -> Session:
        """Return the session on which to try a claim: the main one, if possible."""
        beside = self._entries.get(claim.beside) if claim and claim.beside else None
        if beside is not None and beside.session is not None:
            return beside.session
        if (main := self._main) is not None and main.dead:
            self._close_session(main, SessionDiedError("a request was interrupted"))
        with self._mutex:
            if self._main is None:
                self._main = self._new_session()
                self._maintain_from()
            return self._main

    def _on_session(
        self, request: Callable[[Session], T], claim: Claim | None = None
    ) -> T:
        """Call a function with a session, and once more if that has ended."""
        for reconnected in (False, True):
            session = self._session_for(claim)
            try:
                return request(session)
            except SessionDiedError as error:
                self._close_session(session, error)
                if reconnected:
                    raise LockBackendError(
                        f"A lock request to database {self.database!r} failed: {error}"
                    ) from error
        raise AssertionError("unreachable")

    def _ask_main(self, statement: str, value: object) -> Row | None:
        return self._on_session(lambda main: main.ask(statement, value))

    def _ping(self, session: Session) -> None:
        try:
            session.ping()
        except SessionDiedError as error:
            self._close_session(session, error)
        except LockBackendError as error:
            logger.warning("%s", error)

    def _close_session(
        self, session: Session, error: BaseException | None = None
    ) -> None:
        """End a session. Its holds are lost, and its waiters need another one."""
        with self._mutex:
            self._drop(session)
            entries = [entry for at in session.at.values() for entry in at]
            for entry in entries:
                if entry.waiting and not entry.leaving:
                    session.remove(entry)
                else:
                    self._forget(entry)
        held = [entry for entry in entries if entry.token is not None]
        if error is not None and held:
            logger.warning(
                "A session on database %r with %d locks was lost: %s",
                self.database,
                len(held),
                error,
            )
        session.end()
        lost = [entry.claim.owner for entry in held if not entry.leaving]
        if lost:
            # Holds that are not renewed would not notice the loss.
            self.runtime.on_lost(lost, "the database session that held it has ended")

    def _drop(self, session: Session) -> None:
        """Use a session no more; the caller holds the mutex."""
        session.dead = True
        if session is self._main:
            self._main = None
        self._for_waiters.discard(session)

    # The claims.

    def _try(self, entry: Entry, session: Session) -> bool:
        """Request the key on this session, and return whether it was granted.

        The claim is a new one, or the first waiter of its key.
        """
        claim, waits = entry.claim, entry.waiting
        with self._mutex:
            if session.dead:
                raise SessionDiedError("it was closed")
            first = (self._queued.get(entry.name) or [entry])[0]
            if (
                (first is not entry and not claim.beside)
                or entry.session is not None
                or entry.leaving
                or not session.admits(claim, entry.name)
            ):
                return False
            entry.waiting = False
            self._entries[claim.owner] = entry
            session.add(entry)
        try:
            self._request(entry, session, "try")
        finally:
            if entry.token is None:
                with self._mutex:
                    if entry.in_doubt:
                        self._end_soon(entry)
                    elif not waits or entry.leaving:
                        self._forget(entry)
                    elif not entry.gone:
                        session.remove(entry)
                        entry.waiting = True
        return entry.token is not None

    def _request(self, entry: Entry, session: Session, statement: str) -> None:
        """Send the statement that tries or waits for the key, and record a grant."""
        with session.mutex:
            session.allow_idle(entry.claim.ttl + self.grace)
            with self._mutex:
                # A caller that cancels the claim marks it before it uses the session.
                if entry.leaving or entry.session is not session:
                    return
            lock = entry.name, entry.claim.shared
            if entry.claim.shared:
                statement += " shared"
                if not self._is_shared(entry, session):
                    pass
                elif entry.claim.beside:
                    # It passes all waiters. The server counts a second lock.
                    session.doubted.add(lock)
                else:
                    statement += " again"
            waited = max(0.0, time.time() - entry.since)
            session.slice = min(SHORTEST_SLICE + waited / 8, LONGEST_SLICE)
            on_reply, comment = partial(self._on_reply, entry), comment_of(self, entry)
            with self._in_doubt(entry, session):
                row = session.ask(statement, entry.name, on_reply, comment)
            if row is not None and (row[0] is not None or not entry.waiting):
                return
            # The engine may have granted the key before it cancelled the statement.
            session.doubted.add(lock)
            entry.interrupted = True
            self._free(entry, session)
        if not entry.waiting:
            raise LockBackendError(
                f"A lock request to database {self.database!r} was cancelled."
            )

    @staticmethod
    def _is_shared(entry: Entry, session: Session) -> bool:
        """Return whether another claim shares the session's lock of a key."""
        return any(
            one.claim.shared and one.token is not None and one is not entry
            for one in session.at.get(entry.name, ())
        )

    @contextmanager
    def _in_doubt(self, entry: Entry, session: Session) -> Iterator[None]:
        """Let an interrupted request be followed by a release of its lock."""
        try:
            yield
        except (SessionDiedError, LockBackendError, ImproperlyConfigured):
            raise
        except BaseException:
            if session.wrapper is not None:
                session.doubted.add((entry.name, entry.claim.shared))
                entry.in_doubt = True
            raise

    def _end_soon(self, entry: Entry) -> None:
        """Let the maintenance thread release a claim, if its caller does not.

        The caller of this method holds the mutex.
        """
        entry.leaving, entry.ends_at = True, clock.now()
        self._maintain_from(entry.ends_at)

    def _on_reply(self, entry: Entry, row: Row | None) -> None:
        if row is not None and row[0]:
            with self._mutex:
                self._granted(entry, int(row[0]))
                self._dequeue(entry)

    @staticmethod
    def _extend(entry: Entry, session: Session) -> float:
        """Renew a lease as far as possible, and return its end.

        The server counts its idle timeout from the last statement that it received. The
        reply may have been read much later.
        """
        sure_until = session.stood_at + entry.claim.ttl
        entry.ends_at = max(entry.ends_at, sure_until)
        return sure_until

    def _release_entry(self, entry: Entry) -> bool:
        entry.leaving = True
        if (session := entry.session) is None:
            with self._mutex:
                self._forget(entry)
            return False
        try:
            with session.mutex:
                # Another thread may have released it meanwhile.
                had = not entry.gone and (entry.token is not None or entry.in_doubt)
                had = had and self._free(entry, session)
                with self._mutex:
                    self._forget(entry)
        except SessionDiedError as error:
            self._close_session(session, error)
            had = False
        except LockBackendError:
            raise
        except BaseException:
            session.doubted.add((entry.name, entry.claim.shared))
            with self._mutex:
                self._end_soon(entry)
            raise
        self._advance()
        return had

    def _wait_without(self, claim: Claim) -> None:
        """Repeat the waits whose comments say that their callers have this hold."""
        for entry in list(self._nested):
            owners = {held.owner for held in entry.claim.holding}
            if (session := entry.session) and claim.owner in owners:
                with suppress(LockBackendError):
                    self._ask_main("cancel", session.identity)

    def _free(self, entry: Entry, session: Session) -> bool:
        """Release the session's lock of a key, and return whether it had the lock."""
        lock = entry.name, entry.claim.shared
        if entry.claim.shared and self._is_shared(entry, session):
            # The last one releases it.
            return True
        was_doubted = lock in session.doubted
        for _ in range(5):
            with self._in_doubt(entry, session):
                row = session.ask("free shared" if lock[1] else "free", entry.name)
            if row is None:
                # An administrator may cancel any statement.
                session.doubted.add(lock)
            elif not row[0] or lock not in session.doubted:
                was_doubted = was_doubted or lock in session.doubted
                session.doubted.discard(lock)
                return was_doubted or bool(row[0])
        raise SessionDiedError("the release of a lock was cancelled")

    def _forget(self, entry: Entry) -> None:
        if entry.gone:
            # Its owner and its session may belong to another claim by now.
            return
        # Last from the table in which it is found, so this can be repeated after an
        # interrupt.
        self._dequeue(entry)
        if entry.session is not None:
            entry.session.remove(entry)
        super()._forget(entry)

    def _dequeue(self, entry: Entry) -> None:
        self._nested.pop(entry, None)
        remove(self._queued, entry)

    # The maintenance thread.

    def _maintain(self) -> None:
        """Release expired claims, and ping or close quiet sessions."""
        while True:
            with self._mutex:
                if not (sessions := self._sessions()):
                    self._maintainer.end()
                    return
                now = clock.now()
                held = [*self._entries.values(), *self._kept]
                self._maintains_at = min(
                    [
                        # A release need not wake this thread.
                        now + max(self.linger, 0.05) / 2,
                        *map(self._ends_at, held),
                        *(self._ping_at(session) for session in sessions),
                    ]
                )
                if self._maintains_at > now:
                    self._changed.wait(self._maintains_at - now)
                    now = clock.now()
                over = list(entry for entry in held if self._ends_at(entry) <= now)
                for entry in over:
                    entry.expired = True
                silent = list(one for one in sessions if self._ping_at(one) <= now)
            for entry in over:
                self._end(entry)
            for session in silent:
                self._ping(session)
            for session in sessions:
                self._close_if_idle(session)
            # A reference that is kept during the wait would keep these objects alive.
            del sessions, held, over, silent

    def _ends_at(self, entry: Entry) -> float:
        if entry.waiting or entry.gone:
            return math.inf
        return entry.ends_at + (0 if entry.kept else self.grace)

    def _ping_at(self, session: Session) -> float:
        """Return when to ping a session whose holds are not renewed."""
        carries = any(not entry.waiting for at in session.at.values() for entry in at)
        return session.used_at + 1.2 * self.renew_every if carries else math.inf

    def _end(self, entry: Entry) -> None:
        self._wait_without(entry.claim)
        session = entry.session
        try:
            self._release_entry(entry)
        except LockBackendError as error:
            if session is not None:
                self._close_session(session, error)

    def _close_if_idle(self, session: Session) -> None:
        with self._mutex:
            quiet_at = session.used_at + self.linger
            if session.at or session.is_asking or clock.now() < quiet_at:
                return
            self._drop(session)
        session.end()
