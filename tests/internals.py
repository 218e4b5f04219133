"""The names of the package that are not public, for the tests.

Other files of the tests import them from here, so a move in the package changes one
file. Each name is imported when it is first used: some need optional packages, and some
need the settings.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The module of each name, or the module and the attribute in it.
NAMES = {
    "shown_duration": "dlocks.text:shown_duration",
    "WaitGraph": "dlocks.runtime.deadlocks:WaitGraph",
    "HeldKey": "dlocks.values:HeldKey",
    "WaitingClaim": "dlocks.values:WaitingClaim",
    "Backend": "dlocks.backends.base:Backend",
    "HEARTBEAT_TIMEOUT": "dlocks.backends.base:HEARTBEAT_TIMEOUT",
    "HANDOVER_LEASE": "dlocks.backends.base:HANDOVER_LEASE",
    "DatabaseBackend": "dlocks.backends.database.backend:DatabaseBackend",
    "InsertBackend": "dlocks.backends.database.strategies:InsertBackend",
    "OptimisticBackend": "dlocks.backends.database.strategies:OptimisticBackend",
    "PessimisticBackend": "dlocks.backends.database.strategies:PessimisticBackend",
    "KeyState": "dlocks.backends.table:KeyState",
    "notify": "dlocks.backends.database.notify",
    "history_buffers": "dlocks.history:_buffers",
    "database": "dlocks.backends.database",
    "holders": "dlocks.backends.database.holders",
    "queue": "dlocks.backends.database.queue",
    "Session": "dlocks.backends.database.session:Session",
    "RowLockedError": "dlocks.backends.database.session:RowLockedError",
    "call_as_writer": "dlocks.backends.database.limits:call_as_writer",
    "HistoryTable": "dlocks.backends.database.history:HistoryTable",
    "sql": "dlocks.sql",
    "TICKS": "dlocks.sql.clock:TICKS",
    "schemas": "dlocks.sql.schemas",
    "DummyBackend": "dlocks.backends.dummy:DummyBackend",
    "MemoryBackend": "dlocks.backends.memory:MemoryBackend",
    "RedisBackend": "dlocks.backends.redis.backend:RedisBackend",
    "SessionBackend": "dlocks.backends.session.backend:SessionBackend",
    "session_claims": "dlocks.backends.session.claims",
    "zookeeper": "dlocks.backends.zookeeper.backend",
    "waiters": "dlocks.runtime.waiters",
    "ZooKeeperBackend": "dlocks.backends.zookeeper.backend:ZooKeeperBackend",
    "tickets": "dlocks.backends.zookeeper.nodes",
    "check_tables": "dlocks.checks:check_tables",
    "clock": "dlocks.runtime.clock",
    "coroutines": "dlocks.runtime.coroutines",
    "backends": "dlocks.conf:backends",
    "options_of": "dlocks.conf:options_of",
    "connected": "dlocks.runtime.connected",
    "connection_of": "dlocks.runtime.connected:connection_of",
    "in_atomic_blocks": "dlocks.runtime.connected:in_atomic_blocks",
    "failures": "dlocks.election.failures",
    "history": "dlocks.history",
    "History": "dlocks.history:History",
    "callers": "dlocks.core.callers",
    "keeper": "dlocks.runtime.keeper:keeper",
    "Keeper": "dlocks.runtime.keeper:Keeper",
    "LOOK_EVERY": "dlocks.runtime.keeper:LOOK_EVERY",
    "Holding": "dlocks.core.holding:Holding",
    "together": "dlocks.core.together",
    "acquire": "dlocks.core.acquire",
    "leader": "dlocks.election.leader",
    "Acquisition": "dlocks.core.acquire:Acquisition",
    "Attempt": "dlocks.core.attempt:Attempt",
    "ThreadWakeup": "dlocks.core.acquire:ThreadWakeup",
    "helpers": "dlocks.testing",
    "After": "dlocks.sql.clock:After",
    "HoldRecord": "dlocks.models:HoldRecord",
    "LockClaim": "dlocks.models:LockClaim",
    "ResourceLock": "dlocks.models:ResourceLock",
    "operations": "dlocks.operations",
    "requests": "dlocks.runtime.requests",
    "signals": "dlocks.signals",
    "Log": "dlocks.telemetry:Log",
    "telemetry": "dlocks.telemetry",
    "duration": "dlocks.text:duration",
    "open_connections": "dlocks.transactions:open_connections",
    "Claim": "dlocks.values:Claim",
    "Grant": "dlocks.values:Grant",
    "Ticket": "dlocks.values:Ticket",
    "UNLIMITED": "dlocks.values:UNLIMITED",
    "waiters_of": "dlocks.runtime.waiters:waiters_of",
    "Waiter": "dlocks.runtime.waiters:Waiter",
    "Waiters": "dlocks.runtime.waiters:Waiters",
}


def __getattr__(name: str) -> Any:
    """Return an internal object by its name.

    Raise AttributeError for an unknown name.
    """
    if name not in NAMES:
        raise AttributeError(name)
    module, _, attribute = NAMES[name].partition(":")
    found = import_module(module)
    return getattr(found, attribute) if attribute else found


def disconnect(backend: Any) -> None:
    """Close the sessions of a session or ZooKeeper backend.

    The server releases its holds and ends its waits.
    """
    claims = backend.claims
    with claims.mutex:
        for entry in claims.all():
            if entry.waiting or hasattr(backend, "ensemble"):
                claims.forget(entry)
    if hasattr(backend, "ensemble"):
        claims.orphans.clear()
        end = import_module("dlocks.backends.zookeeper.ensemble").end
        end(backend.ensemble.detach())
        return
    for session in backend.sessions.all():
        backend.sessions.close(session)
