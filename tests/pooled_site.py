"""A WSGI and ASGI project with a connection pool: a counter under a busy lock."""

from __future__ import annotations

import os
import time

import django
from asgiref.sync import sync_to_async
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import HttpResponse
from django.urls import path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from dlocks import db_lock  # noqa: E402 (it needs the settings)
from tests.models import Counter  # noqa: E402


def add():
    counter = Counter.objects.get(name="requests")
    time.sleep(0.005)
    Counter.objects.filter(pk=counter.pk).update(value=counter.value + 1)
    return HttpResponse(str(counter.value + 1))


def lock_first(request):
    with db_lock("requests", timeout=20):
        return add()


def query_first(request):
    Counter.objects.exists()
    return lock_first(request)


async def coroutine(request):
    async with db_lock("requests", timeout=20):
        return await sync_to_async(add)()


urlpatterns = [
    path("lock/", lock_first),
    path("query/", query_first),
    path("coroutine/", coroutine),
]

wsgi = get_wsgi_application()
asgi = get_asgi_application()
