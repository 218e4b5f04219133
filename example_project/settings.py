"""The settings of the example project, for local use and not for production."""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent

DEBUG = os.environ.get("SHOP_DEBUG", "1") == "1"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
SECRET_KEY = "django-insecure-only-for-the-example-project"  # noqa: S105 (nothing is kept secret by it)

# The database of the shop: a file of SQLite, postgresql://user:password@host:port/name
# or mysql://…
DATABASE = os.environ.get("SHOP_DATABASE", str(HERE / "shop.sqlite3"))
# The server of the locks: redis://host:port/0 or zookeeper://host:port,host:port. By
# default the locks are in the shop's database.
LOCKS = os.environ.get("SHOP_LOCKS", "")

url = urlsplit(DATABASE)
if url.scheme in {"postgresql", "mysql"}:
    DATABASES = {
        "default": {
            "ENGINE": f"django.db.backends.{url.scheme}",
            "NAME": url.path.removeprefix("/"),
            "USER": unquote(url.username or ""),
            "PASSWORD": unquote(url.password or ""),
            "HOST": url.hostname or "",
            "PORT": str(url.port or ""),
        }
    }
else:
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": DATABASE,
            "OPTIONS": {
                # The transaction requests SQLite's only write lock at its start, when
                # it can still wait for it.
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
            },
        }
    }

if LOCKS.startswith("redis"):
    DLOCKS = {
        "default": {
            "BACKEND": "dlocks.backends.redis.RedisBackend",
            "OPTIONS": {"url": LOCKS},
        }
    }
elif LOCKS.startswith("zookeeper://"):
    DLOCKS = {
        "default": {
            "BACKEND": "dlocks.backends.zookeeper.ZooKeeperBackend",
            "OPTIONS": {"hosts": LOCKS.removeprefix("zookeeper://")},
        }
    }
else:
    DLOCKS = {
        "default": {
            "BACKEND": "dlocks.backends.database.PessimisticBackend",
            "OPTIONS": {"history": True},
        },
        "optimistic": {"BACKEND": "dlocks.backends.database.OptimisticBackend"},
        "insert": {"BACKEND": "dlocks.backends.database.InsertBackend"},
    }

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "dlocks",
    "example_project.shop",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    # The admin speaks the language of the browser.
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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
ROOT_URLCONF = "example_project.urls"
WSGI_APPLICATION = "example_project.wsgi.application"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
