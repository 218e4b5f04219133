"""The sessions of one process."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

# functools has a mutex in Python 3.11, which a forked child could find locked.
from django.utils.functional import cached_property

from dlocks.backends.base import Backend
from dlocks.backends.session.claims import Claims, Entry
from dlocks.backends.session.mysql import MySQLSession
from dlocks.backends.session.postgresql import PostgreSQLSession
from dlocks.backends.session.session import (
    LONGEST_SLICE,
    SHORTEST_SLICE,
    Row,
    Session,
    SessionDiedError,
)
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim, Waiter

T = TypeVar("T")

logger = logging.getLogger("dlocks")

SESSIONS = {"postgresql": PostgreSQLSession, "mysql": MySQLSession}


class ServerSession(NamedTuple):
    """A session that holds a key or waits for it, as the server shows it.

    ``who`` and ``host`` are for people. ``waited`` is in seconds.
    """

    granted: bool
    who: str
    host: str | None
    number: int
    waited: float

    def as_waiter(self, key: str, prefix: str) -> Waiter:
        return Waiter(
            holder=self.who,
            owner_ip=self.host,
            waits_for=key.removeprefix(prefix),
            waited=max(0.0, self.waited),
        )


class Sessions:
    """The sessions of one process: the main one, which never waits, and the others.

    A session for a waiter then carries its hold.
    """

    def __init__(self, backend: Backend, claims: Claims, *, pooled: bool) -> None:
        self._backend = backend
        self._claims = claims
        self._pooled = pooled
        # The mutex of the claims guards them.
        self.main: Session | None = None
        self.for_waiters: set[Session] = set()

    @cached_property
    def kind(self) -> type[Session]:
        database = self._backend.database
        vendor = connections[database].vendor
        if vendor not in SESSIONS:
            raise ImproperlyConfigured(
                "Session locks need PostgreSQL, MariaDB or MySQL, but database"
                f" {database!r} is {vendor}. Use"
                " dlocks.backends.database.PessimisticBackend."
            )
        return SESSIONS[vendor]

    def name(self, key: str) -> str | int:
        """Return the name of a key on the server."""
        if self.kind.shares:
            digest = hashlib.sha256(key.encode()).digest()
            return int.from_bytes(digest[:8], "big", signed=True)
        # The names of GET_LOCK are case-insensitive, and shared by all databases of a
        # server.
        database = connections[self._backend.database].settings_dict["NAME"]
        text = f"{database}\0{key}"
        return "dlocks:" + hashlib.sha256(text.encode()).hexdigest()[:48]

    def entry(self, claim: Claim) -> Entry:
        return Entry(claim, name=self.name(claim.key))

    def all(self) -> list[Session]:
        return [*([self.main] if self.main else []), *self.for_waiters]

    def new(self) -> Session:
        idle = self._backend.ttl + self._backend.grace
        return self.kind(self._backend.database, idle, pooled=self._pooled)

    # Requests.

    def session_for(self, claim: Claim | None = None) -> Session:
        """Return the session on which to try a claim: the main one, if possible."""
        entries = self._claims.entries
        beside = entries.get(claim.beside) if claim and claim.beside else None
        if beside is not None and beside.session is not None:
            return beside.session
        with self._claims.mutex:
            if self.main is None:
                self.main = self.new()
            main = self.main
        self._claims.start_maintenance()
        return main

    def run(self, request: Callable[[Session], T], claim: Claim | None = None) -> T:
        """Call a function with a session, and once more if that has ended."""
        for reconnected in (False, True):
            session = self.session_for(claim)
            try:
                return request(session)
            except SessionDiedError as error:
                self.close(session, error)
                if reconnected:
                    raise LockBackendError(
                        f"A lock request to database {self._backend.database!r} failed:"
                        f" {error}"
                    ) from error
        raise AssertionError("unreachable")

    def ask(self, statement: str, value: object) -> Row | None:
        return self.run(lambda main: main.ask(statement, value))

    def of_name(self, name: str | int) -> list[ServerSession]:
        """Return the sessions of all processes that hold a name or wait for it."""
        (text,) = self.ask("sessions", name) or ("",)
        return [
            ServerSession(granted, who, host, number, float(waited or 0))
            for granted, who, host, number, waited in json.loads(text or "[]")
        ]

    def is_alive(self, session: Session) -> bool:
        """Return whether the server still has a session, and close it if not."""
        try:
            session.ping()
        except SessionDiedError as error:
            self.close(session, error)
            return False
        return True

    def ping(self, session: Session) -> None:
        try:
            self.is_alive(session)
        except LockBackendError as error:
            logger.warning("%s", error)

    # The requests of claims. A claim is marked before its request is sent. If that is
    # interrupted, the maintenance thread releases what the server may have granted.

    def attempt(self, entry: Entry, session: Session) -> int | None:
        """Request the key on this session, and return its token, or None.

        The claim is a new one, or the first waiter of its key.
        """
        with self._claims.mutex:
            session.refuse_if_dead()
            if not self._claims.admits(entry, session):
                return None
            self._claims.entries[entry.claim.owner] = entry
            self._claims.assign(entry, session)
        try:
            if self.send("try", entry, session):
                raise LockBackendError(
                    f"A lock request to database {self._backend.database!r} was"
                    " cancelled."
                )
        finally:
            with self._claims.mutex:
                self._settle(entry, session)
        if entry.token is None and not entry.leaving:
            # Another thread may have noticed its end. Then the key may be free.
            session.refuse_if_dead()
        return entry.token

    def _settle(self, entry: Entry, session: Session) -> None:
        """Record that a claim was not granted; the caller holds the mutex."""
        if entry.token is not None or entry.session is not session:
            return
        is_doubted = entry.lock in session.doubted and not session.dead
        if is_doubted and not self._claims.is_shared(entry, session):
            entry.leaving = True
        elif entry.waiting and not entry.leaving:
            self._claims.unassign(entry)
        else:
            self._claims.forget(entry)

    def send(
        self, statement: str, entry: Entry, session: Session, comment: str = ""
    ) -> bool:
        """Send the statement that tries or waits for the key, and record a grant.

        Return whether the server has cancelled it.
        """
        claim, waits = entry.claim, statement == "wait"
        with session.mutex:
            self.allow_idle(session, claim.ttl)
            with self._claims.mutex:
                # A caller that cancels the claim marks it before it uses the session.
                if entry.leaving or entry.session is not session:
                    return False
                at = session.at.get(entry.name, ())
                is_beside = claim.beside in [one.claim.owner for one in at]
            waited = max(0.0, time.time() - entry.since)
            session.slice = min(SHORTEST_SLICE + waited / 8, LONGEST_SLICE)
            is_shared = self._claims.is_shared(entry, session)
            if is_beside:
                # The session's exclusive lock lets it pass all waiters. Before version
                # 17, PostgreSQL refuses a try if there is one.
                statement = "wait shared"
                if is_shared:
                    # The server counts a second lock.
                    session.doubted.add(entry.lock)
            elif claim.shared:
                # A release that was interrupted may have freed a doubted lock.
                joins = is_shared and entry.lock not in session.doubted
                statement += " shared again" if joins else " shared"
            was_doubted = entry.lock in session.doubted
            session.doubted.add(entry.lock)
            try:
                row = session.ask(statement, entry.name, comment)
            except (LockBackendError, ImproperlyConfigured):
                if not was_doubted:
                    session.doubted.discard(entry.lock)
                raise
            if row is not None and row[0]:
                with self._claims.mutex:
                    # Otherwise the session was closed, and its locks are gone.
                    if entry.session is session:
                        self._claims.granted(entry, int(row[0]))
            if row is None or (waits and row[0] is None):
                # The engine may have granted the lock before.
                self._free(entry, session)
                if not is_shared:
                    session.doubted.discard(entry.lock)
                return True
            if not was_doubted:
                session.doubted.discard(entry.lock)
            return False

    def release(self, entry: Entry) -> None:
        """Release the key of a claim. Another thread may do so at the same time."""
        with self._claims.mutex:
            if (session := self._claims.session_of(entry)) is None:
                self._claims.forget(entry)
                return
        try:
            with session.mutex:
                is_here = self._claims.session_of(entry) is session
                if is_here:
                    entry.was_held = self._free(entry, session)
                with self._claims.mutex:
                    self._claims.forget(entry)
                if is_here and not self._claims.is_shared(entry, session):
                    session.doubted.discard(entry.lock)
                self.limit_idle(session)
        except SessionDiedError as error:
            self.close(session, error)

    # The caller of the next two methods has the turn to send requests.

    def allow_idle(self, session: Session, ttl: float) -> None:
        """Ensure that the server does not end a session before this ttl has passed."""
        if session.idle < (needed := ttl + self._backend.grace):
            session.set_idle(needed)

    def limit_idle(self, session: Session) -> None:
        """Let the server end a session as soon as its claims allow."""
        usual, grace = self._backend.ttl, self._backend.grace
        if session.idle <= usual + grace:
            return
        with self._claims.mutex:
            ttls = [one.claim.ttl for at in session.at.values() for one in at]
        if session.idle <= (needed := max([usual, *ttls]) + grace):
            return
        # What the caller has done is done, whether this succeeds or not.
        with suppress(LockBackendError):
            session.set_idle(needed)

    def _free(self, entry: Entry, session: Session) -> bool:
        """Release the lock of a claim, and return whether the session had it."""
        if entry.token is None and entry.lock not in session.doubted:
            return False
        # The last claim that shares it releases it.
        return self._claims.is_shared(entry, session) or session.free(entry.lock)

    # The end of a session.

    def close(
        self,
        session: Session,
        error: BaseException | None = None,
        *,
        of: Entry | None = None,
    ) -> None:
        """End a session. Its holds are lost, and its waiters need another one.

        With ``of``, do so only if this claim still has the session. Another thread may
        have released it, and the session may carry other claims since.
        """
        with self._claims.mutex:
            if of is not None and of.session is not session:
                return
            self._drop(session)
            entries = [entry for at in session.at.values() for entry in at]
            for entry in entries:
                if entry.waiting and not entry.leaving:
                    self._claims.unassign(entry)
                else:
                    self._claims.forget(entry)
        held = [entry for entry in entries if entry.token is not None]
        if error is not None and held:
            logger.warning(
                "A session on database %r with %d locks was lost: %s",
                self._backend.database,
                len(held),
                error,
            )
        session.end()
        lost = [entry.claim.owner for entry in held if not entry.leaving]
        if lost:
            # Holds that are not renewed would not notice the loss.
            why = "the database session that held it has ended"
            self._backend.runtime.on_lost(lost, why)

    def close_if_idle(self, session: Session, linger: float) -> None:
        """Close a session without claims that was not used for ``linger`` seconds."""
        with self._claims.mutex:
            idle_at = session.stood_at + linger
            # A new one has no connection yet. A request on it is about to begin.
            is_used = session.at or session.is_asking or session.is_new
            if is_used or clock.now() < idle_at:
                return
            self._drop(session)
        session.end()

    def _drop(self, session: Session) -> None:
        """Use a session no more; the caller holds the mutex."""
        session.dead = True
        if session is self.main:
            self.main = None
        self.for_waiters.discard(session)
