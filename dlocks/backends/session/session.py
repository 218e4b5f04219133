"""A database session of its own for locks."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import Error

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.pools import unpooled
from dlocks.runtime.requests import request
from dlocks.runtime.threads import BackgroundThread, Latch

# Bounds in seconds for a statement that waits, on PostgreSQL. After it, a waiter queues
# again behind the others. The bound grows by an eighth of the wait. Waiters that came
# first are thus at the head of the queue for longer.
SHORTEST_SLICE = 2.0
LONGEST_SLICE = 3.0

# Seconds after which a reply is overdue. A later request learns of it.
REPLY_TIMEOUT = 0.5

# The first row of a reply.
Row = Sequence[Any]
# A lock of the server: its name, and whether it is shared.
Lock = tuple[str | int, bool]

# Maximum idle timeout in seconds. Larger values exceed the range of the servers'
# settings.
LONGEST_IDLE = 86400 * 20


class SessionDiedError(Exception):
    """A session that has ended, and its locks with it."""


def side_by_side(steps: Iterable[Callable[[], object]]) -> None:
    """Call functions that send requests, and wait a moment for them.

    The network may have lost one connection. The others must not wait for it.
    """
    threads = []
    for step in steps:
        # A finalizer that strikes in it is refused.
        thread = BackgroundThread("dlocks-session", partial(request, step))
        try:
            threads.append(thread.start())
        except RuntimeError:
            # Python is about to exit, and no thread can start any more.
            step()
    until = clock.real_now() + REPLY_TIMEOUT
    for started in threads:
        if started is not None:
            started.join(max(0.0, until - clock.real_now()))


class Session:
    """A private connection. The first statement connects.

    After ``idle`` seconds without a statement, the server ends the session. ``pooled``
    states that a pooler in between keeps sessions. ``mutex`` is the turn to send
    requests.
    """

    # Whether locks can be shared, and can belong to a transaction.
    shares: ClassVar[bool]
    # The SQL by name. The statements that try or wait return the token. It is 0 if a
    # wait has ended without the lock, and goes on with the next statement.
    statements: Mapping[str, str]
    # The server's idle timeout for one second.
    idle_unit: ClassVar[int]
    # Return the engine's code of an error. It is ``cancelled`` for a cancelled
    # statement, and begins with one of ``ended`` if the session has ended.
    code: Callable[[Error], str]
    cancelled: ClassVar[str]
    ended: ClassVar[tuple[str, ...]]
    # Set ``pid`` and ``reported_pid`` without changing the session. Behind a pooler,
    # another client may use it next.
    identify: Callable[[], None]
    # Configure the session for locks.
    begin: Callable[[], None]
    # Reads the rest of the reply to an interrupted statement.
    read_rest: Callable[[], None]
    # The session's number, or 0 until it is connected, and the one that was reported at
    # first. A pooler invents it.
    pid: int = 0
    reported_pid: int
    # The value with which another session cancels its statement. After a restart or
    # failover, another session may have the same number.
    identity: str = ""

    def __init__(self, database: str, idle: float, *, pooled: bool) -> None:
        self.database = database
        self.idle = idle
        self.pooled = pooled
        self.mutex = threading.RLock()
        self._closing = threading.RLock()
        self.wrapper: Any = None
        self.dead = False
        self.is_asking = False
        self.asked_at = -math.inf
        # Seconds for which the next statement waits.
        self.slice = SHORTEST_SLICE
        # Whether a request was interrupted before its reply was read, and the locks
        # that the server may have granted or released without a reply.
        self.is_unread = False
        self.doubted: set[Lock] = set()
        # The entries of ``Claims`` that hold, request or await a key here, by name.
        self.at: dict[str | int, tuple[Any, ...]] = {}
        # Set when the wait of its last waiter has ended.
        self.wait_over = Latch()
        # When the last statement was sent that the server has answered.
        self.stood_at = clock.now()

    def __del__(self) -> None:
        # An interrupt may have kept end() from closing the connection.
        self._close()

    def options(self) -> dict[str, Any]:
        return {}

    # Statements.

    def ask(self, statement: str, value: object = 0, comment: str = "") -> Row | None:
        """Send a statement, and return the first row of its reply.

        It is None if the statement was cancelled, and empty if it returns no rows.
        """
        with self.mutex:
            if self.is_asking:
                raise LockBackendError(
                    "A signal handler has interrupted a request on the same session."
                )
            try:
                self.asked_at, self.is_asking = clock.now(), True
                if self.wrapper is None and not self.dead:
                    self.connect()
                self.refuse_if_dead()
                if self.is_unread:
                    self.read_rest()
                sent = clock.now()
                row = self._reply(comment + self.statements[statement], value)
                self.stood_at = sent
                return row
            except SessionDiedError:
                self.dead = True
                raise
            finally:
                self.is_asking = False
                if self.dead:
                    self._close()

    def _reply(self, sql: str, value: object) -> Row | None:
        row: Row | None = None
        self.is_unread = True
        try:
            row = self.first_row(sql, {"value": value})
        except Error as error:
            self.is_unread = False
            code = self.code(error)
            if code.startswith(self.ended):
                raise SessionDiedError(str(error).strip()) from error
            if code != self.cancelled:
                raise LockBackendError(
                    f"Database {self.database!r} rejected a lock statement: {error}"
                ) from error
        self.is_unread = False
        return row

    def free(self, lock: Lock) -> bool:
        """Release a lock, and return whether the session had it.

        It stays doubted, until its claim is no longer on the session.
        """
        name, shared = lock
        cancelled = 0
        while cancelled < 5:
            was_doubted = lock in self.doubted
            self.doubted.add(lock)
            row = self.ask("free shared" if shared else "free", name)
            # An administrator may cancel any statement. A doubted lock is released
            # until the server says that the session does not have it.
            if row is None:
                cancelled += 1
            elif not (row[0] and was_doubted):
                return bool(row[0]) or was_doubted
        raise SessionDiedError("the release of a lock was cancelled")

    def first_row(self, sql: str, values: Any = None) -> Any:
        with self.wrapper.cursor() as cursor:
            cursor.execute(sql, values)
            return cursor.fetchone() if cursor.description else ()

    def set_idle(self, seconds: float) -> None:
        """Let the server end the session after ``seconds`` without a statement."""
        # The reply may be lost.
        self.idle = min(self.idle, seconds)
        if self.ask("idle", self.idle_setting(seconds)) is None:
            raise LockBackendError(
                f"A lock request to database {self.database!r} was cancelled."
            )
        self.idle = seconds

    def idle_setting(self, seconds: float) -> int:
        return math.ceil(min(seconds, LONGEST_IDLE) * self.idle_unit)

    def ping(self) -> None:
        """Raise SessionDiedError unless the server still has the session."""
        if (row := self.ask("ping")) is not None and row[0] != self.pid:
            raise SessionDiedError("a pooler has assigned it to another client")

    @property
    def is_new(self) -> bool:
        """Return whether no request has begun."""
        return self.asked_at == -math.inf

    @property
    def is_silent(self) -> bool:
        """Return whether a reply is overdue, perhaps that to a statement that waits."""
        return self.is_asking and clock.now() > self.asked_at + REPLY_TIMEOUT

    # The connection.

    def connect(self) -> None:
        try:
            self._open()
            if self.pid != self.reported_pid:
                self._refuse_pooler()
            self.begin()
        except BaseException as error:
            self._close()
            if isinstance(error, Error):
                raise LockBackendError(
                    f"No session for locks on database {self.database!r}:"
                    f" {str(error).strip()}"
                ) from error
            raise
        self.stood_at = clock.now()

    def _open(self) -> None:
        self.wrapper = unpooled(connections[self.database])
        settings = self.wrapper.settings_dict
        settings["AUTOCOMMIT"] = True
        settings["OPTIONS"] = {**self.options(), **settings["OPTIONS"]}
        self.wrapper.inc_thread_sharing()
        self.wrapper.ensure_connection()
        self.identify()

    def _refuse_pooler(self) -> None:
        """Raise ImproperlyConfigured unless the pooler keeps sessions."""
        solutions = (
            "Connect this alias of DATABASES to the server itself, or use"
            " dlocks.backends.database.PessimisticBackend."
        )
        if not self.pooled:
            raise ImproperlyConfigured(
                f"Database {self.database!r} is behind a pooler (the session is"
                f" {self.pid}, and the connection reports {self.reported_pid}), which"
                f" could grant one lock to several callers. {solutions} If the pooler"
                " keeps sessions (pool_mode = session), set"
                " OPTIONS['session_pooling'] = True."
            )
        other = type(self)(self.database, self.idle, pooled=True)
        try:
            other._open()
        finally:
            other._close()
        if other.pid == self.pid:
            raise ImproperlyConfigured(
                f"The pooler of database {self.database!r} assigned session {self.pid}"
                " to two connections at a time, although OPTIONS['session_pooling'] is"
                f" set. Set its pool_mode to session. {solutions}"
            )

    def refuse_if_dead(self) -> None:
        if self.dead:
            raise SessionDiedError("it was closed")

    def end(self) -> None:
        """End the session, from any thread.

        A thread that waits for a reply gets an error, and closes the connection.
        """
        self.dead = True
        # A request that begins from here on finds the session dead.
        if not self.is_asking:
            self._close()
            return
        # Another file could have the number once the connection is closed.
        with self._closing, suppress(Exception):
            file = os.dup(self.wrapper.connection.fileno())
            with socket.socket(fileno=file) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        with self._closing, suppress(Exception):
            wrapper, self.wrapper = self.wrapper, None
            wrapper.close()
