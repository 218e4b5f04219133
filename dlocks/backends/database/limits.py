"""The turns of threads on SQLite, and the limits of its waits and flushes.

The turns earn promise 6 of docs/safety.md.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper

from dlocks.runtime.process import in_child

T = TypeVar("T")

# Milliseconds for which SQLite waits for its single writer within one attempt. This is
# enough for a short write of another process.
WRITER_WAIT = 100
# The value of NORMAL for SQLite's setting "synchronous". With a write-ahead log, a
# commit is then not flushed, and a crash can lose only the last commits.
NORMAL = 1

# The threads of a process take turns to write to SQLite, by alias. SQLite would let
# them try again and again. The one that has the writer would then get Python's own lock
# late, and a dozen threads would starve each other, and the renewals.
_turns: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)
in_child(_turns.clear)


def call_as_writer(
    connection: BaseDatabaseWrapper, work: Callable[[], T], *, flush: bool = True
) -> T:
    """Call ``work``, and limit how long SQLite waits for its single writer.

    Its flushes are limited too. This is no context manager. An interrupt at the edge of
    its block would leave the turn and the settings to the garbage collector, which may
    run much later and in another thread.
    """
    turn, is_refused = _turns[connection.alias], False
    try:
        is_refused = not turn.acquire(timeout=WRITER_WAIT / 1000)
        if is_refused:
            raise connection.Database.OperationalError(  # type: ignore[attr-defined]
                "The database is locked by another thread of this process."
            )
        return _call_limited(connection, work, flush)
    finally:
        if not is_refused:
            try:  # noqa: SIM105 (a signal within suppress() could come before the release)
                turn.release()
            except RuntimeError:
                # An interrupt came before the turn did.
                pass


def _call_limited(
    connection: BaseDatabaseWrapper, work: Callable[[], T], flush: bool
) -> T:
    raw: Any = connection.connection
    unless = connection.Database.Error  # type: ignore[attr-defined]
    # These statements restore the settings. An empty one does nothing.
    flush_again = wait_again = ""
    limits: list[str] = []
    try:
        # Reading a setting may require reading the file. The next statement reports the
        # problem with the file.
        ((wait,),) = raw.execute("PRAGMA busy_timeout").fetchall()
        if wait > WRITER_WAIT:
            limits.append(f"PRAGMA busy_timeout = {WRITER_WAIT}")
            wait_again = f"PRAGMA busy_timeout = {wait}"
        if not flush:
            ((level,),) = raw.execute("PRAGMA synchronous").fetchall()
            if level > NORMAL:
                ((mode,),) = raw.execute("PRAGMA journal_mode").fetchall()
                # With a rollback journal, the database depends on the order of the
                # flushes.
                if mode == "wal":
                    limits.append(f"PRAGMA synchronous = {NORMAL}")
                    flush_again = f"PRAGMA synchronous = {level}"
    except unless:
        limits.clear()
    try:
        for one in limits:
            raw.execute(one)
        return work()
    finally:
        try:
            # A signal may arrive after the first statement, but not before one. In a
            # loop, it would leave the second setting changed.
            try:
                raw.execute(flush_again)
            finally:
                raw.execute(wait_again)
        except unless:
            # After an interrupt the connection may be closed already.
            pass
