"""The claims and the sessions of one process, in the tables of the session backend."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import deque
from functools import cached_property

from dlocks.backends.database.statements import Statements
from dlocks.backends.local_claims import LocalClaims
from dlocks.backends.session.engines import session_class
from dlocks.backends.session.sessions import Entry, Row, Session, SessionDiedError
from dlocks.exceptions import LockBackendError
from dlocks.values import Claim

logger = logging.getLogger("dlocks")


class Claims(Statements, LocalClaims):
    """The tables of claims and sessions, which one mutex guards."""

    maintainer_name = "dlocks-sessions"
    session_pooling: bool
    _entries: dict[str, Entry]
    _kept: list[Entry]

    def _reset(self) -> None:
        super()._reset()
        # The session that never waits for a lock, and the sessions of waiters.
        self._main: Session | None = None
        self._for_waiters: set[Session] = set()
        # The waiters by name. Only the first one of a name has a session.
        self._queued: dict[str | int, deque[Entry]] = {}

    @cached_property
    def _kind(self) -> type[Session]:
        return session_class(self.database)

    def _name(self, key: str) -> str | int:
        if self._kind.shares:
            return int.from_bytes(
                hashlib.sha256(key.encode()).digest()[:8], "big", signed=True
            )
        # The names of GET_LOCK are case-insensitive, and shared by all databases of a
        # server.
        database = str(self.connection.settings_dict["NAME"])
        return (
            "dlocks:" + hashlib.sha256(f"{database}\0{key}".encode()).hexdigest()[:48]
        )

    # The sessions.

    def _new_session(self) -> Session:
        return self._kind(
            self.database,
            f"dlocks {socket.gethostname()}:{os.getpid()}",
            self.ttl + self.grace,
            pooled=self.session_pooling,
        )

    def _sessions(self) -> list[Session]:
        return [*([self._main] if self._main is not None else []), *self._for_waiters]

    def _main_session(self) -> Session:
        main = self._main
        if main is not None and main.dead:
            # Its last statement was interrupted.
            self._close_session(main, SessionDiedError("its state is unknown"))
        with self._mutex:
            if self._main is None:
                self._main = self._new_session()
                self._maintain_from()
            return self._main

    def _session_for(self, claim: Claim) -> Session:
        """Return the session on which to try a claim."""
        beside = self._entries.get(claim.beside) if claim.beside else None
        return (beside.session if beside else None) or self._main_session()

    def _ask_main(self, statement: str, value: object) -> Row | None:
        for reconnected in (False, True):
            main = self._main_session()
            try:
                return main.ask(statement, value)
            except SessionDiedError as error:
                self._close_session(main, error)
                if reconnected:
                    raise self._failed(error) from error
        raise AssertionError("unreachable")

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
        """End a session. Its holds are lost, and its waiters wait for another one."""
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

    def _failed(self, error: Exception) -> LockBackendError:
        return LockBackendError(
            f"A lock request to database {self.database!r} failed: {error}"
        )

    # The claims.

    def _forget(self, entry: Entry) -> None:
        if entry.gone:
            # Its owner and its session may belong to another claim by now.
            return
        super()._forget(entry)
        self._dequeue(entry)
        if entry.session is not None:
            entry.session.remove(entry)

    def _dequeue(self, entry: Entry) -> None:
        """Remove a waiter from the local queue; the caller holds the mutex."""
        entries = self._queued.get(entry.name, ())
        if entry in entries:
            self._queued[entry.name].remove(entry)
            if not self._queued[entry.name]:
                del self._queued[entry.name]
