"""The locks that are measured: one small class each, with one interface.

``hold(key)`` of a contender is a context manager that holds the lock inside its block,
however long it has to wait for it. Peers are used as their documentation shows, and in
their favour where there is a choice: their lock objects are reused where possible, and
their leases are not renewed. dlocks is used as in a project: with a new ``db_lock()``
each time, and with renewal.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.conf import settings
from django.db import connections, transaction

# Seconds for which the locks of Redis outlive their holder.
TTL = 30

# The table of the contenders that have no table of their own.
TABLE = "benchmarks_row"
EPOCH = datetime(2020, 1, 1, tzinfo=UTC)


class Contender:
    """One lock.

    ``server`` is the server that it needs, or None.
    """

    # Keys that have a row in TABLE.
    KEYS = 1000

    name: ClassVar[str]
    label: ClassVar[str]
    server: ClassVar[str | None]
    # Whether it waits for a busy key. Other contenders can only be measured without
    # contention.
    waits: ClassVar[bool] = True

    def __init__(self) -> None:
        self._local = threading.local()

    def missing(self) -> str | None:
        """Return why it cannot be measured, or None."""
        return None

    def start(self) -> None:
        """Connect, in a process that has just been forked."""

    def stop(self) -> None:
        """Release what it holds between two measured holds."""

    def hold(self, key: str) -> AbstractContextManager[Any]:
        raise NotImplementedError

    def again(self, key: str, make: Callable[[], Any]) -> Any:
        """Return this thread's object for a key, created at the first use."""
        try:
            return self._local.made[key]
        except AttributeError:
            self._local.made = {}
        except KeyError:
            pass
        made = self._local.made[key] = make()
        return made


# dlocks.


class DlocksAlias(Contender):
    """One alias of DLOCKS."""

    using: ClassVar[str]

    def start(self) -> None:
        from dlocks import db_lock

        self.db_lock = db_lock

    def hold(self, key: str) -> AbstractContextManager[Any]:
        return self.db_lock(key, using=self.using, timeout=None)


class Dlocks(DlocksAlias):
    database: ClassVar[str]
    kind: ClassVar[str]

    def missing(self) -> str | None:
        return (
            None
            if self.kind in settings.KINDS
            else f"this dlocks has no {self.kind} backend"
        )


DATABASE_LABELS = {
    "postgresql": "PostgreSQL",
    "mariadb": "MariaDB",
    "mysql": "MySQL",
    "mysql-no-binlog": "MySQL without binary log",
    "sqlite": "SQLite",
}


def _dlocks(database: str, kind: str) -> type[Dlocks]:
    return type(
        f"Dlocks{database.title()}{kind.title()}",
        (Dlocks,),
        {
            "name": (
                f"dlocks-{database}" + ("" if kind == "pessimistic" else f"-{kind}")
            ),
            "label": f"dlocks, {DATABASE_LABELS[database]}, {kind}",
            "server": None if database == "sqlite" else database,
            "database": database,
            "kind": kind,
            "using": f"{database}-{kind}",
        },
    )


def _far(database: str) -> type[Dlocks]:
    """Return the same lock with processes that are not on the same host.

    They use NOTIFY on PostgreSQL, and poll on MariaDB.
    """
    near = _dlocks(database, "pessimistic")

    def start(self: Dlocks) -> None:
        from dlocks.backends.database import notify

        other_host = f"{secrets.token_hex(4)}_"
        notify.this_host = lambda: other_host  # type: ignore[assignment]
        near.start(self)

    name, label = (
        f"{near.name}-far",
        f"dlocks, {DATABASE_LABELS[database]}, each process on another host",
    )
    return type(
        f"{near.__name__}Far", (near,), {"name": name, "label": label, "start": start}
    )


def _in_transaction(database: str) -> type[Dlocks]:
    """Return a lock in transaction scope, including the transaction itself."""
    outside = _dlocks(database, "pessimistic")

    @contextmanager
    def hold(self: Dlocks, key: str) -> Iterator[None]:
        with transaction.atomic(using=self.database), outside.hold(self, key):
            yield

    name = f"dlocks-{database}-transaction"
    label = f"dlocks, {DATABASE_LABELS[database]}, in a transaction"
    return type(
        f"{outside.__name__}Transaction",
        (outside,),
        {"name": name, "label": label, "hold": hold},
    )


class DlocksGuard(DlocksAlias):
    """A transaction that is guarded by a hold, which is acquired once."""

    name, label, server = (
        "dlocks-postgresql-guard",
        "dlocks, PostgreSQL, hold.atomic()",
        "postgresql",
    )
    using, waits = "postgresql-pessimistic", False

    def hold(self, key: str) -> AbstractContextManager[Any]:
        lock = self.db_lock
        held = self.again(key, lambda: lock(key, using=self.using).acquire())
        return held.atomic()  # type: ignore[no-any-return]

    def stop(self) -> None:
        for held in self._local.made.values():
            held.release()


