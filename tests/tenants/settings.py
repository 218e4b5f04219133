"""The settings of a project with django-tenants.

dlocks is at first in the list of apps of the tenants alone.
"""

import os

from django.db import connection


def of_tenant() -> str:
    return f"{connection.schema_name}:"


DATABASE = f"dlocks_tenants_{os.getpid()}"
SERVER = {
    "HOST": "127.0.0.1",
    "PORT": os.environ["DLOCKS_TEST_PORT"],
    "USER": "dlocks",
    "NAME": DATABASE,
}
DATABASES = {
    "default": {"ENGINE": "django_tenants.postgresql_backend", **SERVER},
    "acme": {
        "ENGINE": "django.db.backends.postgresql",
        "OPTIONS": {"options": "-c search_path=acme"},
        **SERVER,
    },
}
DATABASE_ROUTERS = ["django_tenants.routers.TenantSyncRouter"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PESSIMISTIC = "dlocks.backends.database.PessimisticBackend"
DLOCKS = {
    "default": {"BACKEND": PESSIMISTIC, "OPTIONS": {"history": True}},
    "optimistic": {"BACKEND": "dlocks.backends.database.OptimisticBackend"},
    "insert": {"BACKEND": "dlocks.backends.database.InsertBackend"},
    "tenant": {"BACKEND": PESSIMISTIC, "OPTIONS": {"prefix": of_tenant}},
}
SECRET_KEY = "tests"
SHARED_APPS = ["django_tenants", "django.contrib.contenttypes", "tests.tenants"]
TENANT_APPS = ["dlocks"]
INSTALLED_APPS = [*SHARED_APPS, *TENANT_APPS]
TENANT_MODEL = "tenants.Client"
TENANT_DOMAIN_MODEL = "tenants.Domain"
USE_TZ = True
