"""A session that many threads use, and the claims that are on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlocks import clock
from dlocks.backends.base import Claim
from dlocks.backends.session.wires import Row, SessionDiedError, Wire
from dlocks.exceptions import LockBackendError

# How long a server may take to answer what it need not wait for.
PATIENCE = 10.0


@dataclass(slots=True, eq=False)
class Entry:
    """A claim that has a key, or asks or waits for it."""

    claim: Claim
    name: str | int
    # Where it is held or waited for; None while it has no session to wait on.
    session: Session | None = None
    token: int | None = None
    waiting: bool = False
    count: int = 1
    # Whether the engine has counted it; a share may stand on another's of the same session.
    counted: bool = True
    # Whether it was asked for as one that stands on another's, whose count may be its own since.
    joins: bool = False
    # When the question was sent by which it was granted, and when that was, by the calendar.
    asked_at: float = 0.0
    since: float = 0.0
    # When it is given back, if nobody renews it.
    ends_at: float = float("inf")
    # Whether the thread that watches the sessions tells of its turn.
    watched: bool = False
    # Given back, but its key stays taken until the end.
    kept: bool = False
    # Whether it is being given back, or given up: nothing more is asked for it, and no other share stands on it.
    leaving: bool = False
    # Whether it is the engine that is told so, from when on nobody takes its count over; and what that has answered.
    freeing: bool = False
    freed: bool | None = None
    # Whether a question for it is on its way, to which the answer has not been seen.
    asked: bool = False
    # Given up before it was sent.
    gone: bool = False


class Session:
    """
    Carries claims; the engine does not tell apart those of one session, so it is told here who excludes whom.

    At most one statement is under way. One that waits in the engine's queue leaves the session to nobody else until
    it is answered; then ``on_answer`` is called, in whichever thread sees the answer first. Whoever has ``mutex`` may
    read and write the session; ``at`` is guarded by the backend.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.mutex = threading.RLock()
        self.dead = False
        self.at: dict[str | int, list[Entry]] = {}
        self.idle_since = clock.now()
        # When it was last asked whether it stands, and when that was asked which it has answered.
        self.pinged_at = self.stood_at = clock.now()
        self._under_way = False
        self._on_answer: Callable[[Row | None], None] | None = None
        self._row: Row | None = None

    def ask(self, statement: str, value: Any = 0, on_answer: Callable[[Row | None], None] | None = None) -> Row | None:
        """Send a statement and return the first row of its answer; ``on_answer`` is told even if that comes late."""
        with self.mutex:
            if self._under_way:
                self.settle_in_time()
            self.start(statement, value, on_answer)
            self.settle_in_time(here=True)
            return self._row

    def settle_in_time(self, *, here: bool = False) -> None:
        """Wait for the answer under way, if any; raise LockBackendError when it does not come."""
        if not self.settle(PATIENCE, here=here):
            raise LockBackendError(f"The session for locks has not answered for {PATIENCE:g} s.")

    def start(self, statement: str, value: Any, on_answer: Callable[[Row | None], None] | None) -> None:
        """Send a statement without waiting for its answer."""
        with self.mutex:
            if self.dead:
                raise SessionDiedError("it was closed")
            self._on_answer = on_answer
            self._under_way = True
            try:
                self.wire.send(statement, value)
            except BaseException:
                # Nobody knows what of it was sent, so no answer would be anybody's.
                self.dead = True
                raise

    def settle(self, timeout: float = 0.0, *, here: bool = False) -> bool:
        """
        Wait for the answer under way, if any, so many seconds at most; return whether nothing is under way.

        A refusal is the session's end, unless whoever has asked is ``here`` to be told.
        """
        with self.mutex:
            if not self._under_way:
                return True
            if self.dead:
                raise SessionDiedError("it was closed")
            if not self.wire.wait(timeout):
                return False
            self._under_way = False
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
                    # Before anybody else can send what would be granted to nobody.
                    self.dead = True
                    raise
            return True

    @property
    def is_asked(self) -> bool:
        """Whether there is an answer still to come."""
        return self._under_way

    @property
    def carries(self) -> bool:
        """Whether somebody believes to hold what is on it."""
        return any(entry.token is not None for entries in list(self.at.values()) for entry in list(entries))

    def admits(self, claim: Claim, name: str | int) -> bool:
        """Return whether nobody on this session has the name in the claim's way; the server tells about the others."""
        for entry in self.at.get(name, ()):
            other = entry.claim
            if not claim.shared or not (other.shared or (other.owner == claim.beside and not entry.kept)):
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
