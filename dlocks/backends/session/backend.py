"""Session locks: ``pg_advisory_lock`` or, on MariaDB and MySQL, ``GET_LOCK``.

There is no row and no table. A lock belongs to a session of the server and ends with
it, so a process that dies frees its locks at once.

Each process has one private connection for all keys that were free when they were
acquired. One ping covers all of them. Waiters queue in the engine, each key in a thread
with a session of its own, which then carries the hold. Their number is limited. A
waiter without a session waits for the next one, and its key is tried a few times a
second meanwhile. A waiter whose caller holds other keys has a session of its own too,
and may be granted the key before other waiters of its process.

The engine does not know keys, only numbers or short names. They are 64 bits of the
SHA-256 of the key on PostgreSQL, and 192 bits of the SHA-256 of the database's name and
the key elsewhere. Two keys with equal bits would exclude each other.

Tokens are the microseconds of the server's clock after the grant. They grow only if
that clock does not step back between two holds of a key (``supports_fencing`` is
False).
"""

from __future__ import annotations

import atexit
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy

from dlocks.backends.base import Backend
from dlocks.backends.database.session import Session as CallerSession
from dlocks.backends.local_claims import refusal_of
from dlocks.backends.notifiers import Notifier
from dlocks.backends.session.claims import Claims, Entry
from dlocks.backends.session.inspector import SessionInspector
from dlocks.backends.session.queue import EngineQueue
from dlocks.backends.session.session import Session, SessionDiedError, side_by_side
from dlocks.backends.session.sessions import Sessions
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.process import each_in_child
from dlocks.values import Claim, Grant, Holder, Ticket, seconds

logger = logging.getLogger("dlocks")


