"""The thread that releases expired leases, and pings or closes quiet sessions."""

from __future__ import annotations

import math
from collections.abc import Callable

from dlocks.backends.session.open_sessions import OpenSessions
from dlocks.backends.session.sessions import Entry, Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock


class Maintenance(OpenSessions):
    """The background maintenance of the claims and sessions of one process."""

    linger: float
    _release_entry: Callable[[Entry], bool]

    def _maintain_from(self, entry: Entry | None) -> None:
        """Ensure that the maintenance thread runs and handles an entry in time.

        It releases entries at their end, and closes idle sessions. The caller holds the
        mutex.
        """
        self._maintainer.start()
        if entry is not None and entry.ends_at < self._maintains_at:
            self._changed.notify()

    def _maintain(self) -> None:
        while True:
            with self._mutex:
                now = clock.now()
                if not self._sessions():
                    self._maintainer.end()
                    return
                held = [entry for entry in self._entries.values() if not entry.waiting]
                due = [(entry.ends_at + self.grace, entry) for entry in held]
                due += [(entry.ends_at, entry) for entry in self._kept]
                over = [entry for end, entry in due if end <= now]
                idle = [
                    one
                    for one in self._sessions()
                    if not one.at and now >= one.idle_since + self.linger
                ]
                for entry in over:
                    # From here on, it is not renewed any more.
                    entry.ends_at = -math.inf
                # Sessions without renewals. All others are pinged more often.
                silent = [
                    one
                    for one in self._sessions()
                    if one.carries and now >= self._asked_by(one)
                ]
                if not over and not idle and not silent:
                    # Idle sessions are checked periodically, so a release need not wake
                    # this thread.
                    self._maintains_at = min(
                        [end for end, _ in due], default=now + self.linger
                    )
                    self._maintains_at = min(
                        self._maintains_at, now + max(self.linger, 0.05) / 2
                    )
                    self._maintains_at = min(
                        [
                            self._maintains_at,
                            *(
                                self._asked_by(one)
                                for one in self._sessions()
                                if one.carries
                            ),
                        ]
                    )
                    self._changed.wait(self._maintains_at - now)
            for entry in over:
                self._end(entry)
            for session in idle:
                self._close_idle(session)
            self._ping(silent)
            # A reference that is kept during the wait would keep these objects alive.
            del over, idle, silent, held, due

    def _asked_by(self, session: Session) -> float:
        """Return when a session with holds is pinged, unless it was pinged before."""
        return session.pinged_at + 1.2 * self.renew_every

    def _end(self, entry: Entry) -> None:
        try:
            self._release_entry(entry)
        except LockBackendError as error:
            if entry.session is not None:
                self._close_session(entry.session, error)

    def _close_idle(self, session: Session) -> None:
        with session.mutex:
            with self._mutex:
                if session.at or session.dead:
                    return
                if session is self._main:
                    self._main = None
                elif session in self._free:
                    self._free.remove(session)
                else:
                    # Another thread has just taken it.
                    return
                self._queueing.discard(session)
                session.dead = True
            session.wire.close()
