"""
Locks of the database's sessions: ``pg_advisory_lock`` on PostgreSQL, ``GET_LOCK`` on MariaDB and MySQL.

There is no row and no table. A lock belongs to a session of the server and ends with it: a process that dies frees its
locks at once. One private connection for each process carries all that was free when it was asked for, and is pinged
for all of it together. Who waits stands in the engine's own queue: that needs a session for each key that is waited
for, which then carries the hold as well, since a session cannot give a lock to another. There is a bounded number of
those; whoever finds none free has the key tried for a few times a second, and stands in line for the next session.

The engine does not know about keys, only about numbers or short names: 64 bits of the SHA-256 of the prefix and the
key on PostgreSQL, 192 bits of that of the database's name and the key elsewhere. Two keys of which these are equal
would exclude each other, which nobody could notice, and nobody has to fear: it never lets two in.

Tokens are the microseconds of the server's clock, drawn after the grant. They grow as long as that clock does not step
back between two holds of a key, and only so long: nothing remembers them (``supports_fencing`` is False).
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

from dlocks import clock
from dlocks.backends.base import BaseBackend, Claim, Grant, Holder, Listener, Message, Place, seconds
from dlocks.backends.database.statements import Statements
from dlocks.backends.session.sessions import PATIENCE, Entry, Session
from dlocks.backends.session.wires import Row, SessionDiedError, Wire, connect, wire_class
from dlocks.exceptions import LockBackendError
from dlocks.forks import in_child

logger = logging.getLogger("dlocks")

# How long one renewal waits for the answers to its pings: there are other backends to renew.
PING_PATIENCE = 0.25
CANCEL_PATIENCE = 5.0
# How often a key is tried for whose waiter has no session to wait on.
POLL_EVERY = 0.1
# Keys that are tried in one look.
TRIED_AT_ONCE = 32
# How long no session is opened after that has failed.
REFUSED_FOR = 1.0
# How long a thread waits for the answer of a session before it looks what else there is.
WAIT_AT_ONCE = 0.5
# Who comes to the end of the engine's queue sooner has not waited there.
AT_ONCE = 0.001
# Keys that a process remembers as crowded.
CROWDED_AT_MOST = 10_000
# These selectors notice what is registered while they wait; another one, as on Windows, waits for so long at a time.
NOTICING = tuple(getattr(selectors, name) for name in ("EpollSelector", "KqueueSelector") if hasattr(selectors, name))
WAIT_UNNOTICED = 0.05


class SessionBackend(Statements, BaseBackend):
    """
    Session locks of ``database``, an alias of DATABASES.

    ``ttl`` is for how long a connection that gives no answer is trusted, and after how long a silence the server ends
    the session: a process that is stopped, or whose host has vanished, keeps others out for no longer. ``ping`` is how
    often, in seconds, the connections are asked whether they still stand; ``waiting`` how many connections this process
    has at most for keys that it waits for; ``linger`` for how many seconds one stays open that carries nothing.
    ``session_pooling`` says that a pooler in between keeps sessions; any other is refused.
    """

    supports_queue: ClassVar[bool] = True
    keeps_places: ClassVar[bool] = False
    knows_takeovers: ClassVar[bool] = False
    tells_here: ClassVar[bool] = True
    tells_leases: ClassVar[bool] = False
    supports_fencing: ClassVar[bool] = False
    supports_permits: ClassVar[bool] = False

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
        if isinstance(waiting, bool) or not isinstance(waiting, int) or waiting < 0:
            raise ValueError(f"waiting must be a number of connections, 0 or more, not {waiting!r}")
        if not isinstance(session_pooling, bool):
            raise TypeError(f"session_pooling must be True or False, not {session_pooling!r}")
        self.database = database
        self.renew_every = seconds("ping", ping, above_zero=True)
        self.linger = seconds("linger", linger)
        self.places = waiting
        self.session_pooling = session_pooling
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        # Guards all of these, and what is on each session; never held while the server is asked.
        # Entered in the condition's place: in C, so that a signal in the middle of it leaves nothing taken.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._entries: dict[str, Entry] = {}
        self._kept: list[Entry] = []
        # The one that never waits, those that may, and those of them that carry nothing.
        self._main: Session | None = None
        self._queueing: set[Session] = set()
        self._free: list[Session] = []
        # Claims without a session to wait on, by name; and the one of each name that has one.
        self._line: dict[str | int, deque[Entry]] = {}
        self._foremost: dict[str | int, Entry] = {}
        self._crowded: dict[str, None] = {}
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
    def _kind(self) -> type[Wire]:
        return wire_class(self.database)

    @property
    def identity(self) -> str:
        return f"sessions of database {self.database}"

    # The waist.

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
                # It stood idle, and the server has ended it meanwhile.
                self._bury(session, error)
                if reconnected:
                    raise self._failed(error) from error
        raise AssertionError("unreachable")

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        entries = {claim.owner: self._entries.get(claim.owner) for claim in claims}
        sent = clock.now()
        self._ping({entry.session for entry in entries.values() if entry and entry.session})
        left: dict[str, float] = {}
        with self._mutex:
            for claim in claims:
                entry = self._entries.get(claim.owner)
                if entry is None or entry.token is None or entry.session is None or entry.ends_at <= sent:
                    continue
                sure_until = self._sure_until(entry, entry.session, claim.ttl)
                entry.ends_at = max(entry.ends_at, sure_until)
                left[claim.owner] = min(max(0.0, sure_until - sent), claim.ttl)
                self._tend_from(entry)
        return left

    def recount(self, claim: Claim, count: int) -> bool:
        if claim.scope == "transaction":
            return bool(self._rows(*self._held_by_transaction(claim)))
        entry = self._entries.get(claim.owner)
        if entry is None or entry.token is None or entry.session is None:
            return False
        try:
            self._ask_whether_it_stands(entry.session)
        except SessionDiedError as error:
            self._bury(entry.session, error)
            return False
        entry.count = count
        return True

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        if claim.scope == "transaction":
            # It ends with the transaction.
            return True
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                return False
            # From here on nobody else puts it anywhere.
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
        # One that nobody renewed may be on its way to the next: then it is not this release that gives it back.
        return self._give_back(entry) and entry.ends_at != -math.inf

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
            holder=f"{row[0] or 'a session'} (session {row[2]})" if self.connection.vendor == "postgresql" else row[0],
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
        # MariaDB tells the port too.
        return host.rpartition(":")[0] if host and host.count(":") == 1 else host

    def transaction_refused(self) -> str | None:
        if not self.connection.in_atomic_block:
            return (
                f"Autocommit is switched off on {self.database!r}, and Django does not tell when such a transaction "
                "ends. Use 'with atomic()', or scope='lease'."
            )
        return None

    def check(self) -> list[Any]:
        from dlocks.checks import check_session_backend

        return check_session_backend(self)

    def try_session(self) -> None:
        """Raise ImproperlyConfigured where the database has no sessions to rely on."""
        self._open().wire.close()

    def disconnect(self) -> None:
        """Close all sessions of this process, and with them give back all that is held or waited for."""
        with self._mutex:
            sessions = list(self._sessions())
        for session in sessions:
            self._bury(session)
        with self._mutex:
            self._entries.clear()
            self._line.clear()

    # In the caller's transaction.

    def in_transaction(self, connection: Any = None) -> bool:
        # Elsewhere than on PostgreSQL nothing of this backend ever is part of a transaction.
        return self._kind.in_transactions and super().in_transaction(connection)

    def _acquire_in_transaction(self, claim: Claim) -> Grant | None:
        ticks = self.dialect.ticks
        committed = "current_setting('transaction_isolation') IN ('read committed', 'read uncommitted')"
        sql = f"SELECT CASE WHEN NOT {committed} THEN -1 WHEN pg_try_advisory_xact_lock(%(name)s) THEN {ticks} END"
        ((token,),) = self._rows(sql, {"name": self._name(claim.key)})
        if token == -1:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction: on database {self.database!r} its isolation level"
                " is above READ COMMITTED, so its snapshot may be older than the lock and would not show what the last"
                " holder did. Take the lock before the transaction begins, or run it at READ COMMITTED."
            )
        return None if token is None else Grant(token)

    def _held_by_transaction(self, claim: Claim) -> tuple[str, dict[str, Any]]:
        sql = (
            "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid ="
            " pg_backend_pid() AND (classid::bigint << 32 | objid::bigint) = %(name)s"
        )
        return sql, {"name": self._name(claim.key)}

    # Asking for a key.

    def _name(self, key: str) -> str | int:
        if self._kind.shares:
            return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)
        # GET_LOCK's names are one space for the whole server, and not told apart by case.
        database = str(self.connection.settings_dict["NAME"])
        return "dlocks:" + hashlib.sha256(f"{database}\0{key}".encode()).hexdigest()[:48]

    def _try(self, entry: Entry, session: Session) -> Grant | None:
        """Ask for the key, without waiting, for a claim that shall be on this session."""
        with self._mutex:
            if not self._reserve(entry, session):
                self._crowd(entry.claim.key)
                return None
            self._entries[entry.claim.owner] = entry
        try:
            grant = self._ask_for(entry, session)
        except LockBackendError:
            # Where it was merely slow the answer may come yet; then it is given back.
            self._forget_if_refused(entry)
            raise
        if grant is None:
            with self._mutex:
                self._crowd(entry.claim.key)
            self._take_back(entry)
        return grant

    def _reserve(self, entry: Entry, session: Session) -> bool:
        """Put a claim on a session, for which it will be asked; return False where another is in its way there."""
        claim = entry.claim
        if session.dead:
            raise SessionDiedError("it was closed")
        if not session.admits(claim, entry.name):
            return False
        # To a session that has the key the server would give it again, whoever waits.
        entry.joins = claim.shared and any(
            other.claim.shared and other.token is not None and not other.leaving
            for other in session.at.get(entry.name, ())
        )
        entry.counted = not entry.joins
        session.add(entry)
        # It ends by itself if it is never asked for, which may take that long; or if the answer is never seen.
        entry.ends_at = clock.now() + max(claim.ttl, PATIENCE)
        return True

    def _ask_for(self, entry: Entry, session: Session) -> Grant | None:
        self._allow_idle(session, entry.claim)
        statement = "join" if entry.joins else "try shared" if entry.claim.shared else "try"
        with session.mutex:
            # Whoever gives it up says so before he has the session.
            if not entry.leaving:
                entry.asked, entry.asked_at = True, clock.now()
                entry.ends_at = entry.asked_at + entry.claim.ttl
                try:
                    session.ask(statement, entry.name, partial(self._answered, entry))
                except LockBackendError:
                    entry.asked = session.is_asked
                    raise
            elif entry.ends_at == -math.inf:
                raise LockBackendError(f"The session for locks was not to be had for {PATIENCE:g} s.")
        return None if entry.token is None else Grant(entry.token)

    def _forget_if_refused(self, entry: Entry) -> None:
        with self._mutex:
            if not entry.asked and entry.token is None and not entry.leaving and not entry.joins:
                self._forget(entry)

    def _answered(self, entry: Entry, row: Row | None) -> None:
        entry.asked = False
        if row is not None and row[0] is not None:
            with self._mutex:
                self._granted(entry, row)

    def _take_back(self, entry: Entry) -> None:
        """Forget a claim that was not granted."""
        with self._mutex:
            if not (entry.joins and entry.counted):
                self._forget(entry)
                return
        # The share that it would have stood on was given back meanwhile, and is its own now.
        self._give_back(entry)

    def _granted(self, entry: Entry, row: Row) -> None:
        """Note a grant; the mutex is held."""
        entry.token = int(row[0])
        entry.since = time.time()
        # For whoever comes for it; for how long it is certain is another matter.
        entry.ends_at = clock.now() + entry.claim.ttl
        self._tend_from(entry)

    @staticmethod
    def _sure_until(entry: Entry, session: Session, ttl: float) -> float:
        """Return until when the server does not take a claim's key away, for all that is known here."""
        # It counts its patience from what it heard last, and its answer to that may have been read much later.
        return max(entry.asked_at, session.stood_at) + ttl

    def _acquire_again(self, entry: Entry) -> Grant | None:
        claim, session = entry.claim, entry.session
        if entry.waiting and session is not None:
            self._settle(session)
        if entry.waiting or session is None:
            return None
        if entry.token is not None and self._sure_until(entry, session, claim.ttl) - clock.now() < claim.ttl / 3:
            # It has waited for long.
            try:
                self._ask_whether_it_stands(session)
            except SessionDiedError as error:
                self._bury(session, error)
        with self._mutex:
            now = clock.now()
            stands = self._entries.get(claim.owner) is entry and not entry.leaving and entry.ends_at > now
            if entry.token is not None and stands:
                sure_until = self._sure_until(entry, session, claim.ttl)
                entry.ends_at = max(entry.ends_at, sure_until)
                return Grant(entry.token, sure_until - now)
        # Asked before, and the answer was not seen, or nobody has come for it in time: it is asked for again.
        self._give_back(entry)
        return self.acquire(claim)

    def _give_back(self, entry: Entry) -> bool:
        with self._mutex:
            session, entry.leaving = entry.session, True
        if session is None:
            return False
        try:
            if entry.token is None:
                # Perhaps the answer was not seen.
                session.settle_in_time()
            if self._is_engine_s(entry, session):
                with session.mutex:
                    if session.is_asked:
                        # It may have been asked before, and be answered late: asked twice, it would free another's
                        # share.
                        session.settle_in_time()
                    if entry.freed is None:
                        statement = "free shared" if entry.claim.shared else "free"
                        session.ask(statement, entry.name, partial(self._freed, entry))
        except SessionDiedError as error:
            self._bury(session, error)
            return False
        if self._line:
            self._advance(connecting=False)
        return entry.freed is not False and entry.token is not None

    def _is_engine_s(self, entry: Entry, session: Session) -> bool:
        """Return whether the engine has to be told that a claim is given back; or else forget it, here and now."""
        with self._mutex:
            if entry.claim.shared and not entry.freeing:
                others = [one for one in session.at.get(entry.name, ()) if not one.counted and not one.leaving]
                has_count = entry.counted and (entry.token is not None or entry.joins)
                if has_count and others:
                    # There is a share that stands on it.
                    entry.counted, others[0].counted = False, True
                if not has_count or others:
                    self._forget(entry)
                    return False
            entry.freeing = True
            return True

    def _freed(self, entry: Entry, row: Row | None) -> None:
        if row is None and entry.session is not None:
            # By an administrator, say: before it had freed the key, or after.
            self._make_sure_of_nothing(entry, entry.session)
        with self._mutex:
            entry.freed = row is None or (row[0] is not None and bool(int(row[0])))
            self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        """Take a claim out of all tables; the mutex is held."""
        if entry.gone:
            # Its owner, and its session, may be another one's by now.
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
            if session in self._queueing and not session.at and not session.dead and session not in self._free:
                self._free.append(session)

    def _allow_idle(self, session: Session, claim: Claim) -> None:
        """See to it that the server does not end the session before the claim's ttl is over."""
        if session.wire.idle < (needed := claim.ttl + self.grace):
            with session.mutex:
                session.ask("idle", session.wire.idle_setting(needed))  # type: ignore[attr-defined]
                session.wire.idle = needed

    # Waiting, in the engine's queue.

    def crowded(self, key: str) -> bool:
        return key in self._crowded

    def _crowd(self, key: str) -> None:
        if len(self._crowded) >= CROWDED_AT_MOST:
            self._crowded.clear()
        self._crowded[key] = None

    def queue(self, claim: Claim, channel: str = "", number: int | None = None) -> Place | None:
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
        return Place(ask=entry.token is not None, number=1, here=session is not None)

    def wait(self, claim: Claim, timeout: float | None) -> bool:
        entry = self._entries.get(claim.owner)
        session = entry.session if entry is not None else None
        if entry is None or session is None:
            return False
        try:
            session.settle(WAIT_AT_ONCE if timeout is None else min(timeout, WAIT_AT_ONCE))
        except SessionDiedError as error:
            self._bury(session, error)
        if self._line:
            self._advance()
        return True

    def look(self, claims: Sequence[Claim], *, heard: bool = True) -> Mapping[str, Place]:
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
                # For how long it is told to whoever asks.
                places[claim.owner] = Place(grant=Grant(entry.token))
            else:
                polled = entry.session is None and entry.name not in self._foremost
                places[claim.owner] = Place(number=1, soon=POLL_EVERY if polled else float("inf"))
        return places

    def move_on(self, key: str) -> bool:
        return False

    def waiting(self, key: str) -> int:
        name = self._name(key)
        row = self._ask_main("waiting", name)
        return (int(row[0]) if row else 0) + len(self._line.get(name, ()))

    def listen(self, channel: str) -> Grants:
        return Grants(self)

    @property
    def selector(self) -> selectors.BaseSelector:
        """Return what tells which of the sessions that wait have been answered."""
        with self._mutex:
            if self._selector is None:
                self._selector = selectors.DefaultSelector()
            return self._selector

    def answered(self, session: Session) -> Iterable[Message]:
        """Note what a session in the engine's queue was answered, and tell whose turn it is."""
        if not session.mutex.acquire(blocking=False):
            # Somebody else sees to it.
            time.sleep(0.001)
            return
        try:
            with self._mutex:
                owners = [entry.claim.owner for entries in session.at.values() for entry in entries if entry.waiting]
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
        """Send those into the engine's queue who are the first of this process for their key, while there is place."""
        while True:
            with self._mutex:
                name = next((name for name in self._line if name not in self._foremost), None)
                if name is None:
                    return
                session = self._free.pop() if self._free else None
                if session is None:
                    full = len(self._queueing) + self._reserved >= self.places
                    if full or not connecting or clock.now() < self._refused_at + REFUSED_FOR:
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
                        self._step_back(entry)
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
                    # Just now, whether it stands.
                    session.settle_in_time()
                session.start(
                    "wait shared" if entry.claim.shared else "wait", entry.name, partial(self._turn_came, entry)
                )
                if entry.watched:
                    self._watch(entry, session)
        except BaseException as error:
            self._bury(session, error)
            with self._mutex:
                if entry.session is None:
                    self._step_back(entry)
            if not isinstance(error, (SessionDiedError, LockBackendError)):
                raise

    def _step_back(self, entry: Entry) -> None:
        """Put a claim back to where it was before it was to be sent; the mutex is held."""
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
                    # Of a session whose connection was lost, which nobody has noticed yet.
                    selector.unregister(session.wire.number)
                    there = None
                if there is None:
                    selector.register(session.wire.number, selectors.EVENT_READ, session)

    def _turn_came(self, entry: Entry, row: Row | None) -> None:
        session = entry.session
        if entry.watched and session is not None:
            self._unregister(session)
        if row is not None and row[0] is None:
            row = None
        if row is None and session is not None:
            self._make_sure_of_nothing(entry, session)
        elif session is not None and clock.now() - entry.asked_at >= session.wire.idle:
            # A process that was stopped may read a grant whose session has been ended since, for its silence.
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
            if clock.now() - entry.asked_at < AT_ONCE:
                # Nobody was in the way.
                self._crowded.pop(entry.claim.key, None)
            self._granted(entry, row)

    def _make_sure_of_nothing(self, entry: Entry, session: Session) -> None:
        """Give back a key whose statement was cancelled: the engine may have given it, or not freed it, before that."""
        try:
            answer = session.ask("free shared" if entry.claim.shared else "free", entry.name)
        except LockBackendError as error:
            raise SessionDiedError(str(error)) from error
        if answer is None:
            raise SessionDiedError("it was cancelled twice")

    def _unregister(self, session: Session) -> None:
        if self._selector is None:
            return
        there = self._selector.get_map().get(session.wire.number)
        if there is not None and there.data is session:
            with suppress(KeyError, ValueError):
                self._selector.unregister(session.wire.number)

    def _settle(self, session: Session) -> None:
        """Read the answer of a session, if it is there and nobody else waits for it."""
        if not session.mutex.acquire(blocking=False):
            return
        try:
            session.settle()
        except SessionDiedError as error:
            self._bury(session, error)
        finally:
            session.mutex.release()

    def _cancel(self, entry: Entry) -> None:
        """Leave the engine's queue; what was granted meanwhile is given back."""
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
                        raise SessionDiedError("the server does not know it any more")
                    # Its other holds are lost with it, so a server that is merely busy gets its time.
                    if not session.settle(CANCEL_PATIENCE):
                        raise SessionDiedError("it did not answer to being cancelled")
        except (SessionDiedError, LockBackendError) as error:
            self._bury(session, error)
            return
        if entry.token is not None and late:
            # The cancellation may still be on its way, and must not meet a statement of whoever has the session next.
            # So nobody has it next: the key is given back with it.
            self._bury(session)
        elif entry.token is not None:
            self._give_back(entry)
        if self._line:
            self._advance(connecting=False)

    def _poll(self) -> None:
        """Try for the keys whose waiters have no session to wait on."""
        now = clock.now()
        with self._mutex:
            if not self._line or now < self._polled_at + POLL_EVERY * 0.9:
                return
            self._polled_at = now
            tried = [entries[0] for name, entries in self._line.items() if name not in self._foremost][:TRIED_AT_ONCE]
            for entry in tried:
                # Others first the next time.
                self._line[entry.name] = self._line.pop(entry.name)
        for entry in tried:
            main = self._main_session()
            try:
                # Where one can share the key, the next one can too.
                while self._try_in_line(entry, main) and entry.claim.shared and (line := self._line.get(entry.name)):
                    entry = line[0]
            except SessionDiedError as error:
                self._bury(main, error)
                return
            except LockBackendError as error:
                logger.warning("%s", error)
                return

    def _try_in_line(self, entry: Entry, main: Session) -> bool:
        with self._mutex:
            line = self._line.get(entry.name)
            if not line or line[0] is not entry or not self._reserve(entry, main):
                return False
            # Nobody else sends it anywhere meanwhile.
            entry.waiting = False
            line.popleft()
            if not line:
                del self._line[entry.name]
        try:
            if self._ask_for(entry, main) is not None:
                return True
        except LockBackendError:
            self._back_to_line(entry, main)
            raise
        self._back_to_line(entry, main)
        return False

    def _back_to_line(self, entry: Entry, main: Session) -> None:
        with self._mutex:
            if entry.gone or entry.leaving or entry.asked or entry.token is not None:
                # Whoever gives it up sees to all of that.
                return
            if not (entry.joins and entry.counted):
                main.remove(entry)
                entry.session, entry.waiting, entry.ends_at = None, True, math.inf
                entry.joins, entry.counted = False, True
                self._line.setdefault(entry.name, deque()).appendleft(entry)
                return
        # Not without giving back what has become its own meanwhile.
        self._give_back(entry)

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
        return Session(connect(self.database, name, self.ttl + self.grace, pooled=self.session_pooling))

    def _ask_main(self, statement: str, value: Any) -> Row | None:
        for reconnected in (False, True):
            main = self._main_session()
            try:
                return main.ask(statement, value)
            except SessionDiedError as error:
                self._bury(main, error)
                if reconnected:
                    raise self._failed(error) from error
        raise AssertionError("unreachable")

    def _ping(self, sessions: Iterable[Session]) -> None:
        """Ask all sessions at once whether they stand, and note which answer, if need be the next time."""
        until = clock.now() + PING_PATIENCE
        asked = []
        for session in sessions:
            if not session.mutex.acquire(timeout=max(0.0, until - clock.now())):
                continue
            try:
                session.pinged_at = clock.now()
                if session.settle():
                    session.start("ping", 0, partial(self._check_ping, session, session.pinged_at))
                asked.append(session)
            except SessionDiedError as error:
                self._bury(session, error)
            except LockBackendError as error:
                logger.warning("%s", error)
            finally:
                session.mutex.release()
        for session in asked:
            try:
                session.settle(max(0.0, until - clock.now()))
            except SessionDiedError as error:
                self._bury(session, error)
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
            raise SessionDiedError("a pooler in between has given it to somebody else")
        session.stood_at = max(session.stood_at, sent)

    def _bury(self, session: Session, error: BaseException | None = None) -> None:
        """Close a session, and forget all that it carried: its holds are lost, its waiters ask again."""
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
            logger.warning("A session of database %r with %d locks is gone: %s", self.database, len(entries), error)
        with session.mutex:
            self._unregister(session)
            session.wire.close()
        lost = [entry.claim.owner for entry in entries if entry.token is not None and not entry.leaving]
        if lost:
            # Not all are renewed, and would learn of it by that.
            self.tell_lost(lost, "its session of the database has ended")

    def _failed(self, error: Exception) -> LockBackendError:
        return LockBackendError(f"Database {self.database!r} could not be asked about a lock: {error}")

    # What nobody else does in time.

    def _tend_from(self, entry: Entry | None) -> None:
        """See to it that an entry is given back at its end, and idle sessions are closed; the mutex is held."""
        if self._tender is None or not self._tender.is_alive():
            self._tender = threading.Thread(target=self._tend, name="dlocks-sessions", daemon=True)
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
                idle = [one for one in self._sessions() if not one.at and now >= one.idle_since + self.linger]
                for entry in over:
                    # From here on it is not renewed any more.
                    entry.ends_at = -math.inf
                # Those that nobody renews, the others are asked more often than that.
                silent = [one for one in self._sessions() if one.carries and now >= self._asked_by(one)]
                if not over and not idle and not silent:
                    # Sessions that carry nothing are looked for now and then, so that to give back tells nobody.
                    self._tends_at = min([end for end, _ in due], default=now + self.linger)
                    self._tends_at = min(self._tends_at, now + max(self.linger, 0.05) / 2)
                    self._tends_at = min(
                        [self._tends_at, *(self._asked_by(one) for one in self._sessions() if one.carries)]
                    )
                    self._changed.wait(self._tends_at - now)
            for entry in over:
                self._end(entry)
            for session in idle:
                self._close_idle(session)
            self._ping(silent)
            # A reference kept over the pause would keep them alive.
            del over, idle, silent, held, due

    def _asked_by(self, session: Session) -> float:
        """Return when a session that carries something is asked whether it stands, if nobody else has asked by then."""
        return session.pinged_at + 1.2 * self.renew_every

    def _end(self, entry: Entry) -> None:
        try:
            self._give_back(entry)
        except LockBackendError as error:
            if entry.session is not None:
                self._bury(entry.session, error)

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
                    # Somebody has just taken it.
                    return
                self._queueing.discard(session)
                session.dead = True
            session.wire.close()

    # A child process has nothing of this.

    def _forked(self) -> None:
        for session in self._sessions():
            session.wire.abandon()
            _inherited.append(session)
        _inherited.append(self._selector)
        self._reset()


class Grants(Listener):
    """Hears from the sessions of a process that stand in the engine's queue."""

    def __init__(self, backend: SessionBackend) -> None:
        self._backend = backend

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        selector = self._backend.selector
        if not isinstance(selector, NOTICING):
            timeout = min(timeout, WAIT_UNNOTICED)
            if not selector.get_map():
                # To select from nothing is an error on Windows.
                time.sleep(timeout)
                return ()
        messages: list[Message] = []
        for key, _ in selector.select(timeout):
            messages += self._backend.answered(key.data)
        return messages

    def calm(self, claims: Sequence[Claim]) -> Place | None:
        return None

    def close(self) -> None:
        """Do nothing: the sessions are the backend's."""


_backends: weakref.WeakSet[SessionBackend] = weakref.WeakSet()
# The parent's sessions: to collect them could say good-bye to the server in the parent's name.
_inherited: list[Any] = []


def _at_exit() -> None:
    # What still carries a hold is the keeper's to give back.
    for backend in list(_backends):
        for session in backend._sessions():
            backend._close_idle(session)


atexit.register(_at_exit)


def _forked() -> None:
    for backend in list(_backends):
        backend._forked()


in_child(_forked)
