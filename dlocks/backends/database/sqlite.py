"""Limits on how long SQLite waits for its writer, and how it commits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from dlocks.backends.database.connection import DatabaseConnection

# Milliseconds for which SQLite waits for its single writer within one attempt. This is
# enough for a short write of another process.
SQLITE_BUSY_TIMEOUT_MS = 100
# The value of NORMAL for the setting "synchronous". In WAL mode a commit is then not
# flushed, and a crash can lose only the last commits.
SQLITE_NORMAL = 1


class SQLiteLimits(DatabaseConnection):
    """The part that limits settings of an SQLite connection within a block."""

    def _with_short_timeout(self) -> AbstractContextManager[object]:
        """Limit how long SQLite waits for its single writer.

        On other engines no statement waits.
        """
        return self._with_at_most("busy_timeout", SQLITE_BUSY_TIMEOUT_MS)

    def _without_flush(self) -> AbstractContextManager[object]:
        """Commit without a flush on SQLite, so that a crash may lose the change.

        On PostgreSQL the statement itself has this option.
        """
        return self._with_at_most("synchronous", SQLITE_NORMAL)

    def _with_at_most(self, setting: str, most: int) -> AbstractContextManager[object]:
        connection: Any = self.connection
        if connection.vendor != "sqlite" or self.in_transaction(connection):
            return _AS_USUAL
        return _with_limit(
            self._session(), setting, most, unless=connection.Database.Error
        )


_AS_USUAL = nullcontext()


@contextmanager
def _with_limit(
    raw: Any, setting: str, most: int, *, unless: type[Exception]
) -> Iterator[None]:
    """Limit a setting of an sqlite3 connection to ``most`` within the block.

    Nothing is changed if reading the setting raises ``unless``.
    """
    try:
        ((usual,),) = raw.execute(f"PRAGMA {setting}").fetchall()
        # With a rollback journal, the whole database depends on the order of the
        # flushes.
        stays = setting == "synchronous" and raw.execute(
            "PRAGMA journal_mode"
        ).fetchall() != [("wal",)]
    except unless:
        # Reading a setting may require reading the file. The next statement reports the
        # problem with the file.
        usual, stays = most, True
    if stays or usual <= most:
        yield
        return
    # Build the statement now. If it were built in the ``finally`` block, an interrupt
    # could arrive before it is complete.
    as_usual = f"PRAGMA {setting} = {usual}"
    try:
        raw.execute(f"PRAGMA {setting} = {most}")
        # This is a generator instead of a class. A signal at the beginning of
        # __exit__() would leave the setting changed.
        yield
    finally:
        try:  # noqa: SIM105 (a signal within suppress() would leave the setting changed)
            raw.execute(as_usual)
        except unless:
            # After an interrupt the connection may be closed already.
            pass
