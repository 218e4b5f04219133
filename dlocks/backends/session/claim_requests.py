"""How a claim is requested on a session without queueing, and how it is released."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from dlocks.backends.session.engine_sessions import Row, SessionDiedError
from dlocks.backends.session.maintenance import Maintenance
from dlocks.backends.session.sessions import REPLY_TIMEOUT, Entry, Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Grant


class ClaimRequests(Maintenance):
    """The requests and releases of single claims, and the grants they lead to."""

    _advance: Callable[..., None]

    def _try(self, entry: Entry, session: Session) -> Grant | None:
        """Request the key for a claim on this session, without queueing."""
        with self._mutex:
            if not self._reserve(entry, session):
                self.contended.add(entry.claim.key)
                return None
            self._entries[entry.claim.owner] = entry
        try:
            grant = self._ask_for(entry, session)
        except LockBackendError:
            # If the server is only slow, the reply may still arrive. The key is
            # released then.
            self._forget_if_refused(entry)
            raise
        if grant is None:
            with self._mutex:
                self.contended.add(entry.claim.key)
            self._release_again(entry)
        return grant

    def _reserve(self, entry: Entry, session: Session) -> bool:
        """Assign a claim to a session, before the request is sent.

        Return False if another claim on that session excludes it.
        """
        claim = entry.claim
        if session.dead:
            raise SessionDiedError("it was closed")
        if not session.admits(claim, entry.name):
            return False
        # The server would grant the lock again to a session that holds it, even ahead
        # of waiters. A shared claim therefore joins the lock of a shared claim on the
        # same session.
        entry.joins = claim.shared and any(
            other.claim.shared and other.token is not None and not other.leaving
            for other in session.at.get(entry.name, ())
        )
        entry.counted = not entry.joins
        session.add(entry)
        # The claim ends by itself if it is not sent within this time, or if its reply
        # is never read.
        entry.ends_at = clock.now() + max(claim.ttl, REPLY_TIMEOUT)
        return True

    def _ask_for(self, entry: Entry, session: Session) -> Grant | None:
        self._allow_idle(session, entry.claim)
        statement = (
            "join" if entry.joins else "try shared" if entry.claim.shared else "try"
        )
        with session.mutex:
            # A caller that cancels the claim marks it before it uses the session.
            if not entry.leaving:
                entry.asked, entry.asked_at = True, clock.now()
                entry.ends_at = entry.asked_at + entry.claim.ttl
                try:
                    session.ask(statement, entry.name, partial(self._answered, entry))
                except LockBackendError:
                    entry.asked = session.is_asked
                    raise
            elif entry.ends_at == -math.inf:
                raise LockBackendError(
                    f"No session for locks became available within {REPLY_TIMEOUT:g} s."
                )
        return None if entry.token is None else Grant(entry.token)

    def _forget_if_refused(self, entry: Entry) -> None:
        with self._mutex:
            if (
                not entry.asked
                and entry.token is None
                and not entry.leaving
                and not entry.joins
            ):
                self._forget(entry)

    def _answered(self, entry: Entry, row: Row | None) -> None:
        entry.asked = False
        if row is not None and row[0] is not None:
            with self._mutex:
                self._granted(entry, row)

    def _release_again(self, entry: Entry) -> None:
        """Discard a claim that was not granted."""
        with self._mutex:
            if not (entry.joins and entry.counted):
                self._forget(entry)
                return
        # The claim whose lock it joined was released meanwhile, so this claim owns the
        # lock now.
        self._release_entry(entry)

    def _granted(self, entry: Entry, row: Row) -> None:
        """Record a grant; the caller holds the mutex."""
        entry.token = int(row[0])
        entry.since = time.time()
        # The time in which the grant has to be collected. ``_sure_until()`` returns the
        # time for which the lock is certain.
        entry.ends_at = clock.now() + entry.claim.ttl
        self._maintain_from(entry)

    @staticmethod
    def _sure_until(entry: Entry, session: Session, ttl: float) -> float:
        """Return until when the server certainly keeps the lock of a claim."""
        # The server counts its idle timeout from the last statement that it received.
        # The reply to that statement may have been read much later.
        return max(entry.asked_at, session.stood_at) + ttl

    def _acquire_again(self, entry: Entry) -> Grant | None:
        claim, session = entry.claim, entry.session
        if entry.waiting and session is not None:
            self._settle(session)
        if entry.waiting or session is None:
            return None
        if (
            entry.token is not None
            and self._sure_until(entry, session, claim.ttl) - clock.now()
            < claim.ttl / 3
        ):
            # The claim has waited for a long time.
            try:
                self._ask_whether_it_stands(session)
            except SessionDiedError as error:
                self._close_session(session, error)
        with self._mutex:
            now = clock.now()
            stands = (
                self._entries.get(claim.owner) is entry
                and not entry.leaving
                and entry.ends_at > now
            )
            if entry.token is not None and stands:
                sure_until = self._sure_until(entry, session, claim.ttl)
                entry.ends_at = max(entry.ends_at, sure_until)
                return Grant(entry.token, sure_until - now)
        # The claim was requested before. Either its reply was not read, or its grant
        # was not collected in time. It is requested again.
        self._release_entry(entry)
        return self.acquire(claim)

    def _release_entry(self, entry: Entry) -> bool:
        with self._mutex:
            session, entry.leaving = entry.session, True
        if session is None:
            return False
        try:
            if entry.token is None:
                # The reply may not have been read.
                session.settle_in_time()
            if self._is_engine_s(entry, session):
                with session.mutex:
                    if session.is_asked:
                        # The release may have been sent already, and its reply may come
                        # late. A second release could free the lock of another claim.
                        session.settle_in_time()
                    if entry.freed is None:
                        statement = "free shared" if entry.claim.shared else "free"
                        session.ask(statement, entry.name, partial(self._freed, entry))
        except SessionDiedError as error:
            self._close_session(session, error)
            return False
        if self._queued:
            self._advance(connecting=False)
        return entry.freed is not False and entry.token is not None

    def _is_engine_s(self, entry: Entry, session: Session) -> bool:
        """Return whether the engine has to release the lock of a claim.

        Otherwise the claim is forgotten at once.
        """
        with self._mutex:
            if entry.claim.shared and not entry.freeing:
                others = [
                    one
                    for one in session.at.get(entry.name, ())
                    if not one.counted and not one.leaving
                ]
                has_count = entry.counted and (entry.token is not None or entry.joins)
                if has_count and others:
                    # Another claim has joined this lock, and owns it from now on.
                    entry.counted, others[0].counted = False, True
                if not has_count or others:
                    self._forget(entry)
                    return False
            entry.freeing = True
            return True

    def _freed(self, entry: Entry, row: Row | None) -> None:
        if row is None and entry.session is not None:
            # The statement was cancelled, for example by an administrator, before or
            # after it freed the key.
            self._ensure_released(entry, entry.session)
        with self._mutex:
            entry.freed = row is None or (row[0] is not None and bool(int(row[0])))
            self._forget(entry)

    def _ensure_released(self, entry: Entry, session: Session) -> None:
        """Free a key after its statement was cancelled.

        The engine may have granted the key before that, or may not have freed it.
        """
        try:
            answer = session.ask(
                "free shared" if entry.claim.shared else "free", entry.name
            )
        except LockBackendError as error:
            raise SessionDiedError(str(error)) from error
        if answer is None:
            raise SessionDiedError("its statement was cancelled twice")
