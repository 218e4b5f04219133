"""Statements that the driver executes, without Django's cursor.

Django's cursor costs more than some of these statements. They are sent like this only
outside of transactions, and only if the cursor is not instrumented.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from threading import get_ident
from types import FrameType, FunctionType, MethodType
from typing import Any, NamedTuple

from django.apps import apps
from django.db.backends import utils
from django.db.backends.base import base
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.utils import asyncio

# The longest statement, in characters, that is prepared or whose text is cached, and
# the number of cached texts. Statements about thousands of claims are longer, and
# rarely have the same number of claims again.
TEXT_AT_MOST = 10_000
TEXTS_AT_MOST = 1000


class Reply(NamedTuple):
    """The reply to a statement.

    It consists of the rows, the number of changed rows, and the last generated number.
    """

    rows: Any
    changed: int
    last_id: int = 0


def connect(wrapper: Any) -> None:
    """Connect if there is no connection yet.

    An ``ensure_connection()`` that is not Django's is called in any case.
    """
    if (
        wrapper.connection is None
        or type(wrapper).ensure_connection is not _ENSURE_CONNECTION
    ):
        wrapper.ensure_connection()


def is_in_statement() -> bool:
    """Return whether this thread is in a statement of Django's cursor.

    Then a signal handler or the garbage collector has called this.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _STATEMENTS:
        frame = frame.f_back
    return frame is not None


_CURSOR: Any = CursorWrapper
_STATEMENTS = {_CURSOR._execute.__code__, _CURSOR._executemany.__code__}


def is_instrumented(wrapper: Any) -> bool:
    """Connect, and return whether other code observes the statements.

    A statement that bypasses Django's cursor would escape it. Some instruments wrap
    ``execute()`` of one connection, as ``execute_wrapper()`` and Django's own log do,
    or of all. Others replace Django's cursor, for example to set up the session for
    each cursor.
    """
    connect(wrapper)
    kind: Any = type(wrapper)
    if (
        wrapper.execute_wrappers
        or wrapper.queries_logged
        # A SimpleTestCase leaves Django's own method there.
        or (
            "cursor" in vars(wrapper)
            and wrapper.cursor != MethodType(kind.cursor, wrapper)
        )
        or (wrapper.health_check_enabled and not wrapper.health_check_done)
        or not apps.ready
        or (
            kind.cursor,
            kind._cursor,
            kind._prepare_cursor,
            kind.make_cursor,
            CursorWrapper.execute,
        )
        != _DJANGOS_OWN
        or not _makes_djangos_cursors(kind, kind.create_cursor)
    ):
        return True
    if wrapper._thread_ident != get_ident():
        wrapper.validate_thread_sharing()
    return False


def _djangos(method: Any) -> Any:
    own = type(method) is FunctionType and any(
        method.__globals__ is vars(module) for module in (base, utils, asyncio)
    )
    return method if own else None


_BASE: Any = BaseDatabaseWrapper
# The methods at the time of import, unless other code had already replaced them.
_DJANGOS_OWN = tuple(
    map(
        _djangos,
        (
            _BASE.cursor,
            _BASE._cursor,
            _BASE._prepare_cursor,
            _BASE.make_cursor,
            CursorWrapper.execute,
        ),
    )
)

_ENSURE_CONNECTION = _djangos(_BASE.ensure_connection)


@lru_cache
def _makes_djangos_cursors(kind: Any, create_cursor: Any) -> bool:
    whose = next(
        (
            one
            for one in kind.__mro__
            if vars(one).get("create_cursor") is create_cursor
        ),
        None,
    )
    return whose is not None and all(
        one.__module__.startswith("django.") for one in (whose, create_cursor)
    )


def by_mysqlclient(
    connection: Any, sql: str, parameters: Mapping[str, Any]
) -> Reply | None:
    """Execute one round trip of statements with mysqlclient.

    Return the last rows, with the numbers of the last result. Return None if
    ``connection`` is not mysqlclient's, for example a proxy.
    """
    if len(sql) > TEXT_AT_MOST or type(connection).__module__ != "MySQLdb.connections":
        return None
    template, names = _as_bytes(sql, connection.encoding)
    literal = connection.literal
    while connection.next_result() == 0:
        # A cursor does this too. The last user of the connection may not have read all
        # results.
        connection.store_result()
    connection.query(
        template % {name: literal(parameters[parameter]) for name, parameter in names}
    )
    rows: Any = ()
    while True:
        if (result := connection.store_result()) is not None:
            rows = result.fetch_row(0)
        reply = Reply(rows, connection.affected_rows(), connection.insert_id())
        if connection.next_result() != 0:
            return reply


@lru_cache(TEXTS_AT_MOST)
def _as_bytes(sql: str, encoding: str) -> tuple[bytes, list[tuple[bytes, str]]]:
    return sql.encode(encoding), [
        (name.encode(encoding), name) for name in names_in(sql)
    ]


def by_sqlite3(
    connection: Any, sql: str, parameters: Mapping[str, Any]
) -> Reply | None:
    """Execute one statement on an open connection of sqlite3.

    Return None if ``connection`` is not sqlite3's, for example a proxy.
    """
    if len(sql) > TEXT_AT_MOST or type(connection).__module__ != "sqlite3":
        return None
    cursor = connection.cursor()
    try:
        cursor.execute(_with_colons(sql), parameters)
        return Reply(cursor.fetchall(), cursor.rowcount)
    finally:
        # An unfinished statement, such as an interrupted one, keeps the write lock.
        cursor.close()


@lru_cache(TEXTS_AT_MOST)
def _with_colons(sql: str) -> str:
    return sql % {name: f":{name}" for name in names_in(sql)}


def names_in(sql: str) -> list[str]:
    """Return the names of a statement's parameters, in the order of first use."""

    class Names(dict[str, str]):
        def __missing__(self, name: str) -> str:
            self[name] = ""
            return ""

    names = Names()
    # The formatting looks up each of the names.
    sql % names
    return list(names)
