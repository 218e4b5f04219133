"""How a claim is requested on a session, granted and released."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial

from dlocks.backends.session.claims import Claims
from dlocks.backends.session.sessions import Entry, Row, Session, SessionDiedError
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Grant

logger = logging.getLogger("dlocks")


class Requests(Claims):
    """The requests and releases of single claims, and the thread that ends them."""

    linger: float
    _advance: Callable[[], None]

    def _try(self, entry: Entry, session: Session) -> Grant | None:
        """Request the key for a claim on this session, without waiting for it."""
        with self._mutex:
            if session.dead:
                raise SessionDiedError("it was closed")
            waiters = self._queued.get(entry.name) and not entry.claim.beside
            if waiters or not session.admits(entry.claim, entry.name):
                self.contended.add(entry.claim.key)
                return None
            self._entries[entry.claim.owner] = entry
            session.add(entry)
        try:
            self._request(entry, session, "try")
        finally:
            # The claim has no lock, or its session has ended.
            if entry.token is None:
                with self._mutex:
                    self._forget(entry)
        if entry.token is None:
            self.contended.add(entry.claim.key)
            return None
        return Grant(entry.token)

    def _request(self, entry: Entry, session: Session, statement: str) -> None:
        """Send the statement that tries or waits for the key, and record a grant."""
        with session.mutex:
            session.allow_idle(entry.claim.ttl + self.grace)
            with self._mutex:
                # A caller that cancels the claim marks it before it uses the session.
                if entry.leaving or entry.session is not session:
                    return
                shares = [
                    one
                    for one in session.at.get(entry.name, ())
                    if one.claim.shared and one is not entry
                ]
            if entry.claim.shared:
                statement += " shared again" if shares else " shared"
            row = session.ask(statement, entry.name, partial(self._record_reply, entry))
            if row is not None and (row[0] is not None or statement[:4] != "wait"):
                return
            # The engine may have granted the key before the statement was cancelled.
            entry.interrupted = True
            if shares:
                raise SessionDiedError("a shared lock may have been granted")
            self._free(entry, session)
            if entry.waiting:
                return
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
        # The claim was requested before, and its grant was not collected in time. It is
        # requested again.
        self._release_entry(entry)
        return self.acquire(claim)

    @staticmethod
    def _extend(entry: Entry, session: Session) -> float:
        """Renew a lease as far as possible, and return its end.

        The server counts its idle timeout from the last statement that it received. The
        reply may have been read much later. The caller holds the mutex.
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
        if self._queued:
            self._advance()
        return had

    def _free(self, entry: Entry, session: Session) -> bool:
        """Release the lock of a claim in the engine, if it has one."""
        shared = entry.claim.shared
        for _ in range(1 if shared and entry.token is not None else 2):
            row = session.ask("free shared" if shared else "free", entry.name)
            if row is not None:
                return bool(row[0])
        # An administrator may cancel any statement. A second release of a shared lock
        # could free that of another claim.
        session.dead = True
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
                # Sessions with holds that are not renewed. All others are pinged more
                # often.
                pings = [
                    (one.stood_at + 1.2 * self.renew_every, one)
                    for one in sessions
                    if any(entry.session is one for entry in [*held, *self._kept])
                ]
                silent = [one for end, one in pings if end <= now]
                closing = [(one.stood_at + self.linger, one) for one in sessions]
                idle = [one for end, one in closing if end <= now and not one.at]
                if not over and not silent and not idle:
                    # Idle sessions are checked periodically, so a release need not wake
                    # this thread.
                    soon = now + max(self.linger, 0.05) / 2
                    self._maintains_at = min(
                        [soon, *(end for end, _ in [*due, *pings])]
                    )
                    self._changed.wait(self._maintains_at - now)
            for entry in over:
                self._end(entry)
            for session in idle:
                self._close_idle(session)
            for session in silent:
                self._ping(session)
            # A reference that is kept during the wait would keep these objects alive.
            del sessions, held, due, over, pings, silent, closing, idle

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
