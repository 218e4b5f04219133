"""A transaction that commits under a hold, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import transaction

from dlocks import clock
from dlocks.backends.database.dialects import refuse_lost
from dlocks.connected import connection_of
from dlocks.exceptions import LockBackendError, LockError
from dlocks.transactions import Mark, why_untold

if TYPE_CHECKING:
    from dlocks.holds import Hold


@contextmanager
def guarded(hold: Hold, using: str | None, atomic: dict[str, Any]) -> Iterator[None]:
    """
    Open a transaction that has the lock row locked, and written, from its beginning: so long nobody takes the key.

    The row is written again at the end, so that the lease is whole when the transaction is committed.
    """
    database = _database_for(hold, using)
    connection = connection_of(database)
    if not connection.get_autocommit() and (why := why_untold(connection)) is not None:
        refuse_lost(connection)
        raise RuntimeError(f"{hold.key!r} cannot guard this transaction. {why}.")
    if hold.scope == "transaction" and connection is not hold._connection:
        raise RuntimeError(
            f"{hold.key!r} belongs to a transaction on {hold.backend.database!r}, which ends by itself: it cannot guard"
            f" another one on {database!r}. Take the lock before the transactions, or write on that alias."
        )
    try:
        with transaction.atomic(using=database, **atomic):
            yield from _pinned(hold, connection, database)
    finally:
        # Or else the keeper would think it open where the connection was lost on the way out of it.
        hold.unpin()


def _pinned(hold: Hold, connection: Any, database: str) -> Iterator[None]:
    if hold.scope == "transaction":
        # The row is this transaction's already.
        hold.check()
        yield
        return
    if hold.is_over:
        raise hold._told_lost()
    # A savepoint around may take the writing back, though the row stays locked. First of what is done on commit.
    here = Mark.here(connection)
    pin = Mark.of_lock(connection)
    # Before the row is written: whatever becomes of that, the keeper asks nothing meanwhile.
    hold.pinned_in.append(pin)
    try:
        _pin(hold, database)
    except LockError:
        # It was not. Where the connection was lost, the keeper may have found that by itself.
        with suppress(ValueError):
            hold.pinned_in.remove(pin)
        raise
    yield
    if not connection.needs_rollback:
        here.at_commit.append(partial(hold.committed, _pin(hold, database)))


def _pin(hold: Hold, database: str) -> float:
    """Lock and renew the row of the hold in the open transaction; return when that was asked for."""
    sent = clock.now()
    try:
        stands = hold.backend.pin(hold.claim, database)
    except LockBackendError:
        # The transaction is of no use any more.
        connection_of(database).needs_rollback = True
        raise
    if not stands:
        hold.lose("the backend says it is no longer this hold's")
        raise hold.lost_error()
    return sent


def _database_for(hold: Hold, using: str | None) -> str:
    backend = hold.backend
    if not backend.supports_guard:
        raise RuntimeError(
            f"{type(backend).__name__} cannot guard a transaction: that takes a lock in the database of the data. "
            "Compare hold.token in every write (FencedModel), or use a backend of the database family."
        )
    own = backend.database
    if using is None or using == own:
        return own
    if _place_of(using) != _place_of(own):
        raise RuntimeError(
            f"The lock on {hold.key!r} is in database {own!r}, and {using!r} is another one: a transaction there "
            "cannot be guarded. Put the lock where the data is (OPTIONS['database'])."
        )
    return using


def _place_of(database: str) -> tuple[Any, ...]:
    """Return what is the same for two aliases of one database."""
    connection = connection_of(database)
    settings = connection.settings_dict
    place = settings["NAME"], settings["HOST"] or "localhost", str(settings["PORT"])
    return connection.vendor, *map(str, place)