def _many_keys(count: int) -> type[DlocksAlias]:
    """Return one lock on keys that exist."""

    def hold(self: DlocksAlias, key: str) -> AbstractContextManager[Any]:
        keys = [f"many-{number}" for number in range(count)]
        return self.db_lock(*keys, using=self.using, timeout=None)

    attributes = {
        "name": f"dlocks-postgresql-{count}-keys",
        "label": f"dlocks, PostgreSQL, {count:,} keys at once",
        "server": "postgresql",
        "using": "postgresql-pessimistic",
        "waits": False,
        "hold": hold,
    }
    return type(f"Dlocks{count}Keys", (DlocksAlias,), attributes)


def _row_of_django(database: str) -> type[Contender]:
    """Return a row that Django's ORM locks, reads and saves in a transaction."""

    def start(self: Contender) -> None:
        from dlocks.models import ResourceLock

        rows = ResourceLock.objects.using(database)
        # Not a row of the keys, which another contender may have deleted.
        rows.get_or_create(
            pk="row", defaults={"hold_count": 0, "version": 1, "end_time": EPOCH}
        )

    @contextmanager
    def hold(self: Contender, key: str) -> Iterator[None]:
        from dlocks.models import ResourceLock

        with transaction.atomic(using=database):
            rows = ResourceLock.objects.using(database).select_for_update()
            row = rows.get(pk="row")
            yield
            row.version += 1
            row.save()

    label = (
        f"Django on {DATABASE_LABELS[database]}: atomic(),"
        " select_for_update().get(), save()"
    )
    attributes = {
        "name": f"django-row-{database}",
        "label": label,
        "server": database,
        "start": start,
        "hold": hold,
    }
    return type(f"DjangoRow{database.title()}", (Contender,), attributes)


class DlocksRedis(DlocksAlias):
    name, label, server, using = "dlocks-redis", "dlocks, Redis", "redis", "redis"


class DlocksRedisAlways(DlocksAlias):
    name, label = "dlocks-redis-always", "dlocks, Redis, appendfsync always"
    server, using = "redis-always", "redis-always"


class DlocksZooKeeper(DlocksAlias):
    name, label, server, using = (
        "dlocks-zookeeper",
        "dlocks, ZooKeeper",
        "zookeeper",
        "zookeeper",
    )


# Locks of the drivers and the databases themselves.


class Raw(Contender):
    """The lower limit: the plain driver with a committed UPDATE and a SELECT."""

    waits = False
    release: ClassVar[str] = "SELECT 1"
    ACQUIRE = (
        f"UPDATE {TABLE} SET version = version + 1, owner = %s, end_time = {{end}}"
        " WHERE name = %s"
    )

    def connect(self) -> Any:
        raise NotImplementedError

    def start(self) -> None:
        self.connection = self.connect()
        self.cursor = self.connection.cursor()

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        self.cursor.execute(self.acquire, ("an owner", key))
        yield
        self.cursor.execute(self.release, (key,) if "%s" in self.release else None)
        if "%s" not in self.release:
            self.cursor.fetchall()


class RawPostgreSQL(Raw):
    name, label, server = "raw-postgresql", "psycopg: UPDATE, SELECT 1", "postgresql"
    acquire = Raw.ACQUIRE.format(end="clock_timestamp() + interval '30 s'")

    def connect(self) -> Any:
        import psycopg

        database = settings.DATABASES["postgresql"]
        return psycopg.connect(
            host=database["HOST"],
            port=database["PORT"],
            user=database["USER"],
            dbname=database["NAME"],
            autocommit=True,
        )


class RawPairPostgreSQL(RawPostgreSQL):
    name, label = "raw-pair-postgresql", "psycopg: UPDATE, UPDATE without a flush"
    release = (
        f"UPDATE {TABLE} SET end_time = clock_timestamp() WHERE name = %s"
        " RETURNING set_config('synchronous_commit', 'off', true)"
    )

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        self.cursor.execute(self.acquire, ("an owner", key))
        yield
        self.cursor.execute(self.release, (key,))


class RawMariaDB(Raw):
    name, label, server = "raw-mariadb", "mysqlclient: UPDATE, SELECT 1", "mariadb"
    acquire = Raw.ACQUIRE.format(end="UTC_TIMESTAMP(6) + INTERVAL 30 SECOND")

    def connect(self) -> Any:
        import MySQLdb

        database = settings.DATABASES[self.server]
        return MySQLdb.connect(
            host=database["HOST"],
            port=int(database["PORT"]),
            user=database["USER"],
            database=database["NAME"],
            autocommit=True,
        )


