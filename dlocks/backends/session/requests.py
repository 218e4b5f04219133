"""How a claim is requested on a session, granted and released."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from dlocks.backends.session.claims import Claims
from dlocks.backends.session.sessions import Entry, Row, Session, SessionDiedError
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Grant


class Requests(Claims):
    """The requests and releases of single claims, and the thread that ends them."""

    linger: float
    _advance: Callable[[], None]

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
                or not session.admits(claim, entry.name)
            ):
                return False
            entry.waiting = False
            self._entries[claim.owner] = entry
            session.add(entry)
        try:
            self._request(entry, session, "try")
        finally:
            # Without a token, the claim has no lock, or its session has ended.
            if entry.token is None:
                with self._mutex:
                    if not waits or entry.leaving:
                        self._forget(entry)
                    elif entry.session is not None:
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
                others = len(session.at[entry.name]) > 1
            if entry.claim.shared:
                again = others and not entry.claim.beside
                statement += " shared again" if again else " shared"
            row = session.ask(statement, entry.name, partial(self._record_reply, entry))
            if row is not None and (row[0] is not None or not entry.waiting):
                return
            # The engine may have granted the key before it cancelled the statement.
            if others:
                raise SessionDiedError("its shared locks may have been confused")
            entry.interrupted = True
            self._free(entry, session)
        if not entry.waiting:
            raise LockBackendError(
                f"A lock request to database {self.database!r} was cancelled."
            )

    def _record_reply(self, entry: Entry, row: Row | None) -> None:
        if row is not None and row[0] is not None:
            with self._mutex:
                self._granted(entry, int(row[0]))
                self._dequeue(entry)

    def _acquire_again(self, entry: Entry) -> Grant | None:
        claim, session = entry.claim, entry.session
        if entry.waiting or session is None:
            return None
        if session.stood_at + claim.ttl * 2 / 3 < clock.now():
            # The claim has waited for a long time. After a pause, a process may read a
            # grant although the server has since ended the session as idle.
            self._ping(session)
        with self._mutex:
            now = clock.now()
            stands = not (entry.gone or entry.leaving) and entry.ends_at > now
            if entry.token is not None and stands:
                return Grant(entry.token, self._extend(entry, session) - now)
        # Its grant was not collected in time, so it is requested again.
        self._release_entry(entry)
        return self.acquire(claim)

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
        """Release the lock of a claim, and return whether it had one."""
        with self._mutex:
            session, entry.leaving = entry.session, True
            if session is None:
                self._forget(entry)
                return False
        try:
            with session.mutex:
                # Another thread may have released it meanwhile.
                had = not entry.gone and entry.token is not None
                had = had and self._free(entry, session)
                with self._mutex:
                    self._forget(entry)
        except SessionDiedError as error:
            self._close_session(session, error)
            return False
        self._advance()
        return had

    def _free(self, entry: Entry, session: Session) -> bool:
        """Release the lock of a claim in the engine, if it has one."""
        shared = entry.claim.shared
        # An administrator may cancel any statement. A second release of a shared lock
        # could free that of another claim.
        for _ in range(1 if shared else 2):
            row = session.ask("free shared" if shared else "free", entry.name)
            if row is not None:
                return bool(row[0])
        raise SessionDiedError("the release of a lock was cancelled")

    # The maintenance thread.

    def _maintain(self) -> None:
        while True:
            with self._mutex:
                now = clock.now()
                sessions = self._sessions()
                if not sessions:
                    self._maintainer.end()
                    return
                held = [one for one in self._entries.values() if not one.waiting]
                due = [(one.ends_at + self.grace, one) for one in held]
                due += [(one.ends_at, one) for one in self._kept]
                over = [entry for end, entry in due if end <= now]
                for entry in over:
                    # From here on, it is not renewed any more.
                    entry.ends_at = -math.inf
                # Holds that are not renewed do not ping their sessions.
                used = {entry.session for _, entry in due}
                pings = {
                    one: one.stood_at + 1.2 * self.renew_every
                    for one in sessions
                    if one in used
                }
                silent = [one for one, end in pings.items() if end <= now]
                idle = [
                    one
                    for one in sessions
                    if not one.at and one.stood_at + self.linger <= now
                ]
                if not over and not silent and not idle:
                    # Idle sessions are checked periodically, so a release need not wake
                    # this thread.
                    soon = now + max(self.linger, 0.05) / 2
                    ends = [end for end, _ in due]
                    self._maintains_at = min([soon, *ends, *pings.values()])
                    self._changed.wait(self._maintains_at - now)
            for entry in over:
                self._end(entry)
            for session in idle:
                self._close_idle(session)
            for session in silent:
                self._ping(session)
            # A reference that is kept during the wait would keep these objects alive.
            del sessions, held, due, over, used, pings, silent, idle

    def _end(self, entry: Entry) -> None:
        session = entry.session
        try:
            self._release_entry(entry)
        except LockBackendError as error:
            if session is not None:
                self._close_session(session, error)

    def _close_idle(self, session: Session) -> None:
        if session.mutex.acquire(blocking=False):
            try:
                with self._mutex:
                    if session.at:
                        # A claim has just been added.
                        return
                    self._drop(session)
                session.end()
            finally:
                session.mutex.release()
