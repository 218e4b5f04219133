"""Short fault campaigns against Redis, a quorum of five and ZooKeeper.

Servers are restarted, stopped and cut off while processes hold locks, and the processes
are stopped too.

A hold counts from the time at which its caller acquired it to the last time at which it
was known to be held. No two holds of one key may overlap. A Redis that loses its data
is documented to break this, so it is not among these faults. Here every server keeps
its grants.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import time

import pytest

from dlocks import LockBackendError, db_lock
from tests import jobs
from tests.promises.backends.others import REDIS, quorum, zookeeper
from tests.proxy import Proxy
from tests.servers import Redis, redis_url
from tests.timing import eventually
from tests.volume import volume

# Seconds of faults.
SECONDS = volume(5)
TTL = 1.0


class Node:
    """A Redis behind a proxy, with its faults."""

    def __init__(self, server):
        self.server = server
        self.proxy = Proxy(server.port)

    def close(self):
        self.proxy.close()

    def restart(self, seconds):
        self.server.crash()
        time.sleep(seconds)
        self.server.start()

    def stop(self, seconds):
        self.server.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.server.process.send_signal(signal.SIGCONT)

    def cut_off(self, seconds):
        self.proxy.cut.set()
        time.sleep(seconds)
        self.proxy.cut.clear()


@pytest.fixture
def nodes(start):
    with contextlib.ExitStack() as stack:

        def make(number):
            found = [
                Node(start(Redis(appendonly="yes", appendfsync="always")))
                for _ in range(number)
            ]
            for node in found:
                stack.callback(node.close)
            return found

        yield make


def through(node):
    options = {"url": redis_url(node.proxy.port), "socket_timeout": 0.5}
    return {"BACKEND": REDIS, "OPTIONS": options}


class Crowd:
    """Processes that hold one key for short times, repeatedly, and log it."""

    def __init__(self, process, path, using, **policy):
        self.path = path
        path.touch()
        self.workers = [process() for _ in range(4)]
        policy = {"ttl": TTL, "timeout": TTL, **policy}
        for worker in self.workers:
            worker.start(
                jobs.hold_again_and_again, str(path), "key", using=using, **policy
            )

    def end(self):
        """Return how many attempts of each process failed."""
        for worker in self.workers:
            worker.tell()
        return [worker.hear() for worker in self.workers]

    def pause(self, worker, seconds):
        worker.stop()
        time.sleep(seconds)
        worker.resume()

    def moves_on(self):
        """Wait until a request that was sent after now is granted."""
        after = time.monotonic() + TTL
        eventually(lambda: any(got > after for got, *_ in holds(self.path)), pause=0.1)


def holds(path):
    """Return the start, the end and the token of each hold, in order of the start."""
    # The last line may be incomplete.
    notes = [line.split() for line in path.read_text().split("\n")[:-1]]
    return sorted(
        (float(got), float(until), int(token)) for got, until, token, _ in notes
    )


def overlaps(found):
    return [
        (one, other) for one, other in itertools.pairwise(found) if one[1] > other[0]
    ]


def test_a_dummy_lock_is_found_to_overlap(aliases, tmp_path):
    path = tmp_path / "notes"
    crowd = Crowd(aliases(), path, "dummy")
    eventually(lambda: overlaps(holds(path)), pause=0.1)
    crowd.end()


def test_a_persistent_redis_excludes_under_faults(nodes, aliases, tmp_path):
    (node,) = nodes(1)
    path, luck = tmp_path / "notes", random.Random(1)
    crowd = Crowd(aliases(redis=through(node)), path, "redis")
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(luck.uniform(0.1, 0.5))
        if luck.random() < 0.3:
            # Some pauses are longer than the lease.
            crowd.pause(luck.choice(crowd.workers), luck.uniform(0.5, 2.5) * TTL)
        else:
            luck.choice([node.restart, node.stop, node.cut_off])(
                luck.uniform(0.05, 0.8)
            )
    crowd.moves_on()
    crowd.end()
    found = holds(path)
    assert overlaps(found) == []
    tokens = [token for _, _, token in found]
    assert tokens == sorted(set(tokens))


def test_zookeeper_excludes_under_faults(zookeeper_server, root, aliases, tmp_path):
    """The faults are stopped holders, cut connections, expired sessions and silence."""
    path, luck = tmp_path / "notes", random.Random(20)
    with contextlib.closing(Node(zookeeper_server)) as node:
        options = {"root": root, "session_timeout": 1.5, "connect_timeout": 2.0}
        process = aliases(zookeeper=zookeeper(node.proxy.port, **options))
        crowd = Crowd(process, path, "zookeeper", ttl=30, timeout=10)
        end = time.monotonic() + volume(11)
        while time.monotonic() < end:
            time.sleep(luck.uniform(0.1, 0.4))
            fault = luck.choice(["cut", "holder", "holder", "server"])
            if fault == "cut":
                node.proxy.disconnect()
            elif fault == "server":
                node.stop(luck.uniform(0.1, 2.0))
            else:
                with contextlib.suppress(LockBackendError):
                    holder = db_lock("key", using="zookeeper").holder()
                    for one in crowd.workers:
                        # The process may have released the key by then.
                        if holder and f":{one.process.pid}:" in holder.holder:
                            crowd.pause(one, luck.uniform(1.0, 3.0))
        crowd.end()
    found = holds(path)
    assert len(found) > 20
    assert len({token for _, _, token in found}) == len(found)
    assert overlaps(found) == []


def test_a_quorum_of_five_excludes_under_faults(nodes, aliases, tmp_path):
    five = nodes(5)
    path, luck = tmp_path / "notes", random.Random(2)
    members = {f"redis{number}": through(node) for number, node in enumerate(five)}
    crowd = Crowd(aliases(**members, quorum=quorum(members)), path, "quorum")
    for worker in crowd.workers[:3]:
        lost = luck.sample(five, 2)
        lost[0].server.crash()
        lost[1].proxy.cut.set()
        crowd.pause(worker, luck.uniform(0.5, 2.0) * TTL)
        crowd.moves_on()
        lost[0].server.start()
        lost[1].proxy.cut.clear()
    # With three members lost, no key is granted once the pending requests are decided.
    lost = luck.sample(five, 3)
    lost[0].server.crash()
    lost[1].proxy.cut.set()
    lost[2].server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    time.sleep(3 * TTL)
    gone = time.monotonic()
    lost[0].server.start()
    lost[1].proxy.cut.clear()
    lost[2].server.process.send_signal(signal.SIGCONT)
    crowd.moves_on()
    assert all(crowd.end())
    found = holds(path)
    assert overlaps(found) == []
    assert [got for got, *_ in found if began + TTL < got < gone] == []
