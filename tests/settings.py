"""The settings of the tests.

tests/run.py passes the engine and its address in the environment.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

ENGINE = os.environ.get("DLOCKS_TEST_ENGINE", "sqlite")
PORT = os.environ.get("DLOCKS_TEST_PORT", "")
# Processes that are started by tests use the test database itself.
NAME = os.environ.get("DLOCKS_TEST_NAME", "dlocks")
if "DLOCKS_TEST_DIRECTORY" not in os.environ:
    os.environ["DLOCKS_TEST_DIRECTORY"] = tempfile.mkdtemp(prefix="dlocks-sqlite-")
DIRECTORY = Path(os.environ["DLOCKS_TEST_DIRECTORY"])
# The password of the servers that tests/servers.py has started.
PASSWORD = os.environ.get("DLOCKS_TEST_PASSWORD", "")

DATABASES: dict[str, Any] = {
    "sqlite": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": DIRECTORY / "unused.sqlite3" if NAME == "dlocks" else NAME,
        "TEST": {"NAME": DIRECTORY / "test.sqlite3"},
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 60,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF",
        },
    },
    "postgresql": {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": NAME,
        "USER": os.environ.get("DLOCKS_TEST_USER", "dlocks"),
        "PASSWORD": PASSWORD,
        "HOST": "127.0.0.1",
        "PORT": PORT,
    },
    "mariadb": {
        "ENGINE": "django.db.backends.mysql",
        "NAME": NAME,
        "USER": os.environ.get("DLOCKS_TEST_USER", "root"),
        "PASSWORD": PASSWORD,
        "HOST": "127.0.0.1",
        "PORT": PORT,
        "TEST": {"CHARSET": "utf8mb4"},
    },
}
DATABASES["mysql"] = DATABASES["mariadb"]
DATABASES = {
    "default": DATABASES[ENGINE],
    **json.loads(os.environ.get("DLOCKS_TEST_DATABASES", "{}")),
}
# Other options of the driver, for example '{"pool": true}'. A test that sets the
# database of a process sets its options too.
if "DLOCKS_TEST_OPTIONS" in os.environ and "default" not in json.loads(
    os.environ.get("DLOCKS_TEST_DATABASES", "{}")
):
    options = DATABASES["default"].setdefault("OPTIONS", {})
    options |= json.loads(os.environ["DLOCKS_TEST_OPTIONS"])
    if options.get("pool") is True:
        # Some tests wait in 30 threads. Django's default of 4 connections is tested in
        # tests/promises/runtime/test_pools.py.
        options["pool"] = {"min_size": 1, "max_size": 40, "timeout": 20}
        # The queries of the tests themselves survive a restart of the server.
        DATABASES["default"]["CONN_HEALTH_CHECKS"] = True

PESSIMISTIC = "dlocks.backends.database.PessimisticBackend"
WATCHING = {"expiry": "observed", "ttl": 2.0, "grace": 0.2}
DLOCKS = {
    "default": {"BACKEND": PESSIMISTIC},
    "optimistic": {"BACKEND": "dlocks.backends.database.OptimisticBackend"},
    "insert": {"BACKEND": "dlocks.backends.database.InsertBackend"},
    "memory": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
    "dummy": {"BACKEND": "dlocks.backends.dummy.DummyBackend"},
    # Without a grace period, an expired lease can be taken over at once. This is for
    # tests that are not about the grace.
    "brisk": {"BACKEND": PESSIMISTIC, "OPTIONS": {"grace": 0, "ttl": 2.0}},
    "watching": {"BACKEND": PESSIMISTIC, "OPTIONS": WATCHING},
    "watching optimistic": {
        "BACKEND": "dlocks.backends.database.OptimisticBackend",
        "OPTIONS": WATCHING,
    },
    "watching insert": {
        "BACKEND": "dlocks.backends.database.InsertBackend",
        "OPTIONS": WATCHING,
    },
    "prefixed": {"BACKEND": PESSIMISTIC, "OPTIONS": {"prefix": "shop:"}},
    "recorded": {"BACKEND": PESSIMISTIC, "OPTIONS": {"history": True}},
}
if ENGINE != "sqlite":
    DLOCKS["session"] = {
        "BACKEND": "dlocks.backends.session.SessionBackend",
        "OPTIONS": {
            "ttl": float(os.environ.get("DLOCKS_TEST_SESSION_TTL", "30")),
            "waiting": int(os.environ.get("DLOCKS_TEST_SESSION_WAITING", "8")),
        },
    }

# The aliases of the tests of other servers, whose addresses are known only at run time.
DLOCKS |= json.loads(os.environ.get("DLOCKS_TEST_ALIASES", "{}"))

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "dlocks",
    "tests",
    "example_project.shop",
    *filter(None, os.environ.get("DLOCKS_TEST_APPS", "").split(",")),
]
MIDDLEWARE = [
    "tests.middleware.strict_policy",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
# A server that tests start has its own URLs.
ROOT_URLCONF = os.environ.get("DLOCKS_TEST_URLS", "tests.urls")
STATIC_URL = "static/"
SECRET_KEY = "tests"
USE_TZ = True
TIME_ZONE = "America/New_York"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
