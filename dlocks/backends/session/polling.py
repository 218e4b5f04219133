"""Polling for waiters without a session, which try their keys a few times a second."""

from __future__ import annotations

import logging
import math
from collections import deque

from dlocks.backends.session.claim_requests import ClaimRequests
from dlocks.backends.session.engine_sessions import SessionDiedError
from dlocks.backends.session.sessions import Entry, Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock

logger = logging.getLogger("dlocks")

# Seconds between two attempts to acquire a key whose waiter has no session.
POLL_EVERY = 0.1
# Number of keys that one poll tries to acquire.
CLAIMS_PER_TRY = 32


class Polling(ClaimRequests):
    """The attempts of waiters in the local queue, on the session of all callers."""

    def _poll(self) -> None:
        """Try to acquire the keys whose waiters have no session."""
        now = clock.now()
        with self._mutex:
            if not self._queued or now < self._polled_at + POLL_EVERY * 0.9:
                return
            self._polled_at = now
            tried = [
                entries[0]
                for name, entries in self._queued.items()
                if name not in self._foremost
            ][:CLAIMS_PER_TRY]
            for entry in tried:
                # Begin with other keys the next time.
                self._queued[entry.name] = self._queued.pop(entry.name)
        for entry in tried:
            main = self._main_session()
            try:
                # After a shared claim was granted, the next one can share the key too.
                while (
                    self._try_queued(entry, main)
                    and entry.claim.shared
                    and (entries := self._queued.get(entry.name))
                ):
                    entry = entries[0]
            except SessionDiedError as error:
                self._close_session(main, error)
                return
            except LockBackendError as error:
                logger.warning("%s", error)
                return

    def _try_queued(self, entry: Entry, main: Session) -> bool:
        with self._mutex:
            entries = self._queued.get(entry.name)
            if not entries or entries[0] is not entry or not self._reserve(entry, main):
                return False
            # No other thread may send it meanwhile.
            entry.waiting = False
            entries.popleft()
            if not entries:
                del self._queued[entry.name]
        try:
            if self._ask_for(entry, main) is not None:
                return True
        except LockBackendError:
            self._requeue(entry, main)
            raise
        self._requeue(entry, main)
        return False

    def _requeue(self, entry: Entry, main: Session) -> None:
        with self._mutex:
            if entry.gone or entry.leaving or entry.asked or entry.token is not None:
                # The caller that cancels the claim handles all of these cases.
                return
            if not (entry.joins and entry.counted):
                main.remove(entry)
                entry.session, entry.waiting, entry.ends_at = None, True, math.inf
                entry.joins, entry.counted = False, True
                self._queued.setdefault(entry.name, deque()).appendleft(entry)
                return
        # The claim owns a lock by now, which has to be released first.
        self._release_entry(entry)
