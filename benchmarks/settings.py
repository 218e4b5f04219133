"""The settings of the benchmarks: all engines, on ports from the environment."""

import os
from importlib.util import find_spec
from pathlib import Path

DIRECTORY = Path(os.environ.get("BENCHMARKS_DIRECTORY", "."))
# The password of the servers that tests/servers.py has started.
PASSWORD = os.environ.get("DLOCKS_TEST_PASSWORD", "")

# Some peers support only the alias "default". The process that measures such a peer
# replaces it.
DATABASES = {
    "default": {},
    "postgresql": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "dlocks",
        "PASSWORD": PASSWORD,
        "HOST": "127.0.0.1",
        "PORT": os.environ.get("BENCHMARKS_POSTGRESQL", ""),
    },
    "mariadb": {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "dlocks",
        "USER": "root",
        "PASSWORD": PASSWORD,
        "HOST": "127.0.0.1",
        "PORT": os.environ.get("BENCHMARKS_MARIADB", ""),
    },
    "mysql": {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "dlocks",
        "USER": "root",
        "PASSWORD": PASSWORD,
        "HOST": "127.0.0.1",
        "PORT": os.environ.get("BENCHMARKS_MYSQL", ""),
    },
    # MySQL as a server that is not replicated, like the MariaDB above.
    "mysql-no-binlog": {
        "ENGINE": "django.db.backends.mysql",
        "NAME": "dlocks",
        "USER": "root",
        "PASSWORD": PASSWORD,
        "HOST": "127.0.0.1",
        "PORT": os.environ.get("BENCHMARKS_MYSQL_NO_BINLOG", ""),
    },
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DIRECTORY / "benchmarks.sqlite3",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 60,
            # As durable as the servers: each commit is flushed.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL",
        },
    },
}
REDIS_PORT = int(os.environ.get("BENCHMARKS_REDIS", "0"))
DURABLE_REDIS_PORT = int(os.environ.get("BENCHMARKS_REDIS_ALWAYS", "0"))
ZOOKEEPER_PORT = int(os.environ.get("BENCHMARKS_ZOOKEEPER", "0"))

KINDS = {
    "pessimistic": "dlocks.backends.database.PessimisticBackend",
    "optimistic": "dlocks.backends.database.OptimisticBackend",
    "insert": "dlocks.backends.database.InsertBackend",
}
if find_spec("dlocks.backends.session"):
    KINDS["session"] = "dlocks.backends.session.SessionBackend"
DLOCKS = {
    f"{database}-{kind}": {"BACKEND": path, "OPTIONS": {"database": database}}
    for database in DATABASES.keys() - {"default"}
    for kind, path in KINDS.items()
    if (database, kind) != ("sqlite", "session")
}
DLOCKS["default"] = DLOCKS["postgresql-pessimistic"]
DLOCKS |= {
    name: {
        "BACKEND": "dlocks.backends.redis.RedisBackend",
        "OPTIONS": {
            "url": f"redis://:{PASSWORD}@127.0.0.1:{port}/0",
        },
    }
    for name in ("redis", "redis-always")
    for port in (os.environ.get(f"BENCHMARKS_{name.upper().replace('-', '_')}", "0"),)
}
DLOCKS["zookeeper"] = {
    "BACKEND": "dlocks.backends.zookeeper.ZooKeeperBackend",
    "OPTIONS": {"hosts": f"127.0.0.1:{ZOOKEEPER_PORT}"},
}

INSTALLED_APPS = ["dlocks", "db_mutex", "pgactivity", "pglock"]
SECRET_KEY = "benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
