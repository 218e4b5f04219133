"""The cancellation of statements that wait for a lock on a whole table.

No statement of a lock waits for a row, but each of them waits while its table is
locked. A migration, VACUUM FULL, LOCK TABLE or FLUSH TABLES WITH READ LOCK does that.
PostgreSQL locks the tables of a statement before it executes any part of it, so nothing
within the statement can limit the wait. A setting before it would be one more
statement, and would remain in the caller's session.

Instead, one daemon thread finds the statements that take long. It checks on a
connection of its own whether the table is locked, and cancels a statement only then. A
statement may take long for other reasons, such as a commit that waits for a standby. A
release under ``waiting_allowed()`` waits, since an error would leave the key taken
until its lease expires.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dlocks.runtime import clock
from dlocks.runtime.greenlets import threads_are_green
from dlocks.runtime.pools import unpooled
from dlocks.runtime.process import in_child
from dlocks.runtime.threads import BackgroundThread, Flag, PythonIsExitingError
from dlocks.sql.direct import connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from django.db.backends.base.base import BaseDatabaseWrapper

    from dlocks.sql.dialect import Dialect

logger = logging.getLogger("dlocks")

# Seconds that a statement may take before its table is suspected to be locked.
LOCK_WAIT_LIMIT = 1.0
# The same for a database where a table was locked at most LOCKED_FOR seconds ago.
LOCKED_WAIT_LIMIT, LOCKED_FOR = 0.1, 3.0
# Seconds between two checks of the statements, and after a check that suspected a table
# without reason.
INTERVAL, PAUSE = 0.1, 1.0
# Seconds without a statement after which the thread sleeps until the next.
IDLE_AFTER = 2.0
# Seconds for which the server may take to accept a connection.
CONNECT_TIMEOUT = 5


class Watched:
    """A statement that is running, on a connection of its own thread."""

    __slots__ = (
        "began",
        "connection",
        "dialect",
        "is_over",
        "session",
        "tables",
        "thread",
        "was_cancelled",
    )

    def __init__(
        self, connection: BaseDatabaseWrapper, dialect: Dialect, tables: Sequence[str]
    ) -> None:
        self.connection = connection
        self.session = dialect.session_of(connection.connection)
        self.dialect = dialect
        self.tables = tables
        self.thread = threading.get_ident()
        self.began = clock.real_now()
        self.is_over = False
        self.was_cancelled = False


class Watchdog:
    def __init__(self) -> None:
        self._reset()
        in_child(self._reset)

    def _reset(self) -> None:
        # By thread. A thread runs one statement at a time, and replaces an entry that
        # an interrupt has left.
        self._watched: dict[int, Watched] = {}
        # Threads whose statements are not watched.
        self._patient: set[int] = set()
        self._thread = BackgroundThread("dlocks-watchdog", self._run)
        self._starting = threading.RLock()
        self._wakeup = Flag()
        self._pause = threading.Event()
        # Held while this statement is cancelled.
        self._cancelling = threading.Lock()
        self._cancelled: Watched | None = None
        self._is_idle = True
        self._began_at = 0.0
        self._locked_at: dict[str, float] = {}
        self._paused_until: dict[str, float] = {}

    def begin(
        self, connection: Any, dialect: Dialect, tables: Sequence[str]
    ) -> Watched | None:
        """Connect, and watch the statement that this thread sends next.

        Return None if the statement cannot be watched.
        """
        if (
            dialect.one_writer
            or not tables
            or threading.get_ident() in self._patient
            or threads_are_green()
        ):
            return None
        connect(connection)
        try:
            watched = Watched(connection, dialect, tables)
        except connection.Database.Error:
            # The statement raises it too.
            return None
        self._watched[watched.thread] = watched
        self._began_at = watched.began
        if self._is_idle:
            self._wake()
        return watched

    def end(self, watched: Watched | None) -> None:
        if watched is not None:
            watched.is_over = True
            if self._cancelled is watched:
                # Otherwise the cancellation could hit the next statement of the
                # session.
                with self._cancelling:
                    pass
            self._watched.pop(watched.thread, None)

    @contextmanager
    def waiting_allowed(self) -> Iterator[None]:
        """Let the statements of this thread wait as long as a table is locked."""
        thread = threading.get_ident()
        self._patient.add(thread)
        try:
            yield
        finally:
            self._patient.discard(thread)

    def _wake(self) -> None:
        # Without a thread, nothing cancels a statement that waits for a table.
        with self._starting, suppress(PythonIsExitingError):
            self._thread.start()
        self._wakeup.set()
        self._is_idle = False

    def _run(self) -> None:
        while True:
            if not self._watched and clock.real_now() > self._began_at + IDLE_AFTER:
                self._wakeup.clear()
                self._is_idle = True
                # A statement that began before the idle state is seen here. A statement
                # that begins from now on wakes the thread.
                if not self._watched:
                    self._wakeup.wait()
                self._is_idle = False
            # Not time.sleep(), which tests replace.
            self._pause.wait(INTERVAL)
            now = clock.real_now()
            for watched in list(self._watched.values()):
                alias = watched.connection.alias
                where_locked = (
                    now < self._locked_at.get(alias, -LOCKED_FOR) + LOCKED_FOR
                )
                limit = LOCKED_WAIT_LIMIT if where_locked else LOCK_WAIT_LIMIT
                if (
                    now > max(watched.began + limit, self._paused_until.get(alias, 0.0))
                    and not watched.is_over
                ):
                    self._examine(watched)

    def _examine(self, watched: Watched) -> None:
        """Cancel a statement if its table is locked."""
        alias = watched.connection.alias
        mine: Any = None
        try:
            # A pool may have no other connection.
            mine = unpooled(watched.connection)
            mine.settings_dict["OPTIONS"].setdefault("connect_timeout", CONNECT_TIMEOUT)
            if watched.dialect.waits_for_table(mine, watched.session, watched.tables):
                with self._cancelling:
                    self._cancelled = watched
                    if not watched.is_over:
                        watched.was_cancelled = True
                        watched.dialect.cancel(mine, watched.session)
                    self._cancelled = None
                self._locked_at[alias] = clock.real_now()
                return
        except Exception as error:  # noqa: BLE001 (the thread has other statements to watch)
            logger.debug(
                "Could not find out whether a table of database %r is locked: %s",
                alias,
                error,
            )
        finally:
            with suppress(Exception):
                mine.close()
        self._paused_until[alias] = clock.real_now() + PAUSE


table_watchdog = Watchdog()
