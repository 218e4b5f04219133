"""The recipes for other libraries, with the real packages."""

from __future__ import annotations

import json

import dramatiq
import pytest
from asgiref.testing import ApplicationCommunicator
from channels.consumer import AsyncConsumer, SyncConsumer
from channels.db import database_sync_to_async
from django.test import override_settings
from dramatiq.brokers.stub import StubBroker
from ninja.testing import TestClient
from rest_framework.test import APIRequestFactory

from dlocks import LockTimeout, db_lock
from dlocks.testing import frozen_clock, held_elsewhere, override_locks
from tests import pages

pytestmark = [
    pytest.mark.once,
    pytest.mark.nightly,
    pytest.mark.engine("sqlite"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture(scope="module")
def page():
    # Without it, Dramatiq would need a server of RabbitMQ.
    dramatiq.set_broker(StubBroker())
    return pages.run("how-to/recipes")


@pytest.fixture(autouse=True)
def memory():
    with override_locks():
        yield


def test_a_busy_key_is_a_conflict_in_rest_framework(page):
    view = page.PayOrder.as_view()

    def pay():
        with override_settings(REST_FRAMEWORK={"EXCEPTION_HANDLER": page.handle}):
            return view(APIRequestFactory().post("/"), pk=7)

    assert pay().data == {"paid": 7}
    with held_elsewhere("order:7"):
        refused = pay()
    assert (refused.status_code, refused["Retry-After"]) == (409, "1")
    assert "in use" in refused.data["detail"]


def test_a_busy_key_is_a_conflict_in_ninja(page, monkeypatch):
    # The registry of Ninja refuses an API that was made twice.
    monkeypatch.setenv("NINJA_SKIP_REGISTRY", "1")
    client = TestClient(page.api)
    assert client.post("/orders/7/pay").json() == {"paid": 7}
    with held_elsewhere("order:7"):
        refused = client.post("/orders/7/pay")
    assert (refused.status_code, refused["Retry-After"]) == (409, "1")


def test_huey_retries_a_busy_task(page):
    """A periodic task runs once."""

    def execute(account):
        page.recalculate(account)
        return page.huey.execute(page.huey.dequeue())

    assert execute(7) == "recalculated 7"
    with held_elsewhere("account:7"):
        execute(7)
    assert page.huey.scheduled_count() == 1
    assert page.cleanup.call_local() == "cleaned"
    assert page.cleanup.call_local() is None
    # APScheduler has such a job too.
    (job,) = page.scheduler.get_jobs()
    assert job.func() == "sent"
    assert job.func() is None


def test_dramatiq_retries_a_busy_actor(page):
    broker = dramatiq.get_broker()
    charged = []
    call, page.charge.fn = page.charge.fn, lambda account: charged.append(call(account))
    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    try:
        page.charge.send(7)
        broker.join(page.charge.queue_name, timeout=20_000)
        assert charged == ["charged 7"]
        with held_elsewhere("account:7"), pytest.raises(LockTimeout):
            page.charge(7)
    finally:
        worker.stop()
        page.charge.fn = call
    assert page.charge.options == {"max_retries": 10, "min_backoff": 5000}


async def test_a_consumer_of_channels_answers_a_busy_key(page):
    consumer = ApplicationCommunicator(
        page.OrderConsumer.as_asgi(), {"type": "websocket", "path": "/"}
    )

    async def ask(order):
        text = json.dumps({"order": order})
        await consumer.send_input({"type": "websocket.receive", "text": text})
        return (await consumer.receive_output(10))["text"]

    await consumer.send_input({"type": "websocket.connect"})
    assert (await consumer.receive_output(10))["type"] == "websocket.accept"
    assert await ask(7) == '{"paid": 7}'
    with held_elsewhere("order:8"), frozen_clock():
        assert await ask(8) == '{"busy": 8}'
    await consumer.send_input({"type": "websocket.disconnect", "code": 1000})


async def test_sockets_in_one_thread_share_only_a_reentrant_lock():
    """So they do with a SyncConsumer, and with ``database_sync_to_async()``."""

    def enter(key, **options):
        return db_lock(key, timeout=0, **options).try_acquire() is not None

    class Socket(SyncConsumer):
        def websocket_receive(self, message):
            entered = enter("a"), enter("b", reentrant=False)
            self.send({"type": "websocket.send", "text": json.dumps(entered)})

    class AsyncSocket(AsyncConsumer):
        async def websocket_receive(self, message):
            only = database_sync_to_async(enter)("d", reentrant=False)
            entered = await database_sync_to_async(enter)("c"), await only
            await self.send({"type": "websocket.send", "text": json.dumps(entered)})

    for kind in (Socket, AsyncSocket):
        for expected in ([True, True], [True, False]):
            socket = ApplicationCommunicator(kind.as_asgi(), {"type": "websocket"})
            await socket.send_input({"type": "websocket.receive"})
            assert json.loads((await socket.receive_output(10))["text"]) == expected
