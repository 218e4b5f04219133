"""Transactions that commit only while a lock is held."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import transaction
from django.db.utils import DatabaseError

from dlocks.core.confirm import check
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.connected import connection_of
from dlocks.runtime.keeper import keeper
from dlocks.runtime.requests import request
from dlocks.sql.engines import engine_of, refuse_lost
from dlocks.transactions import TransactionMarker, forbid_commit, why_end_is_unknown

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlocks.core.holding import Holding


# Seconds for which an outermost guard restarts its transaction after conflicts.
RETRY_FOR = 15.0

# What a caller does whose transaction conflicts with others.
ADVICE = (
    "Retry the transaction from its start, or run it at READ COMMITTED"
    " (OPTIONS['isolation_level'], or the server's default_transaction_isolation)"
)


@contextmanager
def guarded(
    holds: Sequence[Holding], using: str | None, atomic: dict[str, Any]
) -> Iterator[None]:
    """Open a transaction that locks and writes the rows of the holds first.

    No caller acquires a key before it ends. The rows are written again at the end, so
    that the leases have their full ttl at the commit.
    """
    database = _database_for(holds[0], using)
    if not database:
        # The memory backend simulates a transaction for tests.
        for hold in holds:
            check(hold)
        yield
        for hold in holds:
            check(hold)
        return
    connection = connection_of(database)
    key = ", ".join(hold.lock.key for hold in holds)
    if (
        not connection.get_autocommit()
        and (why := why_end_is_unknown(connection)) is not None
    ):
        refuse_lost(connection)
        raise RuntimeError(f"{key!r} cannot guard this transaction. {why}.")
    for hold in holds:
        own = hold.transaction
        if own is not None and connection is not own.connection:
            raise RuntimeError(
                f"{hold.lock.key!r} is held by a transaction on"
                f" {hold.backend.database!r}, and cannot guard another one on"
                f" {database!r}. Acquire the lock before the transactions, or write on"
                f" {hold.backend.database!r}."
            )
    outermost = not connection.in_atomic_block
    began = clock.real_now()
    for number in itertools.count():
        try:
            with transaction.atomic(using=database, **atomic):
                pinned: list[tuple[Holding, TransactionMarker | None]] = []
                try:
                    # No comprehension: an interrupt in an inlined one bypasses the
                    # handlers (CPython 3.12).
                    for hold in holds:
                        pinned.append((hold, _pin_first(hold, connection, database)))  # noqa: PERF401
                except LockBackendError as error:
                    if not _is_conflict(error, connection):
                        raise
                    if not outermost:
                        raise LockBackendError(
                            f"{key!r} cannot guard this transaction on database"
                            f" {database!r}: another session has locked its row, or has"
                            " changed it since the transaction began. Retry the"
                            " transaction from its start, begin it with hold.atomic(),"
                            f" or run it at READ COMMITTED. ({error})"
                        ) from error
                    if clock.real_now() > began + RETRY_FOR:
                        raise
                    # No code of the caller has run yet. The block rolls back without an
                    # error.
                else:
                    yield
                    if not connection.needs_rollback:
                        for hold, point in pinned:
                            if point is None:
                                continue
                            committed = partial(
                                _committed, hold, *_pin_last(hold, connection, database)
                            )
                            point.at_commit.append(committed)
                    return
        except DatabaseError as error:
            # Of the caller's own statements, or of the commit.
            if _is_lost_race(error, connection):
                error.add_note(f"Key {key!r} guards this transaction. {ADVICE}.")
            raise
        finally:
            # Otherwise the keeper would consider the transaction open after a lost
            # connection.
            for hold in holds:
                hold.life.unpin()
        clock.back_off(0.002 * 2 ** min(number, 5))


def _pin_first(
    hold: Holding, connection: BaseDatabaseWrapper, database: str
) -> TransactionMarker | None:
    """Pin a hold in a transaction that begins.

    Return the ``TransactionMarker`` of this point, or None if the row is already the
    transaction's.
    """
    if hold.scope == "transaction":
        check(hold)
        return None
    # The rollback of an outer savepoint may undo the write, although the row stays
    # locked. This comes first among the on_commit() callbacks, also of outer blocks, so
    # that all others find the lease renewed.
    here = TransactionMarker.before_callbacks(connection)
    here = here or TransactionMarker.here(connection)
    pin = TransactionMarker.of_lock(connection)
    # The row of a pinned hold stays locked, even if its lease has expired.
    late = hold.life.state.is_pinned or hold.next_claim().late
    # Before the write, so that the keeper sends no request for the hold meanwhile. A
    # hold that is being released or detached is refused. That request would wait for
    # the end of this transaction.
    if hold.is_forked or hold.life.pin(pin):
        raise hold.lost_error()
    try:
        _pin(hold, database, late=late)
        pin.leases.add(hold.claim.owner)
    except BaseException:
        hold.life.unpin(pin)
        raise
    return here


def _pin_last(
    hold: Holding, connection: BaseDatabaseWrapper, database: str
) -> tuple[float, float]:
    """Renew a hold's row before the commit of its transaction."""
    try:
        return _pin(hold, database, late=True)
    except LockBackendError as error:
        if not _is_conflict(error, connection):
            raise
        raise LockBackendError(
            f"{hold.lock.key!r} cannot guard this transaction on database"
            f" {database!r}, which conflicts with concurrent ones. {ADVICE}. ({error})"
        ) from error


