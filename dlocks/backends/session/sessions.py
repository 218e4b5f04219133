"""A server session that is used by many threads, and its claims."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dlocks.backends.session.engine_sessions import EngineSession, Row, SessionDiedError
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim

# Seconds for the reply to a statement that does not wait for a lock.
REPLY_TIMEOUT = 10.0


@dataclass(slots=True, eq=False)
class Entry:
    """A claim that holds a key, requests it or waits for it."""

    claim: Claim
    name: str | int
    # Its position among the claims of this process.
    number: int = field(default_factory=itertools.count(1).__next__)
    # The session on which it is held or waited for. None while it waits without a
    # session.
    session: Session | None = None
    token: int | None = None
    waiting: bool = False
    count: int = 1
    # Whether it owns a lock in the engine. A shared claim may instead join the lock of
    # another claim on the same session.
    counted: bool = True
    # Whether it was requested to join the lock of another claim. It may own that lock
    # by now.
    joins: bool = False
    # When the request that was granted was sent, and the time of day of the grant.
    asked_at: float = 0.0
    since: float = 0.0
    # When it is released if it is not renewed.
    ends_at: float = float("inf")
    # Whether the thread that watches the sessions reports its turn.
    watched: bool = False
    # Released, but its key stays taken until ``ends_at``.
    kept: bool = False
    # Whether it is being released or cancelled. No more requests are sent for it, and
    # no other shared claim may join its lock.
    leaving: bool = False
    # Whether the engine is to release its lock, which no other claim may take over from
    # then on. ``freed`` is the engine's reply.
    freeing: bool = False
    freed: bool | None = None
    # Whether a request for it was sent whose reply has not been read.
    asked: bool = False
    # Removed from all tables.
    gone: bool = False


class Session:
    """A server session, and the claims on it.

    The engine does not distinguish the claims of one session, so this class decides
    which of them exclude each other.

    At most one statement is under way. A statement that waits in the engine's queue
    occupies the session until its reply arrives. Then ``on_answer`` is called in the
    thread that reads the reply first. Only the thread that holds ``mutex`` may read and
    write the session. ``at`` is guarded by the backend.
    """

    def __init__(self, wire: EngineSession) -> None:
        self.wire = wire
        self.mutex = threading.RLock()
        self.dead = False
        self.at: dict[str | int, list[Entry]] = {}
        self.idle_since = clock.now()
        # When the last ping was sent, and when the last ping with a reply was sent.
        self.pinged_at = self.stood_at = clock.now()
        self._in_progress = False
        self._on_answer: Callable[[Row | None], None] | None = None
        self._row: Row | None = None

    def ask(
        self,
        statement: str,
        value: Any = 0,
        on_answer: Callable[[Row | None], None] | None = None,
    ) -> Row | None:
        """Send a statement and return the first row of its reply.

        ``on_answer`` is called even if the reply comes late.
        """
        with self.mutex:
            if self._in_progress:
                self.settle_in_time()
            self.start(statement, value, on_answer)
            self.settle_in_time(here=True)
            return self._row

    def settle_in_time(self, *, here: bool = False) -> None:
        """Wait for the reply under way, if any.

        Raise LockBackendError if it does not arrive in time.
        """
        if not self.settle(REPLY_TIMEOUT, here=here):
            raise LockBackendError(
                f"The session for locks did not answer within {REPLY_TIMEOUT:g} s."
            )

    def start(
        self, statement: str, value: Any, on_answer: Callable[[Row | None], None] | None
    ) -> None:
        """Send a statement without waiting for its reply."""
        with self.mutex:
            if self.dead:
                raise SessionDiedError("it was closed")
            self._on_answer = on_answer
            self._in_progress = True
            try:
                self.wire.send(statement, value)
            except BaseException:
                # An unknown part of the statement was sent, so a reply could not be
                # attributed.
                self.dead = True
                raise

    def settle(self, timeout: float = 0.0, *, here: bool = False) -> bool:
        """Wait up to ``timeout`` seconds for the reply under way, if any.

        Return whether nothing is under way. An error of the server ends the session,
        unless the sender is ``here`` to receive it.
        """
        with self.mutex:
            if not self._in_progress:
                return True
            if self.dead:
                raise SessionDiedError("it was closed")
            if not self.wire.wait(timeout):
                return False
            self._in_progress = False
            on_answer, self._on_answer = self._on_answer, None
            try:
                self._row = self.wire.answer()
            except LockBackendError as error:
                if on_answer is not None and not here:
                    raise SessionDiedError(str(error)) from error
                raise
            if on_answer is not None:
                try:
                    on_answer(self._row)
                except SessionDiedError:
                    # Another thread could otherwise send a request whose grant would be
                    # lost.
                    self.dead = True
                    raise
            return True

    @property
    def is_asked(self) -> bool:
        """Whether a reply is still to come."""
        return self._in_progress

    @property
    def carries(self) -> bool:
        """Whether a claim on this session was granted."""
        return any(
            entry.token is not None
            for entries in list(self.at.values())
            for entry in list(entries)
        )

    def admits(self, claim: Claim, name: str | int) -> bool:
        """Return whether no claim on this session excludes the given claim.

        The server checks the claims on other sessions.
        """
        for entry in self.at.get(name, ()):
            other = entry.claim
            if not claim.shared or not (
                other.shared or (other.owner == claim.beside and not entry.kept)
            ):
                return False
        return True

    def add(self, entry: Entry) -> None:
        entry.session = self
        self.at.setdefault(entry.name, []).append(entry)

    def remove(self, entry: Entry) -> None:
        entries = self.at.get(entry.name, [])
        if entry in entries:
            entries.remove(entry)
        if not entries:
            self.at.pop(entry.name, None)
        if not self.at:
            self.idle_since = clock.now()
