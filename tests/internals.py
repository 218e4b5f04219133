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
    "admin": "dlocks.admin",
    "ResourceLockAdmin": "dlocks.admin:ResourceLockAdmin",
    "audit": "dlocks.audit",
    "Backend": "dlocks.backends.base:Backend",
    "HEARD_FOR": "dlocks.backends.base:HEARD_FOR",
    "KEPT_FOR": "dlocks.backends.base:KEPT_FOR",
    "database": "dlocks.backends.database",
    "DatabaseBackend": "dlocks.backends.database:DatabaseBackend",
    "InsertBackend": "dlocks.backends.database:InsertBackend",
    "OptimisticBackend": "dlocks.backends.database:OptimisticBackend",
    "PessimisticBackend": "dlocks.backends.database:PessimisticBackend",
    "Dialect": "dlocks.sql.dialects:Dialect",
    "MySQL": "dlocks.sql.dialects:MySQL",
    "by_sqlite3": "dlocks.sql.direct:by_sqlite3",
    "TEXT_AT_MOST": "dlocks.sql.direct:TEXT_AT_MOST",
    "line": "dlocks.backends.database.line",
    "Line": "dlocks.backends.database.line:Line",
    "neighbours": "dlocks.backends.database.neighbours",
    "PREPARED_AT": "dlocks.sql.prepared:PREPARED_AT",
    "PREPARED_AT_MOST": "dlocks.sql.prepared:PREPARED_AT_MOST",
    "Records": "dlocks.backends.database.records:Records",
    "schemas": "dlocks.sql.schemas",
    "_at_most": "dlocks.backends.database.statements:_at_most",
    "Statements": "dlocks.backends.database.statements:Statements",
    "statements": "dlocks.backends.database.statements",
    "DummyBackend": "dlocks.backends.dummy:DummyBackend",
    "MemoryBackend": "dlocks.backends.memory:MemoryBackend",
    "QuorumBackend": "dlocks.backends.quorum:QuorumBackend",
    "name_of": "dlocks.backends.redis:name_of",
    "RedisBackend": "dlocks.backends.redis:RedisBackend",
    "OPTIONS": "dlocks.backends.redis.connecting:OPTIONS",
    "TLS_OPTIONS": "dlocks.backends.redis.connecting:TLS_OPTIONS",
    "scripts": "dlocks.backends.redis.scripts",
    "PING_PATIENCE": "dlocks.backends.session:PING_PATIENCE",
    "SessionBackend": "dlocks.backends.session:SessionBackend",
    "Entry": "dlocks.backends.session.sessions:Entry",
    "sessions": "dlocks.backends.session.sessions",
    "zookeeper": "dlocks.backends.zookeeper",
    "ZooKeeperBackend": "dlocks.backends.zookeeper:ZooKeeperBackend",
    "KEYWORDS": "dlocks.backends.zookeeper.ensemble:KEYWORDS",
    "tickets": "dlocks.backends.zookeeper.tickets",
    "Crew": "dlocks.bench.crew:Crew",
    "CrewError": "dlocks.bench.crew:CrewError",
    "Chart": "dlocks.bench.picture:Chart",
    "draw": "dlocks.bench.picture:draw",
    "samples": "dlocks.bench.samples",
    "check_deployment": "dlocks.checks:check_deployment",
    "check_settings": "dlocks.checks:check_settings",
    "check_tables": "dlocks.checks:check_tables",
    "clock": "dlocks.clock",
    "BackendHandler": "dlocks.conf:BackendHandler",
    "backends": "dlocks.conf:backends",
    "DEFAULT_ALIAS": "dlocks.conf:DEFAULT_ALIAS",
    "options_of": "dlocks.conf:options_of",
    "connected": "dlocks.connected",
    "connection_of": "dlocks.connected:connection_of",
    "in_atomic_blocks": "dlocks.connected:in_atomic_blocks",
    "control_room": "dlocks.control_room",
    "LockDecorator": "dlocks.decorators:LockDecorator",
    "election": "dlocks.election",
    "handover": "dlocks.handover",
    "history": "dlocks.history",
    "History": "dlocks.history:History",
    "holds_by_caller": "dlocks.holds:holds_by_caller",
    "keeper": "dlocks.keeper:keeper",
    "Keeper": "dlocks.keeper:Keeper",
    "keeper_module": "dlocks.keeper",
    "PATIENCE": "dlocks.keeper:PATIENCE",
    "Attempt": "dlocks.locks:Attempt",
    "locks": "dlocks.locks",
    "lock_bench": "dlocks.management.commands.lock_bench",
    "After": "dlocks.models:After",
    "HoldRecord": "dlocks.models:HoldRecord",
    "LockClaim": "dlocks.models:LockClaim",
    "LockState": "dlocks.models:LockState",
    "ResourceLock": "dlocks.models:ResourceLock",
    "oversight": "dlocks.oversight",
    "polling": "dlocks.polling",
    "signals": "dlocks.signals",
    "Log": "dlocks.telemetry:Log",
    "telemetry": "dlocks.telemetry",
    "duration": "dlocks.text:duration",
    "shown_holder": "dlocks.text:shown_holder",
    "Mark": "dlocks.transactions:Mark",
    "open_connections": "dlocks.transactions:open_connections",
    "Claim": "dlocks.values:Claim",
    "Grant": "dlocks.values:Grant",
    "KEY_LENGTH": "dlocks.values:KEY_LENGTH",
    "Message": "dlocks.values:Message",
    "Ticket": "dlocks.values:Ticket",
    "UNLIMITED": "dlocks.values:UNLIMITED",
    "room_of": "dlocks.waiting:room_of",
    "Waiter": "dlocks.waiting:Waiter",
    "waiting": "dlocks.waiting",
    "WaitingRoom": "dlocks.waiting:WaitingRoom",
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
