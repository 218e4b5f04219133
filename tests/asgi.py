"""An ASGI application for the tests: sync and async views under locks."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path

import django
from django.core.asgi import get_asgi_application
from django.http import HttpResponse
from django.urls import path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

# These imports need the settings.
from dlocks import LeaderElection, LockTimeout, db_lock, locked_view  # noqa: E402
from dlocks.asgi import release_at_shutdown  # noqa: E402

COUNTER = Path(os.environ["DLOCKS_TEST_COUNTER"])


def add():
    """Add to the unguarded counter in two steps, so that updates can be lost."""
    value = int(COUNTER.read_text())
    time.sleep(0.001)
    COUNTER.write_text(str(value + 1))
    return HttpResponse(str(value + 1))


def sync_view(request):
    with db_lock("counter", timeout=60):
        return add()


async def async_view(request):
    async with db_lock("counter", timeout=60):
        return await asyncio.to_thread(add)


@locked_view("counter", timeout=60)
async def decorated(request):
    return await asyncio.to_thread(add)


async def hold(request):
    """Hold the key for as long as the client is connected."""
    async with db_lock("held", timeout=60):
        await asyncio.Event().wait()


async def wait(request):
    async with db_lock("held", timeout=60):
        return HttpResponse("it was free")


async def beat(request):
    """Show that the event loop and Django's thread for the request respond."""
    return HttpResponse(f"{await db_lock('held').alocked()}")


def keep(request):
    """Hold a key beyond the request, outside of any task, until the process ends."""
    taken = threading.Event()

    def work():
        db_lock("kept").acquire()
        taken.set()
        # The hold would end with this thread.
        threading.Event().wait()

    threading.Thread(target=work, daemon=True).start()
    taken.wait()
    return HttpResponse("kept")


def lead(request):
    """Lead an election, and write whether the lead is held at its stop."""

    def work(hold):
        elected.set()
        election.wait(60)
        COUNTER.write_text(str(election.leader().token == hold.token))

    elected = threading.Event()
    election = LeaderElection("scheduler", on_elected=work)
    election.start()
    elected.wait()
    return HttpResponse("elected")


async def fill(request):
    """Occupy every thread of the event loop's executor until the process ends."""
    for _ in range(40):
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    return HttpResponse("full")


def busy(request):
    try:
        with db_lock("held", timeout=0):
            return HttpResponse("free")
    except LockTimeout:
        return HttpResponse("busy", status=409)


urlpatterns = [
    path("sync/", sync_view),
    path("async/", async_view),
    path("decorated/", decorated),
    path("hold/", hold),
    path("wait/", wait),
    path("beat/", beat),
    path("keep/", keep),
    path("lead/", lead),
    path("fill/", fill),
    path("busy/", busy),
]

application = release_at_shutdown(get_asgi_application())
