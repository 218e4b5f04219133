"""The SQL and the errors that differ between the engines, with their defaults.

Each engine has a module of its own that overrides them. Parameters are named, since the
engines need them in different orders. ``{after}`` fragments take microseconds.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.db import DatabaseError

from dlocks.sql.direct import Reply

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.utils import Error

KEY = "key_resource = %(key)s"

Codes = frozenset[object]


class Dialect:
    """The SQL of one engine.

    ``table`` is already quoted. ``where`` names its columns without a table.
    """

    # The database's clock: the current time, not the start of the transaction.
    now: str
    # Microseconds since 1970 by that clock.
    ticks: str
    # Arithmetic with that clock, where ``{}`` is a column or a parameter.
    microseconds_from_now: str
    seconds_until_time: str
    microseconds_since_1970: str
    next_time: str
    # The codes of errors, by their meaning. The methods below explain each.
    lost_race: Codes = frozenset()
    locked: Codes = frozenset()
    read_only: Codes = frozenset()
    denied: Codes = frozenset()
    desynchronised: Codes = frozenset()
    cancelled: Codes = frozenset()
    rolled_back: Codes = frozenset()
    # The function that returns the larger of two values.
    greatest = "GREATEST"
    # ``show_isolation`` is the statement that reads the isolation level without taking
    # a snapshot. It may also read whether a lock wait timeout rolls back the whole
    # transaction. ``read_committed`` is a condition for WHERE that excludes such a
    # rollback, and requires that each statement takes its own snapshot.
    show_isolation = ""
    read_committed: str | None = None
    # Whether a row that a locking statement found and rejected may stay locked until
    # the transaction ends.
    locks_in_passing = False
    # Whether rows that a transaction has written stay locked until its end, even after
    # a rollback to a savepoint.
    keeps_locks = True
    # Whether a locked row fails only the statement, and its transaction continues.
    fails_alone = False
    # How a row is inserted that may already exist: the words before INTO and at the
    # end.
    insert_or_ignore = ("INSERT", "ON CONFLICT DO NOTHING")
    # The end of an insert that does nothing if a claim was inserted with the id that
    # the engine generates. Then the next id is generated. Other engines never generate
    # an id that is smaller than an existing one.
    unless_brought_along = ""
    returning = " RETURNING version"
    # How an insert outside a transaction avoids waiting for a transaction that has
    # written the same row: words before it, and a term that adds nothing to a number in
    # it.
    at_once = ""
    at_once_term = ""
    # The end of a SELECT that locks rows, except rows that another transaction has
    # locked.
    for_update = " FOR UPDATE SKIP LOCKED"
    # The same for a caller that waits for the rows in the engine's own queue, for up to
    # a second.
    for_update_in_turn = for_update
    # The same for a caller that waits for the end of another statement or step. Where
    # the engine can limit that, it waits for up to a second.
    for_update_patiently = " FOR UPDATE"
    # The words before a statement that joins a table to a subquery.
    unsafely = ""
    # The end of a statement that a crash of the server may lose. Such a statement need
    # not be flushed.
    without_flush = ""
    # An expression for the SELECT of a short transaction. With it the server ends the
    # transaction if the client stops responding.
    bound = ""
    # A block that does the same for that transaction.
    with_idle_limit: Any = staticmethod(nullcontext)
    # For a release within a transaction. ``count_in`` counts the waiters that joined
    # the queue while the row was locked. ``tell_first`` notifies the first of them on
    # commit.
    count_in = ""
    tell_first = ""
    # The settings that make a session read-only, and how to connect to a server that
    # accepts writes.
    read_only_settings = ""
    # ``queue`` adds a claim to the queue and counts it, in one round trip. It returns
    # the number of its position, and whether the key is free. The number is NULL if
    # another transaction had locked the lock row.
    #
    # ``hand_over`` passes a key to the first waiter, if the lock row meets
    # ``{condition}``. It returns whether there was a waiter, and how many claims wait.
    # If the waiter still has to be notified, it returns the channel, the owner, the
    # token, the lease in microseconds and the ``server``. Without a waiter it releases
    # the key, or with ``{if_taken}`` does nothing.
    #
    # Neither returns a row if it did nothing. ``{row_wait}`` limits the wait for the
    # lock row, where the engine supports that.
    queue = ""
    hand_over = ""
    if_taken = ""
    # An expression that tells servers with the same table apart, where there may be
    # several. A commit on one may not be visible on another yet.
    server = ""
    # Whether the end of a transaction that kept a key notifies its first waiter.
    commit_notifies = True
    # Whether a transaction that writes has the whole database to itself.
    one_writer = False

    def typed(self, parameter: str, of: str) -> str:
        """Return a parameter with its type, if the engine needs that.

        Some engines need it where rows are combined.
        """
        return parameter

    def after(self, parameter: str) -> str:
        """Return the time that many microseconds from now."""
        return self.after_column(f"%({parameter})s")

    def after_column(self, column: str) -> str:
        """Return the time that is the column's number of microseconds from now."""
        return self.microseconds_from_now.format(column)

    def seconds_until(self, column: str) -> str:
        """Return the seconds from now until the time in ``column``, as a float."""
        return self.seconds_until_time.format(column)

    def ticks_of(self, column: str) -> str:
        """Return the time in ``column`` as microseconds since 1970."""
        return self.microseconds_since_1970.format(column)

    def later_than(self, column: str) -> str:
        """Return the earliest time that is later than the one in ``column``."""
        return self.next_time.format(column)

    def next_version(self) -> str:
        """Return the next version: one more, or the clock if that is larger."""
        return f"{self.greatest}(version + 1, {self.ticks})"

    def token(self) -> str:
        """Return the next version, for a statement that writes and returns it."""
        return self.next_version()

    def new_row(self, table: str, values: str) -> str:
        """Return the part of an insert that gives the values of a key's row."""
        return f"VALUES ({values})"

    def update(
        self, table: str, assignments: str, where: str, primary: str = "key_resource"
    ) -> str:
        """Return a statement that writes the rows that it can lock at once.

        It skips rows that another transaction has locked.
        """
        picked = self._picked(table, where, primary)
        return f"UPDATE {table} SET {assignments} WHERE {picked}"

    def delete(self, table: str, where: str, primary: str = "key_resource") -> str:
        """Return a statement that deletes the rows that it can lock at once.

        It skips rows that another transaction has locked.
        """
        return f"DELETE FROM {table} WHERE {self._picked(table, where, primary)}"

    def _picked(self, table: str, where: str, primary: str) -> str:
        """Return what finds the rows that a statement writes."""
        return where

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        """Return the cheapest statement that writes one row or fails at once.

        It is for use outside a transaction.
        """
        return self.update(table, assignments, where)

    def release(self, table: str, assignments: str, where: str) -> str:
        """Return the cheapest statement by which a holder releases its own row.

        It is for use outside a transaction. It may do nothing if the lease has expired.
        The parameter ``after_key`` is the next string after the key.
        """
        return self.compare_and_swap(table, assignments, where)

    def write_or_leave(self, table: str, assignments: str, where: str) -> str:
        """Return a statement that writes one row or fails at once.

        It is for use inside a caller's transaction. If it does not write the row, it
        leaves it unlocked. Where the engine ``locks_in_passing``, its savepoint does
        that.
        """
        return self.update(table, assignments, where)

    def send(
        self,
        connection: BaseDatabaseWrapper,
        sql: str,
        parameters: Mapping[str, Any],
        *,
        through_a_pooler: bool,
        spin: float,
    ) -> Reply | None:
        """Execute a statement with the driver, without Django's cursor.

        The cursor must not be instrumented. Return None if the statement has to use the
        cursor.
        """
        return self.by_driver(connection.connection, sql, parameters)

    @staticmethod
    def by_driver(
        connection: Any, sql: str, parameters: Mapping[str, Any]
    ) -> Reply | None:
        """Execute a statement with the driver, if it is a known one."""
        return None

    def fitted(self, text: str, raw: Any) -> str:
        """Return a text in which unsupported characters are escaped.

        The connection ``raw`` of the driver cannot send or store them.
        """
        return escape_unencodable(text, "utf-8")

    def granted(self, reply: Reply) -> int | None:
        """Return the token that a grant wrote, or None if it wrote nothing."""
        return int(reply.rows[0][0]) if reply.rows else None

    def code_of(self, error: BaseException) -> object:
        """Return the code of an error that the server sent, or None without one."""
        raise NotImplementedError

    def is_contention(self, error: DatabaseError) -> bool:
        """Return whether the statement only lost a race, and can be sent again."""
        return self.code_of(error) in self.lost_race

    def is_locked(self, error: DatabaseError) -> bool:
        """Return whether the statement failed because of another row lock."""
        return self.code_of(error) in self.locked

    def is_read_only(self, error: Error) -> bool:
        """Return whether the session cannot write.

        After a failover its server may have become a replica.
        """
        return self.code_of(error) in self.read_only

    def is_denied(self, error: Error) -> bool:
        """Return whether the user has no right to the statement."""
        return self.code_of(error) in self.denied

    def is_desynchronised(self, error: Error) -> bool:
        """Return whether the connection, not the statement, is at fault.

        Such a connection cannot be used any more.
        """
        return self.code_of(error) in self.desynchronised

    def is_busy(self, raw: Any) -> bool:
        """Return whether a connection of the driver is in the middle of a statement.

        Where this cannot be known, the next statement raises an error.
        """
        return False

    def abort_statement(self, connection: BaseDatabaseWrapper) -> None:
        """Abort an interrupted statement outside of a transaction.

        Afterwards no statement is running, and no reply is unread.
        """

    def session_of(self, raw: Any) -> Any:
        """Return a value by which other threads can identify the session."""
        return raw

    def waits_for_table(
        self, other: BaseDatabaseWrapper, session: Any, tables: Sequence[str]
    ) -> bool:
        """Return whether a session's statement waits for a lock on a table.

        ``other`` is another connection to the database, and ``tables`` are the tables
        in question.
        """
        return False

    def cancel(self, other: BaseDatabaseWrapper, session: Any) -> None:
        """Cancel the statement of a session, with another connection if needed."""

    def was_cancelled(self, error: Error) -> bool:
        """Return whether the statement was cancelled."""
        return self.code_of(error) in self.cancelled

    def ends_transaction(self, error: DatabaseError) -> bool:
        """Return whether the server has rolled back the whole transaction.

        The next statement would be part of a new transaction.
        """
        return self.code_of(error) in self.rolled_back


def statement(name: str) -> str:
    """Return the SQL in a file of this folder, in one line and without comments."""
    lines = Path(__file__).with_name(f"{name}.sql").read_text().splitlines()
    return " ".join(" ".join(line.partition("--")[0] for line in lines).split())


def escape_unencodable(text: str, charset: str) -> str:
    """Return a text in which characters outside a character set are escaped."""
    # For some encodings, Python has other names than PostgreSQL.
    name = re.sub("(?i)^win(?=[0-9])", "cp", charset)
    name = re.sub("(?i)^koi8(?=[ru]$)", "koi8-", name)
    try:
        codec = codecs.lookup(name).name
    except LookupError:
        codec = "ascii"
    return text.encode(codec, "backslashreplace").decode(codec)
