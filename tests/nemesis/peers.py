"""Other locks behind the interface of the worker, used as they document it.

They run under the same faults. None of them reports a lost lock to its holder, so a
hold counts until its block ends, as its users assume. The checker judges their records
as it judges those of dlocks. Their tokens are the times of the grants.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from dlocks import LockBackendError, LockLost, LockTimeout
from tests.nemesis.task import Plan

# Seconds between two attempts with locks that do not wait by themselves.
AGAIN = 0.05
FOREVER = float("inf")


class PeerHold:
    held = True
    remaining = FOREVER

    def __init__(self, release: Callable[[], object]) -> None:
        self.token = time.monotonic_ns()
        self.release = release


class Peer:
    """One lock of a peer.

    ``redis`` is true if it is in a Redis and not in the database.
    """

    label = ""
    through = "direct"
    redis = False

    def __init__(self, plan: Plan, key: str, timeout: float) -> None:
        self.plan = plan
        self.key = key
        self.timeout = timeout

    def acquire(self) -> PeerHold:
        raise NotImplementedError

    def busy(self) -> LockTimeout:
        return LockTimeout(
            f"{self.key!r} is taken", key=self.key, timeout=self.timeout, holder=None
        )

    def lost(self) -> LockLost:
        return LockLost(
            f"{self.key!r} belongs to another holder", key=self.key, token=0
        )

    def until(self, tried: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.timeout
        while not tried():
            if time.monotonic() >= deadline:
                raise self.busy()
            time.sleep(AGAIN)


class RedisPy(Peer):
    label = "redis-py"
    redis = True

    def acquire(self) -> PeerHold:
        import redis

        lock = _redis().lock(
            self.key, timeout=self.plan.ttl, blocking_timeout=self.timeout
        )
        try:
            if not lock.acquire():
                raise self.busy()
        except redis.RedisError as error:
            raise LockBackendError(str(error)) from error

        def release() -> None:
            try:
                lock.release()
            except redis.exceptions.LockError as error:
                raise self.lost() from error
            except redis.RedisError as error:
                raise LockBackendError(str(error)) from error

        return PeerHold(release)


class DBMutex(Peer):
    label = "django-db-mutex"

    def acquire(self) -> PeerHold:
        from db_mutex.db_mutex import db_mutex
        from db_mutex.exceptions import DBMutexError, DBMutexTimeoutError
        from django.conf import settings

        settings.DB_MUTEX_TTL_SECONDS = self.plan.ttl
        mutex = db_mutex(self.key)

        def tried() -> bool:
            try:
                mutex.start()
            except DBMutexError:
                return False
            return True

        def release() -> None:
            try:
                mutex.stop()
            except DBMutexTimeoutError as error:
                raise self.lost() from error

        self.until(tried)
        return PeerHold(release)


class Advisory(Peer):
    label = "pg_advisory_lock behind PgBouncer"
    through = "pgbouncer"

    def acquire(self) -> PeerHold:
        self.until(lambda: self._ask("pg_try_advisory_lock"))

        def release() -> None:
            if not self._ask("pg_advisory_unlock"):
                raise self.lost()

        return PeerHold(release)

    def _ask(self, function: str) -> bool:
        from django.db import connection

        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {function}(hashtextextended(%s, 0))", [self.key])
            (answer,) = cursor.fetchone()
        return bool(answer)


PEERS: dict[str, type[Peer]] = {
    "redis-py": RedisPy,
    "django-db-mutex": DBMutex,
    "advisory": Advisory,
}

_clients: dict[int, Any] = {}


def _redis() -> Any:
    import redis

    # The client of the parent process must not be used after a fork.
    if os.getpid() not in _clients:
        _clients[os.getpid()] = redis.Redis(
            port=int(os.environ["DLOCKS_TEST_REDIS"]),
            password=os.environ["DLOCKS_TEST_PASSWORD"],
            socket_timeout=5,
        )
    return _clients[os.getpid()]