class RawPairMariaDB(RawMariaDB):
    name, label = "raw-pair-mariadb", "mysqlclient: UPDATE, UPDATE"
    release = f"UPDATE {TABLE} SET end_time = UTC_TIMESTAMP(6) WHERE name = %s"


class RawMySQL(RawMariaDB):
    name, label, server = "raw-mysql", "mysqlclient on MySQL: UPDATE, SELECT 1", "mysql"


class RawPairMySQL(RawPairMariaDB):
    name, label, server = (
        "raw-pair-mysql",
        "mysqlclient on MySQL: UPDATE, UPDATE",
        "mysql",
    )


class RawNamedLockMySQL(RawMySQL):
    name, label = "raw-named-lock-mysql", "mysqlclient on MySQL: GET_LOCK, RELEASE_LOCK"
    release = "DO RELEASE_LOCK(%s)"

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        self.cursor.execute("SELECT GET_LOCK(%s, 60)", (key,))
        self.cursor.fetchall()
        yield
        self.cursor.execute(self.release, (key,))


class RawSQLite(Contender):
    """Two short transactions with Python's own driver."""

    name, label, server = (
        "raw-sqlite",
        "sqlite3: BEGIN IMMEDIATE, UPDATE, COMMIT, twice",
        None,
    )
    waits = False

    def start(self) -> None:
        import sqlite3

        self.connection = sqlite3.connect(
            settings.DATABASES["sqlite"]["NAME"], isolation_level=None, timeout=60
        )
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("PRAGMA synchronous=FULL")

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        self._write(
            "version = version + 1, owner = 'an owner', end_time = '2100-01-01'", key
        )
        yield
        self._write("end_time = '2000-01-01'", key)

    def _write(self, assignments: str, key: str) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.execute(
            f"UPDATE {TABLE} SET {assignments} WHERE name = ?", (key,)
        )
        self.connection.execute("COMMIT")


class DjangoCursor(Contender):
    """The same two statements through Django's cursor.

    Its wrappers and its query log see them, and so do tests.
    """

    waits = False
    engine: ClassVar[str]
    acquire: ClassVar[str]
    release: ClassVar[str] = "SELECT 1"

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        with connections[self.engine].cursor() as cursor:
            cursor.execute(self.acquire, ("an owner", key))
        yield
        with connections[self.engine].cursor() as cursor:
            cursor.execute(self.release, (key,) if "%s" in self.release else None)
            if "%s" not in self.release:
                cursor.fetchall()


class DjangoPostgreSQL(DjangoCursor):
    name, label, server = (
        "django-postgresql",
        "Django's cursor: UPDATE, SELECT 1",
        "postgresql",
    )
    engine, acquire = "postgresql", RawPostgreSQL.acquire


class DjangoMariaDB(DjangoCursor):
    name, label, server = (
        "django-mariadb",
        "Django's cursor: UPDATE, SELECT 1",
        "mariadb",
    )
    engine, acquire = "mariadb", RawMariaDB.acquire


class DjangoSQLite(DjangoCursor):
    name, label, server = "django-sqlite", "Django's cursor: UPDATE, UPDATE", None
    engine, acquire = "sqlite", Raw.ACQUIRE.format(end="'2100-01-01'")
    release = f"UPDATE {TABLE} SET end_time = '2000-01-01' WHERE name = %s"


class AdvisoryLock(Contender):
    name, label, server = "advisory", "pg_advisory_lock", "postgresql"

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_lock(hashtextextended(%s, 0))", [key])
        yield
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(hashtextextended(%s, 0))", [key])


class LockedRow(Contender):
    """A row that Django's ORM locks, and does not save."""

    name, label, server = (
        "django-locked-postgresql",
        "Django on PostgreSQL: atomic(), select_for_update().get()",
        "postgresql",
    )

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        from dlocks.models import ResourceLock

        with transaction.atomic(using="postgresql"):
            ResourceLock.objects.using("postgresql").select_for_update().get(pk="key-0")
            yield


class ForUpdate(Contender):
    name, label, server = (
        "for-update",
        "SELECT … FOR UPDATE in a transaction",
        "postgresql",
    )

    @contextmanager
    def hold(self, key: str) -> Iterator[None]:
        with (
            transaction.atomic(using="postgresql"),
            connections["postgresql"].cursor() as cursor,
        ):
            cursor.execute(
                f"SELECT version FROM {TABLE} WHERE name = %s FOR UPDATE", [key]
            )
            yield


# Packages for Django.


class DBMutex(Contender):
    server: ClassVar[str]
    waits = False

    def start(self) -> None:
        from db_mutex.db_mutex import db_mutex

        # It supports only this alias.
        connections["default"] = connections[self.server]
        self.db_mutex = db_mutex

    def hold(self, key: str) -> AbstractContextManager[Any]:
        return self.db_mutex(key)