class SessionBackend(Backend):
    """A backend that uses the session locks of a database server.

    ``database`` is an alias of DATABASES. A connection without a reply is trusted for
    ``ttl`` seconds. After the same time without a statement, the server ends it.

    Connections are checked every ``ping`` seconds. This process has at most ``waiting``
    connections for keys with waiters. A connection without claims is closed after
    ``linger`` seconds. ``session_pooling`` states that a pooler in between keeps
    sessions. Every other pooler is refused. ``deadlock_after`` is that of
    ``DatabaseBackend``.
    """

    supports_queue: ClassVar[bool] = True
    grants_in_queue: ClassVar[bool] = False
    waits_in_statement: ClassVar[bool] = True
    supports_fencing: ClassVar[bool] = False
    inspector: SessionInspector
    unlisted = gettext_lazy(
        "The database knows only digests of the keys. Call holder() of a lock instead."
    )

    def __init__(
        self,
        alias: str,
        *,
        database: str = "default",
        ping: float = 0.5,
        waiting: int = 8,
        linger: float = 1.0,
        session_pooling: bool = False,
        deadlock_after: float | None = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        if not isinstance(database, str):
            raise TypeError(f"database must be an alias of DATABASES, not {database!r}")
        if isinstance(waiting, bool) or not isinstance(waiting, int) or waiting < 0:
            raise ValueError(
                f"waiting must be a number of connections, 0 or more, not {waiting!r}"
            )
        if not isinstance(session_pooling, bool):
            raise TypeError(
                f"session_pooling must be True or False, not {session_pooling!r}"
            )
        self.database = database
        # For locks of the caller's transaction.
        self.caller = CallerSession(database)
        self.renew_every = seconds("ping", ping, above_zero=True)
        self.linger = seconds("linger", linger)
        self._places, self._pooled = waiting, session_pooling
        if deadlock_after is not None:
            self.deadlock_after = seconds("deadlock_after", deadlock_after)
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        self.claims = Claims(self._maintain)
        self.contended = self.claims.contended
        self.sessions = Sessions(self, self.claims, pooled=self._pooled)
        self.inspector = SessionInspector(self, self.claims, self.sessions)
        self.queue = EngineQueue(
            self.claims, self.sessions, self._places, self.inspector.comment_of
        )

    @property
    def supports_sharing(self) -> bool:  # type: ignore[override]
        return self.sessions.kind.shares

    supports_transactions = supports_sharing

    @property
    def identity(self) -> str:
        return f"sessions of database {self.database}"

    # The backend interface.

    def acquire(self, claim: Claim) -> Grant | None:
        if claim.scope == "transaction":
            return self._acquire_in_transaction(claim)
        entry = self.claims.entries.get(claim.owner)
        if entry is not None:
            return self._acquire_again(entry)
        sessions = self.sessions
        token = sessions.run(
            lambda session: sessions.attempt(sessions.entry(claim), session), claim
        )
        if token is None:
            self.claims.contended.add(claim.key)
            return None
        return Grant(token)

    def _acquire_again(self, entry: Entry) -> Grant | None:
        claim, session = entry.claim, entry.session
        if entry.token is None or session is None:
            return None
        if session.stood_at + claim.ttl * 2 / 3 < clock.now():
            # The wait was long. After a pause, a process may read a grant although the
            # server has since ended the session as idle.
            self.sessions.ping(session)
        with self.claims.mutex:
            now = clock.now()
            if not (entry.gone or entry.leaving) and entry.ends_at > now:
                return Grant(entry.token, self.claims.extend(entry, session) - now)
        # Its grant was not collected in time, so it is requested again.
        self.queue.release(entry)
        return self.acquire(claim)

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        sent = clock.now()
        held = [
            (claim, *found)
            for claim in claims
            if (found := self.claims.held(claim.owner))
        ]
        side_by_side(
            partial(self._renew, session, held)
            for session in {session for *_, session in held}
            if not session.is_silent
        )
        left = {}
        with self.claims.mutex:
            for claim, entry, session in held:
                # That of a silent session counts as not renewed. For a lost one, the
                # keeper would ask who has the key, and wait for the answer.
                is_over = entry.ends_at <= sent and not session.is_asking
                # A key that was released meanwhile must not rest for longer.
                if entry.gone or entry.resting or entry.expired or is_over:
                    continue
                sure_for = self.claims.extend(entry, session) - sent
                left[claim.owner] = min(max(0.0, sure_for), claim.ttl)
                self.claims.maintain_from(entry.ends_at)
        return left

    def _renew(
        self, session: Session, held: Sequence[tuple[Claim, Entry, Session]]
    ) -> None:
        for claim, entry, its in held:
            if its is session and entry.claim.ttl != claim.ttl:
                self._set_ttl(claim, entry, session)
        # A request that is under way is as good as a ping.
        if not session.is_asking:
            self.sessions.ping(session)

    def _set_ttl(self, claim: Claim, entry: Entry, session: Session) -> None:
        """Give a held claim another ttl."""
        try:
            with session.mutex:
                self.sessions.allow_idle(session, claim.ttl)
                with self.claims.mutex:
                    entry.claim = replace(entry.claim, ttl=claim.ttl)
                    entry.ends_at = min(entry.ends_at, clock.now() + claim.ttl)
                self.sessions.limit_idle(session)
        except SessionDiedError as error:
            self.sessions.close(session, error)
        except LockBackendError as error:
            # The next renewal tries again.
            logger.warning("%s", error)

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        claim = claims[0]
        if claim.scope == "transaction":
            rows = self._ask_caller("check in transaction", claim)
            return count is not None and bool(rows)
        if count is None or (held := self.claims.held(claim.owner)) is None:
            return False
        entry, session = held
        entry.count = count
        return self.sessions.is_alive(session)

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        if claim.scope == "transaction":
            # The lock ends with the transaction.
            return True
        with self.claims.mutex:
            entry = self.claims.entries.get(claim.owner)
            if entry is None:
                return False
            if rest_for and entry.token is not None and not entry.expired:
                self.claims.rest(entry, rest_for)
            else:
                # From here on, no other thread may request the key for it.
                entry.leaving = True
        self._wait_without(claim)
        if entry.resting:
            # Its session may have ended, and another caller may have had the key since.
            # Or the time is over, and the key was released as usual.
            session = entry.session
            is_kept = session is not None and self.sessions.is_alive(session)
            return is_kept or entry.was_held
        return self.queue.release(entry) and not entry.expired

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        if claim.scope != "lease" or claim.beside or not self.queue.places:
            return None
        return self.queue.join(claim)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        return self.queue.poll(claims)

    def notifier(self, channel: str) -> Notifier:
        return self.queue.notifier

    @staticmethod
    def held(owner: str) -> tuple[Entry, Session] | None:
        """Return a hold of this process, perhaps of another alias of the database."""
        found = (one.claims.held(owner) for one in list(_backends))
        return next(filter(None, found), None)

    @staticmethod
    def _wait_without(claim: Claim) -> None:
        for one in list(_backends):
            one.queue.wait_without(claim)

    def waiting(self, key: str) -> int:
        return self.inspector.waiting(key)

    def holder(self, key: str) -> Holder | None:
        return next(iter(self.inspector.holders(key)), None)

    def refusal(self, claim: Claim) -> str | None:
        why = super().refusal(claim) or refusal_of(self, claim)
        if why is None and claim.shared and claim.scope == "transaction":
            why = "A shared lock does not support scope='transaction'."
        return why

    def check(self) -> list[Any]:
        try:
            bool(self.sessions.kind)
        except ImproperlyConfigured as error:
            return [
                checks.Error(
                    f"DLOCKS[{self.alias!r}]: {error}",
                    hint="Choose another BACKEND, or another database.",
                    id="dlocks.E004",
                )
            ]
        return []

    def try_session(self) -> None:
        """Raise ImproperlyConfigured if the database has no reliable sessions."""
        session = self.sessions.new()
        session.connect()
        session.end()

    # Locks of the caller's transaction, on PostgreSQL.

    def in_transaction(self) -> bool:
        return self.sessions.kind.shares and self.caller.in_transaction

    def _acquire_in_transaction(self, claim: Claim) -> Grant | None:
        ((token,),) = self._ask_caller("try in transaction", claim)
        if token == -1:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs above"
                f" READ COMMITTED on database {self.database!r}. Its snapshot may be"
                " older than the lock and hide the last holder's changes. Acquire the"
                " lock before the transaction begins, or run it at READ COMMITTED."
            )
        return None if token is None else Grant(token)

    def _ask_caller(self, statement: str, claim: Claim) -> Sequence[Any]:
        sql = self.sessions.kind.statements[statement]
        value = {"value": self.sessions.name(claim.key)}
        # As it is. Composing a text asks for the tables, which need not exist here.
        return self.caller.unlocked(self.caller.execute, sql, value).rows

    # The maintenance thread.

    def _maintain(self) -> float | None:
        """Do the work that is due, and return the seconds until the next pass.

        Return None if no session is open.
        """
        claims = self.claims
        with claims.mutex:
            if not (sessions := self.sessions.all()):
                claims.maintainer.end()
                return None
            now, entries = clock.now(), claims.all()
            claims.maintains_at = min(
                [
                    # A release need not wake this thread.
                    now + max(self.linger, 0.05) / 2,
                    *map(self._ends_at, entries),
                    *map(self._ping_at, sessions),
                ]
            )
            for entry in list(one for one in entries if self._ends_at(one) <= now):
                entry.expired = True
            over = list(one for one in entries if self._is_over(one))
            quiet = list(one for one in sessions if self._ping_at(one) <= now)
        side_by_side(
            [
                *(partial(self._end, entry) for entry in over),
                *(partial(self.sessions.ping, session) for session in quiet),
            ]
        )
        for session in sessions:
            self.sessions.close_if_idle(session, self.linger)
        return claims.maintains_at - clock.now()

    def _ends_at(self, entry: Entry) -> float:
        if entry.waiting or entry.expired or entry.gone:
            return math.inf
        return entry.ends_at + (0 if entry.resting else self.grace)

    @staticmethod
    def _is_over(entry: Entry) -> bool:
        """Return whether to end a claim that has expired, or is being released.

        Its release may have been interrupted. A silent session must not keep this
        thread from the others.
        """
        session = entry.session
        waits = session is not None and (
            session.is_silent or (entry.waiting and session.is_asking)
        )
        return (entry.expired or entry.leaving) and not entry.gone and not waits

    def _ping_at(self, session: Session) -> float:
        """Return when to ping a session whose holds are not renewed."""
        carries = any(not entry.waiting for at in session.at.values() for entry in at)
        every = 1.2 * self.renew_every
        is_due = carries and not session.is_asking
        return session.stood_at + every if is_due else math.inf

    def _end(self, entry: Entry) -> None:
        self._wait_without(entry.claim)
        session = entry.session
        try:
            self.queue.release(entry)
        except LockBackendError as error:
            if session is not None and entry.expired:
                self.sessions.close(session, error, of=entry)

    # Forks.

    def _forked(self) -> None:
        # A thread of the parent may have been closing one, whose mutex stays locked.
        _inherited.extend(self.sessions.all())
        self._reset()


_backends = each_in_child(SessionBackend._forked)
# The parent's sessions, which must not be collected.
_inherited: list[Any] = []


def _at_exit() -> None:
    # Sessions with holds stay open until the keeper has released these holds.
    for backend in list(_backends):
        backend.linger = 0.0
        for session in backend.sessions.all():
            backend.sessions.close_if_idle(session, 0.0)


atexit.register(_at_exit)
