"""The base class of the backends whose locks are rows of one table.

A lease is a row with an ``end_time`` in the future. Each change of it is a committed
transaction of its own. The module ``transactions`` implements locks that are part of
the caller's transaction.

``DatabaseBackend`` puts the parts of this package together. Each of them has its own
state, and gets what it needs in its constructor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

# functools has a mutex in Python 3.11, which a forked child could find locked.
from django.utils.functional import cached_property

from dlocks.backends import table as rules
from dlocks.backends.base import Backend
from dlocks.backends.database.checks import check_database
from dlocks.backends.database.history import HistoryTable
from dlocks.backends.database.holders import STEP_WAIT, Holders
from dlocks.backends.database.inspector import DatabaseInspector
from dlocks.backends.database.keepers import Keepers
from dlocks.backends.database.maintenance import Maintenance
from dlocks.backends.database.notify import Notifications
from dlocks.backends.database.queue import Queue
from dlocks.backends.database.session import RowLockedError, Session
from dlocks.backends.database.store import NOTHING, ROW_WAIT, Store
from dlocks.backends.database.transactions import TransactionLocks
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError, LockNotAwaitable, LockStale
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.pools import is_pooled
from dlocks.sql.clock import Now, ticks
from dlocks.sql.engines import refuse_lost
from dlocks.text import permits_taken
from dlocks.transactions import how_to_autocommit, in_testcase
from dlocks.values import UNLIMITED, Claim, Grant, Holder, Ticket, seconds


class DatabaseBackend(Backend):
    """The base class of the database backends. A strategy decides how ``take()`` works.

    ``database`` is an alias of DATABASES that accepts writes.

    ``listen`` says whether waiters are notified of their turn. Processes on the same
    host send each other datagrams. Processes on other hosts use NOTIFY on PostgreSQL
    if the session belongs to the process alone, which ``True`` states. Otherwise they
    poll. With ``False`` there are no notifications.

    ``prepare`` says whether psycopg prepares the most frequent statements on the
    server. Connections with cursors of other code are excepted. By default this needs a
    session that belongs to the process alone. With ``True`` it includes poolers that
    support prepared statements.

    ``history`` says whether each hold that ends is recorded in the history.

    ``expiry`` says how other callers detect that a holder is gone. With ``"clock"`` it
    is gone when its lease has ended by the database's clock. With ``"observed"`` it is
    gone when its row has not changed for ttl and grace on the clock of the waiting
    process. That is immune to clock steps, but it takes that long from the start of the
    wait, and only waiters can do it. All processes need the same value, and no claim's
    ttl may exceed the backend's.

    ``deadlock_after`` is the number of seconds after which a caller that holds a key
    and waits for another one looks for a deadlock. With ``None`` it does not look, and
    is not found by others.
    """

    supports_transactions: ClassVar[bool] = True
    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True
    supports_handover: ClassVar[bool] = True
    supports_guard: ClassVar[bool] = True
    # Whether the row of a free key is deleted.
    deletes: ClassVar[bool] = False

    def __init__(
        self,
        alias: str,
        *,
        database: str = "default",
        listen: bool | None = None,
        prepare: bool | None = None,
        history: bool = False,
        expiry: str = "clock",
        deadlock_after: float | None = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        if not isinstance(database, str):
            raise TypeError(f"database must be an alias of DATABASES, not {database!r}")
        for name, value in (("listen", listen), ("prepare", prepare)):
            if value is not None and not isinstance(value, bool):
                raise TypeError(f"{name} must be True, False or None, not {value!r}")
        if not isinstance(history, bool):
            raise TypeError(f"history must be True or False, not {history!r}")
        if expiry not in ("clock", "observed"):
            raise ValueError(f"expiry must be 'clock' or 'observed', not {expiry!r}")
        self.database = database
        self.history = history
        self.expiry = expiry
        if deadlock_after is not None:
            self.deadlock_after = seconds("deadlock_after", deadlock_after)
        self.session = Session(database, prepare=prepare)
        self.notifications = Notifications(self.session, listen=listen)
        self.store = Store(
            self.session,
            self.run_outside,
            self.notifications,
            prefix=lambda: self.prefix,
            grace=self.grace,
            observed_for=self.ttl + self.grace if expiry == "observed" else None,
            deletes=self.deletes,
        )
        self.queue = Queue(self.store)
        self.contended = self.queue.contended
        self.holders = Holders(self.store, self.queue)
        self.transactions = TransactionLocks(self.store, self.holders, self.take)
        self.keepers = Keepers(self.store)
        self.maintenance = Maintenance(self.store, self.keepers)
        self.records = HistoryTable(self.store)
        self.inspector = DatabaseInspector(self)

    # Acquisition.

    def take(self, claim: Claim) -> int | None:
        """Take a key that is free or already the claim's, and return the token.

        Return None if the key is not free. Raise RowLockedError if its row is locked.
        """
        raise NotImplementedError

    def write(self, claim: Claim, version: int | None = None) -> int | None:
        """Write the row of a free key in one statement, and return the token or None.

        With a ``version``, the row must still have it.
        """
        inside, versioned = claim.scope == "transaction", version is not None
        parameters = {
            **self.store.who(claim),
            "key": claim.key,
            # Free on commit. Until then the database itself keeps the row locked.
            "status": "S" if inside else "P",
            "ttl": 0 if inside else ticks(claim.ttl),
            "fair": claim.fair,
        }
        if versioned:
            parameters["version"] = version
        reply = self.session.send(
            "acquire",
            parameters,
            True,
            inside=inside,
            versioned=versioned,
            queued=claim.queued,
        )
        if reply.rows or not reply.changed:
            return reply.rows[0][0] if reply.rows else None
        # The insert id is 0 if the table has a trigger.
        return reply.insert_id or self._token(claim)

    def _token(self, claim: Claim) -> int | None:
        """Read the token of a claim that was granted. It may be lost since."""
        try:
            key = self.store.peek(claim.key)
        except LockBackendError as error:
            # The grant may be committed.
            error.changed_nothing = False
            raise
        mine = key is not None and key.row.hold_count and key.row.owner == claim.owner
        return key.state.version if key is not None and mine else None

    def acquire(self, claim: Claim) -> Grant | None:
        self.store.refuse_unstorable(claim.key)
        if claim.scope == "transaction" and not claim.shared:
            if (grant := self.transactions.acquire(claim)) is None:
                self._refuse(claim)
            return grant
        try:
            # Twice, because others create a new key at the same time. A step would lock
            # its row against all of them.
            for _ in range(0 if claim.shared else 2):
                if (token := self.take(claim)) is not None:
                    return Grant(token)
                if (key := self.store.peek(claim.key)) is None:
                    self.store.create([claim.key])
                elif not key.is_free and key.row.owner != claim.owner:
                    return None
                else:
                    break
            # A writer that also reads waits for its own row, since it cannot queue.
            is_own = bool(claim.beside)
            wait = STEP_WAIT if is_own else ROW_WAIT
            grant, _ = self.store.step(
                claim.key, rules.acquire, claim, wait=wait, in_turn=is_own
            )
        except RowLockedError:
            self._refuse_locked_table()
            grant = self.holders.grant_again(claim)
        if grant is None:
            self._refuse(claim)
        elif claim.scope == "transaction" and self.connection.in_atomic_block:
            self._end_with_transaction(claim)
        return grant

    def _end_with_transaction(self, claim: Claim) -> None:
        """Release a share at the commit, if that comes before its own release.

        Its row has a lease, which the commit would leave behind.
        """

        def end() -> None:
            # Usually it was released, and a write would wait for other writers.
            if self.store.claims.filter(owner=claim.owner).exists():
                self.release(claim, failed=True)

        transaction.on_commit(end, using=self.database, robust=True)

    def _refuse_locked_table(self) -> None:
        """Raise TableLockedError if the table of keys is locked, and not only rows.

        A backup may let others read the table. So this writes, but no row.
        """
        session = self.session
        if not session.engine.one_writer:
            session.unlocked(session.execute, session.sql(NOTHING), {})

    def _refuse(self, claim: Claim) -> None:
        """Raise an error if waiting would not help."""
        if not claim.takeover and self._is_stale(claim.key):
            # Another caller had locked the row to check the same.
            kept = self.keepers.in_transactions([claim.key])
            if not kept and self._is_stale(claim.key):
                raise LockStale(key=claim.key, holder=self.holder(claim.key))
        if claim.scope == "transaction" and self.session.engine.one_writer:
            # No other caller can release the key.
            holder = self.holder(claim.key)
            who = f"held by {holder or 'another caller'}"
            if claim.permits < UNLIMITED:
                shared, waiting = self.inspector.sharers(claim.key)
                who = permits_taken(claim.permits, shared, waiting) if shared else who
            raise LockNotAwaitable(
                f"{claim.key!r} cannot be waited for inside a transaction: {who}."
                " SQLite has one writer, so its holder cannot release it before this"
                " transaction ends. Acquire the lock before the transaction.",
                key=claim.key,
                holder=holder,
            )

    def _is_stale(self, key: str) -> bool:
        found = self.store.peek(key)
        return found is not None and found.state.is_held and found.is_free

    def acquire_all(
        self, claims: Sequence[Claim], *, until: float = FOREVER
    ) -> Sequence[Grant] | None:
        return self.holders.acquire_all(claims, until)

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        return self.holders.exchange(claim, successor)

    # What a holder does.

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        return self.holders.renew(claims)

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        return self.holders.verify(claims, count)

    def pin(self, claim: Claim, database: str) -> bool:
        return self.transactions.pin(claim, database)

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        if claim.scope == "transaction" and not claim.shared and self.in_transaction():
            if self.deletes and not rest_for and self.connection.in_atomic_block:
                # A row deleted by an open transaction would make all inserts wait.
                # Django logs the name of a callback that fails, and a partial() has
                # none.
                def tidy() -> None:
                    self.store.advance(claim.key)

                transaction.on_commit(tidy, using=self.database, robust=True)
            status = "F" if failed else "S"
            return self.transactions.release(claim, status, rest_for)
        return self.holders.release(claim, failed=failed, rest_for=rest_for)

    def expire(self, claim: Claim, ago: float) -> None:
        """End the lease of a claim, ``ago`` seconds ago, for a test."""
        if not self.holders.expire(claim, ago):
            raise RuntimeError(f"{claim.key!r} is no longer held by {claim.holder}.")

    def release_all(self, claims: Sequence[Claim], *, failed: bool = False) -> bool:
        return self.holders.release_all(claims, failed=failed)

    # The queue.

    def can_queue(self, claim: Claim) -> bool:
        # In a TestCase, the row may be one that only its transaction sees. A session
        # that queued the claim would wait for that transaction.
        return claim.scope == "lease" or not in_testcase(self.connection)

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        return self.queue.join(claim, channel, position)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        return self.queue.poll(claims, heartbeat=heartbeat)

    def waiting(self, key: str) -> int:
        queued = self.store.claims.filter(key_resource=key, version__isnull=True)
        count: int = self.session.unlocked(queued.filter(end_time__gt=Now()).count)
        return count

    def notifier(self, channel: str) -> Notifier | None:
        return self.notifications.listener(channel)

    # What people see and do.

    def holder(self, key: str) -> Holder | None:
        return self.maintenance.holder(key)

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        return self.maintenance.clear(key, version, stale_only=stale_only)

    # Its place in the process.

    @property
    def grants_in_queue(self) -> bool:  # type: ignore[override]
        return not self.store.observed

    @cached_property
    def identity(self) -> str:
        return f"database {self.database}"

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return self.session.connection

    @property
    def connect_first(self) -> Callable[[], object] | None:
        connection = self.connection
        if connection.connection is None and is_pooled(connection):
            return lambda: self.session.raw
        return None

    @property
    def renews_late(self) -> bool:
        # While a transaction writes to SQLite, no lease can be renewed and no other
        # caller can acquire a key.
        return self.session.engine.one_writer

    @property
    def reads_inside(self) -> bool:
        # What a TestCase has written is not committed, and will not be.
        connection = self.connection
        return in_testcase(connection) and not connection.needs_rollback

    def in_transaction(self) -> bool:
        return self.session.in_transaction

    def run_outside(self, function: Callable[[], Any]) -> Any:
        """Call a function outside of the caller's transaction, unless that is alone."""
        if self.in_transaction() and not self.session.is_alone:
            return self.runtime.run(function)
        return function()

    def refusal(self, claim: Claim) -> str | None:
        if claim.scope == "lease":
            if self.session.engine.one_writer and self.in_transaction():
                solution = "Acquire it before the transaction begins"
                if not self.connection.in_atomic_block:
                    # Autocommit is off, and every statement is in a transaction.
                    solution = how_to_autocommit(self.database)
                return (
                    "SQLite has one writer, which may be the transaction open on"
                    f" {self.database!r}. A lease could not be written beside it."
                    f" {solution}."
                )
        elif claim.shared:
            # A shared hold is not the lock row, which a transaction could keep.
            if not self.session.is_alone:
                return "A shared lock does not support scope='transaction'."
        elif self.in_transaction() and not self.connection.in_atomic_block:
            refuse_lost(self.connection)
        if (why := super().refusal(claim)) is not None:
            return why
        if self.store.observed and claim.ttl > self.ttl:
            return (
                f"A ttl of {claim.ttl:g} s is too long. With expiry='observed', other"
                f" callers watch a row for the ttl of the backend ({self.ttl:g} s), and"
                " would treat a longer lease as expired. Raise OPTIONS['ttl'] in all"
                " processes."
            )
        return None

    def close(self) -> None:
        self.connection.close()

    def check(self) -> list[Any]:
        return check_database(self.alias, self.database)
