"""The base class of the backends whose locks are rows of one table.

A lease is a row with an ``end_time`` in the future. Each change of it is a committed
statement of its own. In transaction scope the row is written so that it is free as soon
as the caller's transaction commits. Until then the database itself keeps all other
callers away from it. No statement waits for a row that another transaction has
locked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

# functools has a mutex in Python 3.11, which a forked child could find locked.
from django.utils.functional import cached_property

from dlocks.backends.base import Backend
from dlocks.backends.database.batch import Batch
from dlocks.backends.database.checks import check_database
from dlocks.backends.database.expiry import Observations
from dlocks.backends.database.history import HistoryTable
from dlocks.backends.database.inspector import DatabaseInspector
from dlocks.backends.database.maintenance import Maintenance
from dlocks.backends.database.release import Release
from dlocks.backends.database.renewal import Renewal
from dlocks.backends.notifiers import RecentKeys
from dlocks.runtime.polling import SPIN_SECONDS
from dlocks.runtime.pools import is_pooled
from dlocks.sql.engines import refuse_lost
from dlocks.transactions import how_to_autocommit, in_testcase
from dlocks.values import Claim, seconds


class Either:
    """The members of two sets."""

    def __init__(self, one: set[str], other: set[str]) -> None:
        self._sets = one, other

    def __contains__(self, key: object) -> bool:
        return key in self._sets[0] or key in self._sets[1]


class DatabaseBackend(Batch, Release, Renewal, Maintenance, HistoryTable, Backend):
    """The base class of the database backends.

    ``database`` is an alias of DATABASES that accepts writes.

    ``listen`` says whether waiters are notified of their turn. Processes on the same
    host send each other datagrams. Processes on other hosts use NOTIFY on PostgreSQL
    if the session belongs to the process alone, which ``True`` states. Otherwise they
    poll. With ``False`` there are no notifications.

    ``prepare`` says whether most statements outside of transactions bypass Django's
    cursor and go to the driver. Connections with an instrumented cursor are excepted.
    On PostgreSQL these are the statements that a session sends often, which are
    prepared. By default this needs a session that belongs to the process alone. With
    ``True`` it includes poolers that support prepared statements.

    ``spin`` is the number of seconds for which a caller polls for the reply of a
    prepared statement before it sleeps.

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
    supports_handover: ClassVar[bool] = True
    supports_guard: ClassVar[bool] = True
    inspector: DatabaseInspector

    def __init__(
        self,
        alias: str,
        *,
        database: str = "default",
        listen: bool | None = None,
        prepare: bool | None = None,
        spin: float = SPIN_SECONDS,
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
        self.listening = listen
        self.prepare = prepare
        self.spin = seconds("spin", spin)
        self.history = history
        self._contended_keys = RecentKeys()
        self._requested_keys = set()
        self.contended = Either(self._contended_keys, self._requested_keys)
        self._texts = {}
        self._grants = {}
        self._releases = {}
        self.inspector = DatabaseInspector(self)
        if deadlock_after is not None:
            self.deadlock_after = seconds("deadlock_after", deadlock_after)
        self.expiry = expiry
        if expiry == "observed":
            self.observations = Observations(self.ttl + self.grace)

    @property
    def grants_in_queue(self) -> bool:  # type: ignore[override]
        return self.observations is None

    @cached_property
    def identity(self) -> str:
        return f"database {self.database}"

    @property
    def connect_first(self) -> Callable[[], object] | None:
        connection = self.connection
        if connection.connection is None and is_pooled(connection):
            return self._session
        return None

    @property
    def reads_inside(self) -> bool:
        # What a TestCase has written is not committed, and will not be.
        connection = self.connection
        return in_testcase(connection) and not connection.needs_rollback

    def can_queue(self, claim: Claim) -> bool:
        # In a TestCase, the row may be one that only its transaction sees. A session
        # that queued the claim would wait for that transaction.
        return claim.scope == "lease" or not in_testcase(self.connection)

    def refusal(self, claim: Claim) -> str | None:
        if claim.scope == "lease":
            if self.dialect.one_writer and self.in_transaction():
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
            if not self.keeps_shares():
                return "A shared lock does not support scope='transaction'."
        elif self.in_transaction() and not self.connection.in_atomic_block:
            refuse_lost(self.connection)
        if (why := super().refusal(claim)) is not None:
            return why
        if self.observations is not None and claim.ttl > self.ttl:
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
