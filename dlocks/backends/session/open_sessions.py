"""The open sessions of one process: how they are opened, shared, pinged and closed."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from dlocks.backends.session.claim_tables import ClaimTables
from dlocks.backends.session.connect import connect
from dlocks.backends.session.engine_sessions import Row, SessionDiedError
from dlocks.backends.session.sessions import Entry, Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim

logger = logging.getLogger("dlocks")

# Seconds for which one renewal waits for the replies to its pings. Other backends have
# to be renewed as well.
PING_TIMEOUT = 0.25


class OpenSessions(ClaimTables):
    """The session that all callers share, and operations on each session."""

    session_pooling: bool
    _maintain_from: Callable[[Entry | None], None]

    def _main_session(self) -> Session:
        main = self._main
        if main is not None and not main.dead:
            return main
        with self._opening:
            if self._main is None or self._main.dead:
                session = self._open()
                with self._mutex:
                    self._main = session
                    self._maintain_from(None)
            return self._main

    def _open(self) -> Session:
        name = f"dlocks {socket.gethostname()}:{os.getpid()}"
        return Session(
            connect(
                self.database, name, self.ttl + self.grace, pooled=self.session_pooling
            )
        )

    def _ask_main(self, statement: str, value: Any) -> Row | None:
        for reconnected in (False, True):
            main = self._main_session()
            try:
                return main.ask(statement, value)
            except SessionDiedError as error:
                self._close_session(main, error)
                if reconnected:
                    raise self._failed(error) from error
        raise AssertionError("unreachable")

    def _settle(self, session: Session) -> None:
        """Read the reply of a session if it has arrived.

        Do nothing if another thread waits for it.
        """
        if not session.mutex.acquire(blocking=False):
            return
        try:
            session.settle()
        except SessionDiedError as error:
            self._close_session(session, error)
        finally:
            session.mutex.release()

    def _allow_idle(self, session: Session, claim: Claim) -> None:
        """Ensure that the server does not end the session within the claim's ttl."""
        if session.wire.idle < (needed := claim.ttl + self.grace):
            with session.mutex:
                session.ask("idle", session.wire.idle_setting(needed))  # type: ignore[attr-defined]
                session.wire.idle = needed

    def _ping(self, sessions: Iterable[Session]) -> None:
        """Ping all sessions at once, and record which of them reply.

        A late reply is recorded by the next ping.
        """
        until = clock.now() + PING_TIMEOUT
        asked = []
        for session in sessions:
            if not session.mutex.acquire(timeout=max(0.0, until - clock.now())):
                continue
            try:
                session.pinged_at = clock.now()
                if session.settle():
                    session.start(
                        "ping", 0, partial(self._check_ping, session, session.pinged_at)
                    )
                asked.append(session)
            except SessionDiedError as error:
                self._close_session(session, error)
            except LockBackendError as error:
                logger.warning("%s", error)
            finally:
                session.mutex.release()
        for session in asked:
            try:
                session.settle(max(0.0, until - clock.now()))
            except SessionDiedError as error:
                self._close_session(session, error)
            except LockBackendError as error:
                logger.warning("%s", error)

    def _ask_whether_it_stands(self, session: Session) -> None:
        sent = clock.now()
        self._check_ping(session, sent, session.ask("ping"))

    def _check_ping(self, session: Session, sent: float, row: Row | None) -> None:
        if row is None:
            return
        if int(row[0]) != session.wire.pid:
            session.dead = True
            raise SessionDiedError("a pooler has assigned it to another client")
        session.stood_at = max(session.stood_at, sent)

    def _close_session(
        self, session: Session, error: BaseException | None = None
    ) -> None:
        """Close a session, and forget its claims.

        Its holds are lost, and its waiters retry.
        """
        with self._mutex:
            session.dead = True
            if session is self._main:
                self._main = None
            self._queueing.discard(session)
            if session in self._free:
                self._free.remove(session)
            entries = [entry for at in list(session.at.values()) for entry in at]
            for entry in entries:
                self._forget(entry)
        if error is not None and entries:
            logger.warning(
                "A session on database %r with %d locks was lost: %s",
                self.database,
                len(entries),
                error,
            )
        with session.mutex:
            self._unregister(session)
            session.wire.close()
        lost = [
            entry.claim.owner
            for entry in entries
            if entry.token is not None and not entry.leaving
        ]
        if lost:
            # Holds that are not renewed would not notice the loss.
            self.runtime.on_lost(lost, "the database session that held it has ended")

    def _unregister(self, session: Session) -> None:
        if self._selector is None:
            return
        there = self._selector.get_map().get(session.wire.number)
        if there is not None and there.data is session:
            with suppress(KeyError, ValueError):
                self._selector.unregister(session.wire.number)

    def _failed(self, error: Exception) -> LockBackendError:
        return LockBackendError(
            f"A lock request to database {self.database!r} failed: {error}"
        )
