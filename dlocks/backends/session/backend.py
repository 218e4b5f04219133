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
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy

from dlocks.backends.database.session import Session as CallerSession
from dlocks.backends.session.queue import EngineQueue
from dlocks.backends.session.sessions import Entry, Session, SessionDiedError
from dlocks.backends.session.waiting_claims import SessionInspector
from dlocks.runtime import clock
from dlocks.runtime.process import each_in_child
from dlocks.sql.clock import TICKS
from dlocks.values import Claim, Grant, Holder, seconds


class SessionBackend(EngineQueue):
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
        self.places = waiting
        self.session_pooling = session_pooling
        self.inspector = SessionInspector(self)
        if deadlock_after is not None:
            self.deadlock_after = seconds("deadlock_after", deadlock_after)
        self._reset()
        _backends.add(self)

    @property
    def supports_sharing(self) -> bool:  # type: ignore[override]
        return self._kind.shares

    supports_transactions = supports_sharing

    @property
    def identity(self) -> str:
        return f"sessions of database {self.database}"

    # The backend interface.

    def acquire(self, claim: Claim) -> Grant | None:
        if claim.scope == "transaction":
            return self._acquire_in_transaction(claim)
        entry = self._entries.get(claim.owner)
        if entry is not None:
            return self._acquire_again(entry)
        grant = self._on_session(partial(self._try_new, claim), claim)
        if grant is None:
            self.contended.add(claim.key)
        return grant

    def _try_new(self, claim: Claim, session: Session) -> Grant | None:
        entry = Entry(claim, name=self._name(claim.key))
        return Grant(entry.token or 0) if self._try(entry, session) else None

    def _acquire_again(self, entry: Entry) -> Grant | None:
        claim, session = entry.claim, entry.session
        if entry.token is None or session is None:
            return None
        if session.stood_at + claim.ttl * 2 / 3 < clock.now():
            # The wait was long. After a pause, a process may read a grant although the
            # server has since ended the session as idle.
            self._ping(session)
        with self._mutex:
            now = clock.now()
            if not (entry.gone or entry.leaving) and entry.ends_at > now:
                return Grant(entry.token, self._extend(entry, session) - now)
        # Its grant was not collected in time, so it is requested again.
        self._release_entry(entry)
        return self.acquire(claim)

    def _held(self, claim: Claim) -> tuple[Entry, Session] | None:
        entry = self._entries.get(claim.owner)
        if entry is None or entry.token is None or entry.session is None:
            return None
        return entry, entry.session

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        sent = clock.now()
        held = [found for claim in claims if (found := self._held(claim))]
        for claim in claims:
            self._set_ttl(claim)
        for session in {session for _, session in held}:
            self._ping(session)
        left = {}
        with self._mutex:
            for entry, session in held:
                if entry.gone or entry.expired or entry.ends_at <= sent:
                    continue
                sure_for = self._extend(entry, session) - sent
                left[entry.claim.owner] = min(max(0.0, sure_for), entry.claim.ttl)
                self._maintain_from(entry.ends_at)
        return left

    def _set_ttl(self, claim: Claim) -> None:
        """Give a held claim another ttl, if it has one."""
        if (held := self._held(claim)) is None or held[0].claim.ttl == claim.ttl:
            return
        entry, session = held
        try:
            with session.mutex:
                session.allow_idle(claim.ttl + self.grace)
        except SessionDiedError as error:
            self._close_session(session, error)
        with self._mutex:
            entry.claim = replace(entry.claim, ttl=claim.ttl)
            entry.ends_at = min(entry.ends_at, clock.now() + claim.ttl)

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        claim = claims[0]
        if claim.scope == "transaction":
            return count is not None and self._is_held_by_transaction(claim)
        if count is None or (held := self._held(claim)) is None:
            return False
        entry, session = held
        try:
            session.ping()
        except SessionDiedError as error:
            self._close_session(session, error)
            return False
        entry.count = count
        return True

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if claim.scope == "transaction":
            # The lock ends with the transaction.
            return True
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                return False
            if keep and entry.token is not None and not entry.expired:
                self._keep(entry, keep)
            else:
                # From here on, no other thread may request the key for it.
                entry.leaving = True
            waits = entry.waiting
        self._wait_without(claim)
        if entry.kept:
            return True
        if waits:
            self._cancel(entry)
            return False
        return self._release_entry(entry) and not entry.expired

    def holder(self, key: str) -> Holder | None:
        name = self._name(key)
        with self._mutex:
            for entry in self._entries.values():
                if entry.name != name or entry.token is None:
                    continue
                return self._own_holder(entry)
        if not (row := self._ask_main("holder", name)):
            return None
        return self._holder_of(key, *row)

    def _holder_of(self, key: str, *session: Any) -> Holder:
        """Return the holder with a session of another process."""
        who, host = self._shown_session(*session)
        return Holder(
            key=key,
            holder=who,
            owner_ip=host,
            since=None,
            remaining=math.inf,
            token=0,
            count=1,
            stale=False,
        )

    def _shown_session(
        self, who: str, host: str | None, number: int
    ) -> tuple[str, str | None]:
        """Return the name and the address of a session of another process."""
        if self._kind.shares:
            return f"{who or 'a session'} (session {number})", host
        if host and host.count(":") == 1:
            # MariaDB includes the port.
            host = host.rpartition(":")[0]
        return who, host

    def refusal(self, claim: Claim) -> str | None:
        why = super().refusal(claim)
        if why is None and claim.shared and claim.scope == "transaction":
            why = "A shared lock does not support scope='transaction'."
        return why

    def check(self) -> list[Any]:
        try:
            bool(self._kind)
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
        session = self._new_session()
        session.connect()
        session.end()

    # Locks of the caller's transaction, on PostgreSQL.

    def in_transaction(self) -> bool:
        return self._kind.shares and self.caller.in_transaction

    def _acquire_in_transaction(self, claim: Claim) -> Grant | None:
        sql = (
            "SELECT CASE WHEN current_setting('transaction_isolation') NOT LIKE 'read"
            " %%committed' THEN -1 WHEN pg_try_advisory_xact_lock(%(name)s) THEN"
            f" {TICKS['postgresql']} END"
        )
        ((token,),) = self.caller.rows(sql, {"name": self._name(claim.key)})
        if token == -1:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs above"
                f" READ COMMITTED on database {self.database!r}. Its snapshot may be"
                " older than the lock and hide the last holder's changes. Acquire the"
                " lock before the transaction begins, or run it at READ COMMITTED."
            )
        return None if token is None else Grant(token)

    def _is_held_by_transaction(self, claim: Claim) -> bool:
        sql = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND"
            " granted AND pid = pg_backend_pid() AND (classid::bigint << 32 |"
            " objid::bigint) = %(name)s"
        )
        return bool(self.caller.rows(sql, {"name": self._name(claim.key)}))

    # Forks.

    def _forked(self) -> None:
        # A thread of the parent may have been closing one, whose mutex stays locked.
        _inherited.extend(self._sessions())
        self._reset()


_backends = each_in_child(SessionBackend._forked)
# The parent's sessions, which must not be collected.
_inherited: list[Any] = []


def _at_exit() -> None:
    # Sessions with holds stay open until the keeper has released these holds.
    for backend in list(_backends):
        backend.linger = 0.0
        for session in backend._sessions():
            backend._close_if_idle(session)


atexit.register(_at_exit)
