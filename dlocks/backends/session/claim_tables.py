"""The claims and the sessions of one process, in the tables of the session backend."""

from __future__ import annotations

import hashlib
import selectors
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property

from dlocks.backends.database.statements import Statements
from dlocks.backends.local_claims import LocalClaims
from dlocks.backends.session.connect import engine_session_class
from dlocks.backends.session.engine_sessions import EngineSession
from dlocks.backends.session.sessions import Entry, Session
from dlocks.values import Claim

# Seconds for which no session is opened for waiters after a failure.
REFUSED_FOR = 1.0


class ClaimTables(Statements, LocalClaims):
    """The tables of claims and sessions, and the mutex that guards them.

    All parts of the backend share them. Each part declares what a later one defines.
    """

    maintainer_name = "dlocks-sessions"
    _entries: dict[str, Entry]
    _kept: list[Entry]

    def _reset(self) -> None:
        super()._reset()
        # The session that never waits, the sessions for waiters, and those of them
        # without a claim.
        self._main: Session | None = None
        self._queueing: set[Session] = set()
        self._free: list[Session] = []
        # By name, the claims without a session to wait on, and the one claim that has a
        # session.
        self._queued: dict[str | int, deque[Entry]] = {}
        self._foremost: dict[str | int, Entry] = {}
        self._polled_at = 0.0
        self._refused_at = -REFUSED_FOR
        self._opening = threading.Lock()
        self._reserved = 0
        self._selector: selectors.BaseSelector | None = None

    @cached_property
    def _kind(self) -> type[EngineSession]:
        return engine_session_class(self.database)

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

    def _sessions(self) -> Iterable[Session]:
        return [*([self._main] if self._main is not None else []), *self._queueing]

    def _session_beside(self, claim: Claim) -> Session | None:
        entry = self._entries.get(claim.beside) if claim.beside else None
        return entry.session if entry is not None else None

    def _forget(self, entry: Entry) -> None:
        """Remove a claim from all tables; the caller holds the mutex."""
        if entry.gone:
            # Its owner and its session may belong to another claim by now.
            return
        entry.gone = True
        self._entries.pop(entry.claim.owner, None)
        if entry in self._kept:
            self._kept.remove(entry)
        if (entries := self._queued.get(entry.name)) is not None:
            with suppress(ValueError):
                entries.remove(entry)
            if not entries:
                del self._queued[entry.name]
        if self._foremost.get(entry.name) is entry:
            del self._foremost[entry.name]
        if (session := entry.session) is not None:
            session.remove(entry)
            if (
                session in self._queueing
                and not session.at
                and not session.dead
                and session not in self._free
            ):
                self._free.append(session)
