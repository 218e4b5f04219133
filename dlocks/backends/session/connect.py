"""The connection to a database's engine. Poolers that share sessions are refused."""

from __future__ import annotations

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.utils import Error

from dlocks.backends.session.engine_sessions import EngineSession
from dlocks.backends.session.mysql import MySQLEngineSession
from dlocks.backends.session.postgresql import PostgreSQLEngineSession
from dlocks.exceptions import LockBackendError
from dlocks.runtime.pools import unpooled

ENGINE_SESSIONS: dict[str, type[EngineSession]] = {
    "postgresql": PostgreSQLEngineSession,
    "mysql": MySQLEngineSession,
}


def engine_session_class(database: str) -> type[EngineSession]:
    """Return the class for the engine of a database.

    Raise ImproperlyConfigured if the engine has no session locks.
    """
    vendor = connections[database].vendor
    if vendor not in ENGINE_SESSIONS:
        raise ImproperlyConfigured(
            "Session locks need PostgreSQL, MariaDB or MySQL, but database"
            f" {database!r} is {vendor}. Use"
            " dlocks.backends.database.PessimisticBackend."
        )
    return ENGINE_SESSIONS[vendor]


def connect(database: str, name: str, idle: float, *, pooled: bool) -> EngineSession:
    """Open a session that no other thread and no pool uses.

    ``pooled`` states that a pooler in between keeps sessions. This is tested. Every
    other pooler is refused.
    """
    wire = _engine_session(database, idle)
    try:
        if wire.pid != wire.reported_pid:
            _refuse_pooler(database, wire, pooled=pooled)
        wire.begin(name)
    except Error as error:
        wire.close()
        raise LockBackendError(
            f"No session for locks on database {database!r}: {error}"
        ) from error
    except BaseException:
        wire.close()
        raise
    return wire


def _engine_session(database: str, idle: float) -> EngineSession:
    kind = engine_session_class(database)
    wrapper = unpooled(connections[database])
    wrapper.inc_thread_sharing()
    try:
        wrapper.ensure_connection()
        return kind(wrapper, idle)
    except Error as error:
        wrapper.close()
        raise LockBackendError(
            f"No session for locks on database {database!r}: {error}"
        ) from error
    except BaseException:
        wrapper.close()
        raise


def _refuse_pooler(database: str, wire: EngineSession, *, pooled: bool) -> None:
    """Raise ImproperlyConfigured unless the pooler keeps sessions.

    ``pooled`` must state this, and a second connection must get another session.
    """
    if not pooled:
        raise ImproperlyConfigured(
            f"Database {database!r} is behind a pooler (the session is {wire.pid}, and"
            f" the connection reports {wire.reported_pid}). A session lock needs its"
            " own session while it is held. A pooler that assigns sessions per"
            " transaction"
            " or statement would grant one lock to several callers. Connect this alias"
            " of DATABASES to the server itself, or use"
            " dlocks.backends.database.PessimisticBackend. If the pooler keeps sessions"
            " (pool_mode = session), set OPTIONS['session_pooling'] = True."
        )
    other = _engine_session(database, wire.idle)
    other.close()
    if other.pid == wire.pid:
        raise ImproperlyConfigured(
            "OPTIONS['session_pooling'] states that the pooler of database"
            f" {database!r} keeps sessions, but it assigned session {wire.pid} to two"
            " connections at a time. Set its pool_mode to session, connect this alias"
            " of DATABASES to the server itself, or use"
            " dlocks.backends.database.PessimisticBackend."
        )
