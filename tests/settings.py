"""The settings of the tests; tests/run.py tells by the environment which engine to use and where it is."""

import os
import tempfile
from pathlib import Path

ENGINE = os.environ.get("DLOCKS_TEST_ENGINE", "sqlite")
PORT = os.environ.get("DLOCKS_TEST_PORT", "")
# The processes that tests start use the test database itself.
NAME = os.environ.get("DLOCKS_TEST_NAME", "dlocks")
if "DLOCKS_TEST_DIRECTORY" not in os.environ:
    os.environ["DLOCKS_TEST_DIRECTORY"] = tempfile.mkdtemp(prefix="dlocks-sqlite-")
DIRECTORY = Path(os.environ["DLOCKS_TEST_DIRECTORY"])

DATABASES = {
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
        "HOST": "127.0.0.1",
        "PORT": PORT,
    },
    "mariadb": {
        "ENGINE": "django.db.backends.mysql",
        "NAME": NAME,
        "USER": os.environ.get("DLOCKS_TEST_USER", "root"),
        "HOST": "127.0.0.1",
        "PORT": PORT,
        "TEST": {"CHARSET": "utf8mb4"},
    },
}
DATABASES = {"default": DATABASES[ENGINE]}

PESSIMISTIC = "dlocks.backends.database.PessimisticBackend"
DLOCKS = {
    "default": {"BACKEND": PESSIMISTIC},
    "optimistic": {"BACKEND": "dlocks.backends.database.OptimisticBackend"},
    "insert": {"BACKEND": "dlocks.backends.database.InsertBackend"},
    "memory": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
    "dummy": {"BACKEND": "dlocks.backends.dummy.DummyBackend"},
    # Nothing to wait for after a lease has run out: for tests that are not about the grace.
    "brisk": {"BACKEND": PESSIMISTIC, "OPTIONS": {"grace": 0, "ttl": 0.6}},
    "prefixed": {"BACKEND": PESSIMISTIC, "OPTIONS": {"prefix": "shop:"}},
}

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
]
MIDDLEWARE = [
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
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
SECRET_KEY = "tests"
USE_TZ = True
TIME_ZONE = "America/New_York"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