def _pin(hold: Holding, database: str, *, late: bool) -> tuple[float, float]:
    """Lock and renew a hold's row in the open transaction.

    Return when the request was sent, and the ttl. ``late`` says that the lease may have
    expired.
    """
    sent = clock.now()
    # At most until its max_hold.
    claim = replace(hold.next_claim(), late=late)
    try:
        stands = request(hold.backend.pin, claim, database)
    except LockBackendError:
        # The transaction is now unusable.
        forbid_commit(connection_of(database))
        raise
    if not stands:
        raise hold.end_as_lost()
    return sent, claim.ttl


def _committed(hold: Holding, sent: float, ttl: float) -> None:
    """Record the commit of a transaction that pinned the key.

    The lease counts from its last statement.
    """
    if not hold.is_over:
        hold.lease.record_answer(sent, ttl)
    hold.life.unpin()
    keeper.check_soon()


def _is_conflict(error: LockBackendError, connection: BaseDatabaseWrapper) -> bool:
    """Return whether another session caused the error, and a retry may succeed."""
    cause = error.__cause__
    return isinstance(cause, DatabaseError) and _is_lost_race(cause, connection)


def _is_lost_race(error: DatabaseError, connection: BaseDatabaseWrapper) -> bool:
    engine = engine_of(connection)
    return not engine.one_writer and engine.code_of(error) in engine.lost_race


def _database_for(hold: Holding, using: str | None) -> str:
    backend = hold.backend
    if not backend.supports_guard:
        raise RuntimeError(
            f"{type(backend).__name__} cannot guard a transaction, because its locks"
            " are not in the database of the data. Compare hold.token in every write"
            " (FencedModel), or use a database backend."
        )
    own = backend.database
    if using is None or using == own or not own:
        return own
    if _address_of(using) != _address_of(own):
        raise RuntimeError(
            f"The lock on {hold.lock.key!r} is in database {own!r}, and cannot guard a"
            f" transaction on the other database {using!r}. Put the lock into the"
            " database of the data (OPTIONS['database'])."
        )
    return using


def _address_of(database: str) -> tuple[Any, ...]:
    """Return a value that is equal for all aliases of one database."""
    connection = connection_of(database)
    settings = connection.settings_dict
    address = settings["NAME"], settings["HOST"] or "localhost", str(settings["PORT"])
    return connection.vendor, *map(str, address)