class DBMutexPostgreSQL(DBMutex):
    name, label, server = (
        "db-mutex-postgresql",
        "django-db-mutex, PostgreSQL",
        "postgresql",
    )


class DBMutexMariaDB(DBMutex):
    name, label, server = "db-mutex-mariadb", "django-db-mutex, MariaDB", "mariadb"


class PgLock(Contender):
    name, label, server = "pglock", "django-pglock", "postgresql"

    def start(self) -> None:
        import pglock

        self.advisory = pglock.advisory

    def hold(self, key: str) -> AbstractContextManager[Any]:
        return self.advisory(key, using="postgresql")


class PgWare(Contender):
    name, label, server = "pgware", "django-pgware", "postgresql"

    def start(self) -> None:
        from django_pg_utils import advisory_lock

        self.advisory_lock = advisory_lock

    def hold(self, key: str) -> AbstractContextManager[Any]:
        return self.advisory_lock(key, using="postgresql")


# Redis and ZooKeeper.


class RedisPy(Contender):
    name, label, server = "redis-py", "redis-py", "redis"
    sleep: ClassVar[float] = 0.1

    def start(self) -> None:
        import redis

        port = (
            settings.REDIS_PORT
            if self.server == "redis"
            else settings.DURABLE_REDIS_PORT
        )
        self.client = redis.Redis(port=port, password=settings.PASSWORD)

    def hold(self, key: str) -> AbstractContextManager[Any]:
        return self.again(
            key, lambda: self.client.lock(key, timeout=TTL, sleep=self.sleep)
        )


class RedisPyOften(RedisPy):
    name, label = "redis-py-5ms", "redis-py, sleep=0.005"
    sleep = 0.005


class RedisPyAlways(RedisPy):
    name, label, server = (
        "redis-py-always",
        "redis-py, appendfsync always",
        "redis-always",
    )


class PythonRedisLock(RedisPy):
    name, label = "python-redis-lock", "python-redis-lock"

    def hold(self, key: str) -> AbstractContextManager[Any]:
        import redis_lock

        return self.again(key, lambda: redis_lock.Lock(self.client, key, expire=TTL))


class PythonRedisLockAlways(PythonRedisLock):
    name, label = "python-redis-lock-always", "python-redis-lock, appendfsync always"
    server = "redis-always"


class Kazoo(Contender):
    name, label, server = "kazoo", "kazoo", "zookeeper"

    def start(self) -> None:
        from kazoo.client import KazooClient

        self.client = KazooClient(
            hosts=f"127.0.0.1:{settings.ZOOKEEPER_PORT}", timeout=60
        )
        self.client.start(timeout=60)

    def hold(self, key: str) -> AbstractContextManager[Any]:
        return self.again(key, lambda: self.client.Lock(f"/benchmarks/{key}"))


CONTENDERS: dict[str, Contender] = {
    contender.name: contender()
    for contender in (
        _dlocks("postgresql", "pessimistic"),
        _dlocks("postgresql", "optimistic"),
        _dlocks("postgresql", "insert"),
        _dlocks("postgresql", "session"),
        _far("postgresql"),
        _in_transaction("postgresql"),
        _row_of_django("postgresql"),
        LockedRow,
        DlocksGuard,
        _many_keys(1_000),
        _many_keys(10_000),
        _dlocks("mariadb", "pessimistic"),
        _dlocks("mariadb", "optimistic"),
        _dlocks("mariadb", "insert"),
        _dlocks("mariadb", "session"),
        _far("mariadb"),
        _in_transaction("mariadb"),
        _row_of_django("mariadb"),
        _dlocks("mysql", "pessimistic"),
        _dlocks("mysql", "optimistic"),
        _dlocks("mysql", "session"),
        _dlocks("mysql-no-binlog", "pessimistic"),
        _in_transaction("mysql"),
        _row_of_django("mysql"),
        _dlocks("sqlite", "pessimistic"),
        _dlocks("sqlite", "optimistic"),
        DlocksRedis,
        DlocksRedisAlways,
        DlocksZooKeeper,
        RawPostgreSQL,
        RawPairPostgreSQL,
        RawMariaDB,
        RawPairMariaDB,
        RawMySQL,
        RawPairMySQL,
        RawNamedLockMySQL,
        RawSQLite,
        DjangoPostgreSQL,
        DjangoMariaDB,
        DjangoSQLite,
        AdvisoryLock,
        ForUpdate,
        DBMutexPostgreSQL,
        DBMutexMariaDB,
        PgLock,
        PgWare,
        RedisPy,
        RedisPyOften,
        RedisPyAlways,
        PythonRedisLock,
        PythonRedisLockAlways,
        Kazoo,
    )
}
