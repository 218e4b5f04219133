"""Session locks: ``pg_advisory_lock`` or, on MariaDB and MySQL, ``GET_LOCK``.

There is no row and no table. A lock belongs to a session of the server and ends with
it, so a process that dies frees its locks at once.

Each process has one private connection for all keys that were free when they were
acquired. One ping covers all of them. Waiters queue in the engine. This requires one
session for each key with waiters. That session then carries the hold as well, since a
session cannot transfer a lock to another. The number of these sessions is limited. A
waiter without one waits for the next free session, and its key is tried a few times a
second meanwhile.

The engine does not know keys, only numbers or short names. They are 64 bits of the
SHA-256 of the prefix and the key on PostgreSQL, and 192 bits of the SHA-256 of the
database's name and the key elsewhere. Two keys with equal bits would exclude each
other. This could not be noticed, but it is harmless, as it never admits two holders.

Tokens are the microseconds of the server's clock after the grant. They grow only if
that clock does not step back between two holds of a key, since they are not stored
(``supports_fencing`` is False).
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, ClassVar

from dlocks.backends.base import Backend, refusal_without_rows
from dlocks.backends.database.driver import Statements
from dlocks.backends.notifiers import Notifier, OwnThreadNotifier, RecentKeys
from dlocks.backends.session.checks import check_session
from dlocks.backends.session.connect import connect, engine_session_class
from dlocks.backends.session.engine_sessions import EngineSession, Row, SessionDiedError
from dlocks.backends.session.sessions import REPLY_TIMEOUT, Entry, Session
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.process import in_child
from dlocks.values import Claim, Grant, Holder, Message, Ticket, seconds

logger = logging.getLogger("dlocks")

# Seconds for which one renewal waits for the replies to its pings. Other backends have
# to be renewed as well.
PING_TIMEOUT = 0.25
CANCEL_TIMEOUT = 5.0
# Seconds between two attempts to acquire a key whose waiter has no session.
POLL_EVERY = 0.1
# Number of keys that one poll tries to acquire.
CLAIMS_PER_TRY = 32
# Seconds for which no session is opened for waiters after a failure.
REFUSED_FOR = 1.0
# Seconds for which a thread waits for the reply of a session before it checks for other
# work.
WAITERS_PER_WAIT = 0.5
# Seconds. After a shorter wait, the engine's queue was empty.
CLAIMS_PER_STATEMENT = 0.001
# These selectors notice a socket that is registered while they wait. Any other one, for
# example on Windows, waits for ``WAIT_UNNOTICED`` seconds at a time.
NOTICING = tuple(
    getattr(selectors, name)
    for name in ("EpollSelector", "KqueueSelector")
    if hasattr(selectors, name)
)
WAIT_UNNOTICED = 0.05


class SessionBackend(Statements, Backend):
    """A backend that uses the session locks of a database server.

    ``database`` is an alias of DATABASES.

    ``ttl`` is the number of seconds for which a connection without a reply is trusted.
    The server ends the session after the same time without a statement. A process that
    is stopped, or whose host has vanished, blocks others for no longer.

    ``ping`` is the number of seconds between two checks of the connections. ``waiting``
    is the largest number of connections of this process for keys with waiters. A
    connection without claims is closed after ``linger`` seconds. ``session_pooling``
    states that a pooler in between keeps sessions. Every other pooler is refused.
    """

    supports_queue: ClassVar[bool] = True
    grants_in_queue: ClassVar[bool] = False
    supports_fencing: ClassVar[bool] = False

    def __init__(
        self,
        alias: str,
        *,
        database: str = "default",
        ping: float = 0.5,
        waiting: int = 8,
        linger: float = 1.0,
        session_pooling: bool = False,
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
        self.renew_every = seconds("ping", ping, above_zero=True)
        self.linger = seconds("linger", linger)
        self.places = waiting
        self.session_pooling = session_pooling
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        # Guards all of these attributes and the claims of each session. It is never
        # held during a request. Code enters this mutex instead of the condition: it is
        # implemented in C, so a signal cannot leave it locked.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._entries: dict[str, Entry] = {}
        self._kept: list[Entry] = []
        # The session that never waits, the sessions for waiters, and those of them
        # without a claim.
        self._main: Session | None = None
        self._queueing: set[Session] = set()
        self._free: list[Session] = []
        # By name, the claims without a session to wait on, and the one claim that has a
        # session.
        self._line: dict[str | int, deque[Entry]] = {}
        self._foremost: dict[str | int, Entry] = {}
        self.contended: RecentKeys = RecentKeys()
        self._polled_at = 0.0
        self._refused_at = -REFUSED_FOR
        self._opening = threading.Lock()
        self._reserved = 0
        self._selector: selectors.BaseSelector | None = None
        self._tender: threading.Thread | None = None
        self._tends_at = 0.0

    @property
    def supports_sharing(self) -> bool:  # type: ignore[override]
        return self._kind.shares

    @property
    def supports_transactions(self) -> bool:  # type: ignore[override]
        return self._kind.in_transactions

    @cached_property
    def _kind(self) -> type[EngineSession]:
        return engine_session_class(self.database)

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
        for reconnected in (False, True):
            session = self._session_beside(claim) or self._main_session()
            try:
                return self._try(Entry(claim, self._name(claim.key)), session)
            except SessionDiedError as error:
                # The session was idle, and the server has ended it meanwhile.
                self._close_session(session, error)
                if reconnected:
                    raise self._failed(error) from error
        raise AssertionError("unreachable")

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        entries = {claim.owner: self._entries.get(claim.owner) for claim in claims}
        sent = clock.now()
        self._ping(
            {entry.session for entry in entries.values() if entry and entry.session}
        )
        left: dict[str, float] = {}
        with self._mutex:
            for claim in claims:
                entry = self._entries.get(claim.owner)
                if (
                    entry is None
                    or entry.token is None
                    or entry.session is None
                    or entry.ends_at <= sent
                ):
                    continue
                sure_until = self._sure_until(entry, entry.session, claim.ttl)
                entry.ends_at = max(entry.ends_at, sure_until)
                left[claim.owner] = min(max(0.0, sure_until - sent), claim.ttl)
                self._tend_from(entry)
        return left

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        claim = claims[0]
        if claim.scope == "transaction":
            held = count is not None and self._rows(*self._held_by_transaction(claim))
            return bool(held)
        entry = self._entries.get(claim.owner)
        if count is None or entry is None or entry.token is None or not entry.session:
            return False
        try:
            self._ask_whether_it_stands(entry.session)
        except SessionDiedError as error:
            self._close_session(entry.session, error)
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
            # From here on, no other thread may assign it to a session.
            entry.leaving = not (keep and entry.token is not None)
            if entry.session is None:
                self._forget(entry)
                return False
            if keep and entry.token is not None:
                del self._entries[claim.owner]
                entry.kept, entry.ends_at = True, clock.now() + keep
                self._kept.append(entry)
                self._tend_from(entry)
                return True
        if entry.waiting:
            self._cancel(entry)
            return False
        # The maintenance thread releases an expired lease. The key may then already
        # have the next holder, so this call does not count as the release.
        return self._release_entry(entry) and entry.ends_at != -math.inf

    def holder(self, key: str) -> Holder | None:
        name = self._name(key)
        with self._mutex:
            for session in self._sessions():
                for entry in session.at.get(name, ()):
                    if entry.token is not None and not entry.kept:
                        return self._own_holder(entry)
        row = self._ask_main("holder", name)
        if not row:
            return None
        return Holder(
            key=key,
            holder=(
                f"{row[0] or 'a session'} (session {row[2]})"
                if self.connection.vendor == "postgresql"
                else row[0]
            ),
            owner_ip=self._address(row[1]),
            since=None,
            remaining=float("inf"),
            token=0,
            count=1,
            stale=False,
        )

    def _own_holder(self, entry: Entry) -> Holder:
        remaining = entry.ends_at - clock.now()
        return Holder(
            key=entry.claim.key,
            holder=entry.claim.holder,
            owner_ip=entry.claim.owner_ip,
            since=datetime.fromtimestamp(entry.since, UTC),
            remaining=remaining,
            token=entry.token or 0,
            count=entry.count,
            stale=remaining <= 0,
        )

    @staticmethod
    def _address(host: str | None) -> str | None:
        # MariaDB includes the port.
        return host.rpartition(":")[0] if host and host.count(":") == 1 else host

    def refusal(self, claim: Claim) -> str | None:
        if (why := super().refusal(claim)) is not None:
            return why
        if claim.shared and claim.scope == "transaction":
            return "A shared lock does not support scope='transaction'."
        return refusal_without_rows(self, claim)

    def check(self) -> list[Any]:
        return check_session(self.alias, self.database)

    def try_session(self) -> None:
        """Raise ImproperlyConfigured if the database has no reliable sessions."""
        self._open().wire.close()

    def disconnect(self) -> None:
        """Close all sessions of this process.

        This releases its holds and cancels its waiters.
        """
        with self._mutex:
            sessions = list(self._sessions())
        for session in sessions:
            self._close_session(session)
        with self._mutex:
            self._entries.clear()
            self._line.clear()

    # Locks in the caller's transaction.

    def in_transaction(self, connection: Any = None) -> bool:
        # Only on PostgreSQL can a lock be part of a transaction.
        return self._kind.in_transactions and super().in_transaction(connection)

    def _acquire_in_transaction(self, claim: Claim) -> Grant | None:
        ticks = self.dialect.ticks
        committed = (
            "current_setting('transaction_isolation') IN ('read committed', 'read"
            " uncommitted')"
        )
        sql = (
            f"SELECT CASE WHEN NOT {committed} THEN -1 WHEN"
            f" pg_try_advisory_xact_lock(%(name)s) THEN {ticks} END"
        )
        ((token,),) = self._rows(sql, {"name": self._name(claim.key)})
        if token == -1:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs above"
                f" READ COMMITTED on database {self.database!r}. Its snapshot may be"
                " older than the lock and hide the last holder's changes. Acquire the"
                " lock before the transaction begins, or run it at READ COMMITTED."
            )
        return None if token is None else Grant(token)

    def _held_by_transaction(self, claim: Claim) -> tuple[str, dict[str, Any]]:
        sql = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND"
            " granted AND pid = pg_backend_pid() AND (classid::bigint << 32 |"
            " objid::bigint) = %(name)s"
        )
        return sql, {"name": self._name(claim.key)}

    # Acquiring and releasing.

    def _name(self, key: str) -> str | int:
        if self._kind.shares:
            return int.from_bytes(
                hashlib.sha256(key.encode()).digest()[:8], "big", signed=True
            )
        # The names of GET_LOCK are case-insensitive, and shared by all databases of a
        # server.
        database = str(self.connection.settings_dict["NAME"])
        return (
            "dlocks:" + hashlib.sha256(f"{database}\0{key}".encode()).hexdigest()[:48]
        )

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
        self._tend_from(entry)

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
        if self._line:
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

    def _forget(self, entry: Entry) -> None:
        """Remove a claim from all tables; the caller holds the mutex."""
        if entry.gone:
            # Its owner and its session may belong to another claim by now.
            return
        entry.gone = True
        self._entries.pop(entry.claim.owner, None)
        if entry in self._kept:
            self._kept.remove(entry)
        if (line := self._line.get(entry.name)) is not None:
            with suppress(ValueError):
                line.remove(entry)
            if not line:
                del self._line[entry.name]
        if self._foremost.get(entry.name) is entry:
            del self._foremost[entry.name]
        if (session := entry.session) is not None:
            session.remove(entry)
            if (
                session in self._queueing
                and not session.at
                and not session.dead
                and session not in self._free
            ):
                self._free.append(session)

    def _allow_idle(self, session: Session, claim: Claim) -> None:
        """Ensure that the server does not end the session within the claim's ttl."""
        if session.wire.idle < (needed := claim.ttl + self.grace):
            with session.mutex:
                session.ask("idle", session.wire.idle_setting(needed))  # type: ignore[attr-defined]
                session.wire.idle = needed

    # Waiting in the engine's queue.

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        if claim.scope != "lease" or claim.beside or not self.places:
            return None
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                entry = Entry(claim, self._name(claim.key), waiting=True)
                self._entries[claim.owner] = entry
                self._line.setdefault(entry.name, deque()).append(entry)
        self._advance()
        session = entry.session
        if channel and not entry.watched:
            entry.watched = True
            if session is not None:
                self._watch(entry, session)
        return Ticket(
            must_retry=entry.token is not None,
            position=1,
            own_thread=session is not None,
        )

    def wait(self, claim: Claim, timeout: float) -> bool:
        """Wait in this thread; return False if the claim has lost its ticket."""
        entry = self._entries.get(claim.owner)
        session = entry.session if entry is not None else None
        if entry is None or session is None:
            return False
        try:
            session.settle(min(timeout, WAITERS_PER_WAIT))
        except SessionDiedError as error:
            self._close_session(session, error)
        if self._line:
            self._advance()
        return True

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        places = {}
        self._advance()
        self._poll()
        for claim in claims:
            entry = self._entries.get(claim.owner)
            if entry is not None and entry.waiting and entry.session is not None:
                self._settle(entry.session)
                entry = self._entries.get(claim.owner)
            if entry is None:
                continue
            if entry.token is not None:
                # The claim gets its lease when it is acquired again.
                places[claim.owner] = Ticket(grant=Grant(entry.token))
            else:
                polled = entry.session is None and entry.name not in self._foremost
                places[claim.owner] = Ticket(
                    position=1, next_check=POLL_EVERY if polled else float("inf")
                )
        return places

    def waiting(self, key: str) -> int:
        name = self._name(key)
        row = self._ask_main("waiting", name)
        return (int(row[0]) if row else 0) + len(self._line.get(name, ()))

    def notifier(self, channel: str) -> Notifier:
        return Grants(self) if channel else OwnThreadNotifier(self.wait)

    @property
    def selector(self) -> selectors.BaseSelector:
        """Return the selector that reports replies to waiting sessions."""
        with self._mutex:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
            return self._selector

    def answered(self, session: Session) -> Iterable[Message]:
        """Read the reply of a session in the engine's queue.

        Yield a message for each claim that was granted.
        """
        if not session.mutex.acquire(blocking=False):
            # Another thread reads the reply.
            time.sleep(0.001)
            return
        try:
            with self._mutex:
                owners = [
                    entry.claim.owner
                    for entries in session.at.values()
                    for entry in entries
                    if entry.waiting
                ]
            self._settle(session)
        finally:
            session.mutex.release()
        for owner in owners:
            entry = self._entries.get(owner)
            if entry is not None and entry.token is not None:
                yield Message(owner=owner)
        if self._line:
            self._advance()

    def _advance(self, *, connecting: bool = True) -> None:
        """Send the first local waiter of each key to the engine's queue.

        Each needs a free session. With ``connecting``, new ones are opened up to the
        limit.
        """
        while True:
            with self._mutex:
                name = next(
                    (name for name in self._line if name not in self._foremost), None
                )
                if name is None:
                    return
                session = self._free.pop() if self._free else None
                if session is None:
                    full = len(self._queueing) + self._reserved >= self.places
                    if (
                        full
                        or not connecting
                        or clock.now() < self._refused_at + REFUSED_FOR
                    ):
                        return
                    self._reserved += 1
                entry = self._line[name].popleft()
                if not self._line[name]:
                    del self._line[name]
                self._foremost[name] = entry
            if session is None:
                try:
                    session = self._open()
                except BaseException as error:
                    with self._mutex:
                        self._refused_at = clock.now()
                        self._reserved -= 1
                        self._requeue_behind(entry)
                    if isinstance(error, LockBackendError):
                        logger.warning("%s", error)
                        return
                    raise
                with self._mutex:
                    self._queueing.add(session)
                    self._reserved -= 1
                    self._tend_from(None)
            self._send(entry, session)

    def _send(self, entry: Entry, session: Session) -> None:
        try:
            with session.mutex:
                self._allow_idle(session, entry.claim)
                with self._mutex:
                    if entry.gone:
                        self._free.append(session)
                        return
                    session.add(entry)
                entry.asked_at = clock.now()
                if session.is_asked:
                    # A ping is under way.
                    session.settle_in_time()
                session.start(
                    "wait shared" if entry.claim.shared else "wait",
                    entry.name,
                    partial(self._grant_turn, entry),
                )
                if entry.watched:
                    self._watch(entry, session)
        except BaseException as error:
            self._close_session(session, error)
            with self._mutex:
                if entry.session is None:
                    self._requeue_behind(entry)
            if not isinstance(error, (SessionDiedError, LockBackendError)):
                raise

    def _requeue_behind(self, entry: Entry) -> None:
        """Put a claim back to the front of the local queue.

        The caller holds the mutex.
        """
        if self._foremost.get(entry.name) is entry:
            del self._foremost[entry.name]
        if not entry.gone:
            self._line.setdefault(entry.name, deque()).appendleft(entry)

    def _watch(self, entry: Entry, session: Session) -> None:
        with session.mutex:
            if entry.waiting and not session.dead:
                selector = self.selector
                there = selector.get_map().get(session.wire.number)
                if there is not None and there.data is not session:
                    # The descriptor is still registered for a session whose lost
                    # connection has not been noticed.
                    selector.unregister(session.wire.number)
                    there = None
                if there is None:
                    selector.register(
                        session.wire.number, selectors.EVENT_READ, session
                    )

    def _grant_turn(self, entry: Entry, row: Row | None) -> None:
        session = entry.session
        if entry.watched and session is not None:
            self._unregister(session)
        if row is not None and row[0] is None:
            row = None
        if row is None and session is not None:
            self._ensure_released(entry, session)
        elif session is not None and clock.now() - entry.asked_at >= session.wire.idle:
            # After a pause, a process may read a grant although the server has since
            # ended the session as idle.
            try:
                self._ask_whether_it_stands(session)
            except LockBackendError as error:
                raise SessionDiedError(str(error)) from error
        with self._mutex:
            if self._foremost.get(entry.name) is entry:
                del self._foremost[entry.name]
            entry.waiting = False
            if row is None:
                self._forget(entry)
                return
            if clock.now() - entry.asked_at < CLAIMS_PER_STATEMENT:
                # The queue was empty.
                self.contended.discard(entry.claim.key)
            self._granted(entry, row)

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

    def _unregister(self, session: Session) -> None:
        if self._selector is None:
            return
        there = self._selector.get_map().get(session.wire.number)
        if there is not None and there.data is session:
            with suppress(KeyError, ValueError):
                self._selector.unregister(session.wire.number)

    def _settle(self, session: Session) -> None:
        """Read the reply of a session if it has arrived.

        Do nothing if another thread waits for it.
        """
        if not session.mutex.acquire(blocking=False):
            return
        try:
            session.settle()
        except SessionDiedError as error:
            self._close_session(session, error)
        finally:
            session.mutex.release()

    def _cancel(self, entry: Entry) -> None:
        """Leave the engine's queue, and release a key that was granted meanwhile."""
        session = entry.session
        if session is None:
            return
        late = False
        try:
            with session.mutex:
                if not session.settle():
                    late = True
                    row = self._ask_main("cancel", session.wire.identity)
                    if row is not None and row[0] == "0":
                        raise SessionDiedError("the server no longer knows it")
                    # Closing the session would lose its other holds, so a busy server
                    # gets some time.
                    if not session.settle(CANCEL_TIMEOUT):
                        raise SessionDiedError("it did not react to a cancellation")
        except (SessionDiedError, LockBackendError) as error:
            self._close_session(session, error)
            return
        if entry.token is not None and late:
            # The cancellation may still be on its way, and would hit the next statement
            # of this session. So the session is closed, which releases the key.
            self._close_session(session)
        elif entry.token is not None:
            self._release_entry(entry)
        if self._line:
            self._advance(connecting=False)

    def _poll(self) -> None:
        """Try to acquire the keys whose waiters have no session."""
        now = clock.now()
        with self._mutex:
            if not self._line or now < self._polled_at + POLL_EVERY * 0.9:
                return
            self._polled_at = now
            tried = [
                entries[0]
                for name, entries in self._line.items()
                if name not in self._foremost
            ][:CLAIMS_PER_TRY]
            for entry in tried:
                # Begin with other keys the next time.
                self._line[entry.name] = self._line.pop(entry.name)
        for entry in tried:
            main = self._main_session()
            try:
                # After a shared claim was granted, the next one can share the key too.
                while (
                    self._try_queued(entry, main)
                    and entry.claim.shared
                    and (line := self._line.get(entry.name))
                ):
                    entry = line[0]
            except SessionDiedError as error:
                self._close_session(main, error)
                return
            except LockBackendError as error:
                logger.warning("%s", error)
                return

    def _try_queued(self, entry: Entry, main: Session) -> bool:
        with self._mutex:
            line = self._line.get(entry.name)
            if not line or line[0] is not entry or not self._reserve(entry, main):
                return False
            # No other thread may send it meanwhile.
            entry.waiting = False
            line.popleft()
            if not line:
                del self._line[entry.name]
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
                self._line.setdefault(entry.name, deque()).appendleft(entry)
                return
        # The claim owns a lock by now, which has to be released first.
        self._release_entry(entry)

    # Sessions.

    def _sessions(self) -> Iterable[Session]:
        return [*([self._main] if self._main is not None else []), *self._queueing]

    def _session_beside(self, claim: Claim) -> Session | None:
        entry = self._entries.get(claim.beside) if claim.beside else None
        return entry.session if entry is not None else None

    def _main_session(self) -> Session:
        main = self._main
        if main is not None and not main.dead:
            return main
        with self._opening:
            if self._main is None or self._main.dead:
                session = self._open()
                with self._mutex:
                    self._main = session
                    self._tend_from(None)
            return self._main

    def _open(self) -> Session:
        name = f"dlocks {socket.gethostname()}:{os.getpid()}"
        return Session(
            connect(
                self.database, name, self.ttl + self.grace, pooled=self.session_pooling
            )
        )

    def _ask_main(self, statement: str, value: Any) -> Row | None:
        for reconnected in (False, True):
            main = self._main_session()
            try:
                return main.ask(statement, value)
            except SessionDiedError as error:
                self._close_session(main, error)
                if reconnected:
                    raise self._failed(error) from error
        raise AssertionError("unreachable")

    def _ping(self, sessions: Iterable[Session]) -> None:
        """Ping all sessions at once, and record which of them reply.

        A late reply is recorded by the next ping.
        """
        until = clock.now() + PING_TIMEOUT
        asked = []
        for session in sessions:
            if not session.mutex.acquire(timeout=max(0.0, until - clock.now())):
                continue
            try:
                session.pinged_at = clock.now()
                if session.settle():
                    session.start(
                        "ping", 0, partial(self._check_ping, session, session.pinged_at)
                    )
                asked.append(session)
            except SessionDiedError as error:
                self._close_session(session, error)
            except LockBackendError as error:
                logger.warning("%s", error)
            finally:
                session.mutex.release()
        for session in asked:
            try:
                session.settle(max(0.0, until - clock.now()))
            except SessionDiedError as error:
                self._close_session(session, error)
            except LockBackendError as error:
                logger.warning("%s", error)

    def _ask_whether_it_stands(self, session: Session) -> None:
        sent = clock.now()
        self._check_ping(session, sent, session.ask("ping"))

    def _check_ping(self, session: Session, sent: float, row: Row | None) -> None:
        if row is None:
            return
        if int(row[0]) != session.wire.pid:
            session.dead = True
            raise SessionDiedError("a pooler has assigned it to another client")
        session.stood_at = max(session.stood_at, sent)

    def _close_session(
        self, session: Session, error: BaseException | None = None
    ) -> None:
        """Close a session, and forget its claims.

        Its holds are lost, and its waiters retry.
        """
        with self._mutex:
            session.dead = True
            if session is self._main:
                self._main = None
            self._queueing.discard(session)
            if session in self._free:
                self._free.remove(session)
            entries = [entry for at in list(session.at.values()) for entry in at]
            for entry in entries:
                self._forget(entry)
        if error is not None and entries:
            logger.warning(
                "A session on database %r with %d locks was lost: %s",
                self.database,
                len(entries),
                error,
            )
        with session.mutex:
            self._unregister(session)
            session.wire.close()
        lost = [
            entry.claim.owner
            for entry in entries
            if entry.token is not None and not entry.leaving
        ]
        if lost:
            # Holds that are not renewed would not notice the loss.
            self.runtime.on_lost(lost, "the database session that held it has ended")

    def _failed(self, error: Exception) -> LockBackendError:
        return LockBackendError(
            f"A lock request to database {self.database!r} failed: {error}"
        )

    # Background maintenance.

    def _tend_from(self, entry: Entry | None) -> None:
        """Ensure that the maintenance thread runs and handles an entry in time.

        It releases entries at their end, and closes idle sessions. The caller holds the
        mutex.
        """
        if self._tender is None or not self._tender.is_alive():
            self._tender = threading.Thread(
                target=self._tend, name="dlocks-sessions", daemon=True
            )
            self._tender.start()
        if entry is not None and entry.ends_at < self._tends_at:
            self._changed.notify()

    def _tend(self) -> None:
        while True:
            with self._mutex:
                now = clock.now()
                if not self._sessions():
                    self._tender = None
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
                    self._tends_at = min(
                        [end for end, _ in due], default=now + self.linger
                    )
                    self._tends_at = min(
                        self._tends_at, now + max(self.linger, 0.05) / 2
                    )
                    self._tends_at = min(
                        [
                            self._tends_at,
                            *(
                                self._asked_by(one)
                                for one in self._sessions()
                                if one.carries
                            ),
                        ]
                    )
                    self._changed.wait(self._tends_at - now)
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

    # Forks.

    def _forked(self) -> None:
        for session in self._sessions():
            session.wire.abandon()
            _inherited.append(session)
        _inherited.append(self._selector)
        self._reset()


class Grants(Notifier):
    """A listener on the sessions of a process in the engine's queue."""

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = backend

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        selector = self._backend.selector
        if not isinstance(selector, NOTICING):
            timeout = min(timeout, WAIT_UNNOTICED)
            if not selector.get_map():
                # ``select()`` without sockets is an error on Windows.
                time.sleep(timeout)
                return ()
        messages: list[Message] = []
        for key, _ in selector.select(timeout):
            messages += self._backend.answered(key.data)
        return messages

    def close(self) -> None:
        """Do nothing, since the sessions belong to the backend."""


_backends: weakref.WeakSet[SessionBackend] = weakref.WeakSet()
# The parent's sessions. Collecting one could end the parent's session on the server.
_inherited: list[Any] = []


def _at_exit() -> None:
    # Sessions with holds stay open, since the keeper releases these holds.
    for backend in list(_backends):
        for session in backend._sessions():
            backend._close_idle(session)


atexit.register(_at_exit)


def _forked() -> None:
    for backend in list(_backends):
        backend._forked()


in_child(_forked)
