"""Notifications of waiters: on this host, on other hosts, and lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
from asgiref.sync import sync_to_async

from dlocks import db_lock
from dlocks.models import LockClaim
from tests import jobs
from tests.scripts import run_script
from tests.timing import in_time, seldom
from tests.volume import volume

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]


def hand_over(to, in_queue):
    """Hand the key to a waiting process and return the seconds this takes."""
    with db_lock("stock:7") as hold:
        to.start(jobs.wait_quietly, "stock:7", timeout=20)
        in_queue(1)
    released = time.monotonic()
    granted, token = to.hear()
    assert token > hold.token
    return granted - released


def test_a_process_on_this_host_is_notified_at_once(workers, in_queue):
    near, _far = workers(2)
    in_time(min(hand_over(near, in_queue) for _ in range(3)), 0.2)


@pytest.mark.engine("mariadb", "sqlite")
def test_another_host_is_served_within_a_poll(workers, in_queue):
    """These databases cannot notify it. Only the first turns may take long."""
    _, far = workers(2)
    waits = [hand_over(far, in_queue) for _ in range(8)]
    in_time(max(waits), 1.0)
    in_time(sorted(waits)[3], 0.12)


# tests/promises/database/test_queue_faults.py kills such waiters on servers.
@pytest.mark.engine("sqlite")
def test_a_local_message_to_a_dead_process_is_harmless(doomed, in_queue):
    """Its claim is skipped in time, and the key is free again."""
    victim = doomed()
    with db_lock("stock:7"):
        victim.start(jobs.wait_quietly, "stock:7", timeout=20)
        in_queue(1)
        victim.kill()
    with db_lock("stock:7", timeout=10) as hold:
        in_time(hold.waited, 4.0)


async def test_waiters_of_a_process_are_each_notified_locally(
    workers, threads, in_queue, monkeypatch
):
    """At last without ``select.poll()``, which Windows and Eventlet lack."""
    (giver,), keys = workers(1), [f"stock:{number}" for number in range(4)]

    def wait(key):
        with db_lock(key, timeout=20):
            return time.monotonic()

    async def wait_in_a_task(key):
        async with db_lock(key, timeout=20):
            return time.monotonic()

    for _ in range(2):
        for key in keys:
            await asyncio.to_thread(giver.call, jobs.acquire, key)
        crowd = [threads(partial(wait, key)) for key in keys[:2]]
        tasks = [asyncio.create_task(wait_in_a_task(key)) for key in keys[2:]]
        for key in keys:
            await sync_to_async(in_queue)(1, key)
        released = time.monotonic()
        await asyncio.to_thread(giver.call, jobs.release_all)
        granted = await asyncio.gather(*tasks)
        for one in crowd:
            await asyncio.to_thread(one.join, 30)
        for moment in (*granted, *(one.results[0] for one in crowd)):
            in_time(moment - released, 0.2)
        monkeypatch.delattr(select, "poll", raising=False)

    def take_turns():
        # This is often enough for statements to be prepared.
        for _ in range(20):
            with db_lock("stock:7"):
                pass

    await sync_to_async(take_turns)()


def test_local_processes_hardly_poll(doomed):
    """A notification only says that it is time to poll."""
    crowd, turns = [doomed() for _ in range(4)], volume(15)
    for worker in crowd:
        worker.start(jobs.take_turns, "stock:7", times=turns)
    looks = sum(worker.hear() for worker in crowd)
    seldom(looks, 2 * len(crowd) * turns)


@pytest.mark.engine("mariadb")
def test_a_process_may_end_while_a_thread_waits():
    """It ends without a warning."""
    text = """
import threading, time
from django.db import connection
from dlocks import db_lock
from dlocks.backends.database import PessimisticBackend
wait = db_lock("stock:7", timeout=60).acquire
threading.Thread(target=wait, daemon=True).start()
while not PessimisticBackend("default").waiting("stock:7"):
    time.sleep(0.01)
time.sleep(0.2)
connection.close()
"""
    with db_lock("stock:7"):
        ended = run_script(text)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_forged_datagram_gives_no_hold(in_queue, threads):
    """A sender that has read the table still lacks the SECRET_KEY."""
    with db_lock("stock:7") as hold:
        waiting = threads(lambda: db_lock("stock:7", timeout=30).acquire())
        in_queue(1)
        claim = LockClaim.objects.get()
        grant = f"{claim.owner} {hold.token + 1} 1.5 {time.monotonic()}".encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for text in (b"", grant, b"0" * 32 + b" " + grant, b"\xff" * 10_000):
                sender.sendto(text, "\0" + claim.channel.partition("@")[0])
        time.sleep(0.2)
        assert hold.held
        assert waiting.is_alive()
    waiting.join(30)
    (granted,) = waiting.results
    assert granted.token > hold.token
    granted.release()


FLOOD = """
import contextlib, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    while True:
        with contextlib.suppress(OSError):
            sender.sendto(b"x", chr(0) + sys.argv[1])
"""


def test_a_flood_of_datagrams_is_bounded(in_queue, threads, until):
    """The waiter keeps its place by its heartbeats, and acquires the key in turn."""
    claim = LockClaim.objects.all()
    with contextlib.ExitStack() as stack:
        with db_lock("stock:7"):
            waiting = threads(lambda: db_lock("stock:7", timeout=60).acquire())
            in_queue(1)
            channel = claim.get().channel.partition("@")[0]
            for _ in range(2):
                sender = subprocess.Popen([sys.executable, "-c", FLOOD, channel])
                stack.callback(sender.wait)
                stack.callback(sender.kill)
            for _ in range(4):
                last = claim.get().end_time
                until(lambda last=last: claim.get().end_time > last, 20)
        waiting.join(20)
    (granted,) = waiting.results
    granted.release()
