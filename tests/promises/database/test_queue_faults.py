"""The queue after failures of its waiters or of the server."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import time

import pytest

from tests import jobs
from tests.for_each import ROWS
from tests.processes import disconnect
from tests.proxy import Proxy
from tests.servers import SERVERS
from tests.settings import ENGINE, PORT
from tests.timing import eventually, in_time
from tests.volume import volume

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db(transaction=True),
]

WAITERS = volume(6)
TTL = 1.5
# MySQL has the driver of MariaDB and nearly the same statements.
TWO_SERVERS = pytest.mark.engine("postgresql", "mariadb")

# The beginning of the statement of a poll that reads the holders of keys.
TURNS = b"SELECT key_resource, owner, version,"


class Crowd:
    """Processes that queue for one key again and again, and their log."""

    def __init__(self, doomed, directory, **environment):
        self.directory = directory
        (directory / "counter").write_bytes(b"%020d" % 0)
        (directory / "log").touch()
        self.worker, self.observer = (doomed(**environment) for _ in range(2))
        place = str(directory)
        self.alive = set(self.worker.call(jobs.crowd, WAITERS, place, "crowd", ttl=TTL))
        self.killed = {}
        # Periods that may make others wait, as pairs of start and end.
        self.causes = []

    def in_full(self):
        """Wait until nearly all processes are in the queue, and one holds the key.

        Return the queued processes and the holder.
        """

        def full():
            waiting, holder = line = self.observer.call(jobs.line, "crowd")
            is_full = len(waiting) >= len(self.alive) - 2 and holder in self.alive
            return is_full and line

        return eventually(full, pause=0.02)

    def kill(self, pid):
        if pid not in self.alive:
            return
        self.alive.discard(pid)
        now = time.monotonic()
        self.causes.append((now, now))
        os.kill(pid, signal.SIGKILL)
        self.killed[pid] = time.monotonic()

    def replace(self):
        self.alive.add(self.worker.go_on("more"))

    def notes(self):
        # The last line may be incomplete.
        lines = (self.directory / "log").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def moves_on(self, number=WAITERS):
        """Wait until ``number`` more holds were granted."""

        def grants():
            return (self.directory / "log").read_text().count('"granted"')

        number += grants()
        eventually(lambda: grants() >= number, pause=0.05)

    def check(self, *, refuses=True):
        """Check that every live process was served and that no holds overlap.

        No process may wait for long without a cause.
        """
        assert self.worker.go_on("end") == [], "processes were lost in the queue"
        failures = [path.read_text() for path in self.directory.glob("failed-*")]
        assert not failures, failures[0]
        notes = {"granted": [], "left": [], "refused": [], "trouble": []}
        for pid, kind, *facts in self.notes():
            notes[kind].append((pid, *facts))
        left = {(pid, token): (end, held) for pid, end, token, held in notes["left"]}
        holds = sorted(
            (granted, asked, token, pid)
            for pid, asked, granted, token in notes["granted"]
        )
        # A process that is stopped between its grant and its log entry continues too
        # late. It knows that it has lost the hold.
        late = [
            (pid, token)
            for granted, _, token, pid in holds
            if (pid, token) in left and left[pid, token][0] < granted
        ]
        assert not any(left[one][1] for one in late)
        holds = [hold for hold in holds if (hold[3], hold[2]) not in late]
        for (_, _, token, pid), later in itertools.pairwise(holds):
            assert token < later[2], "tokens go back"
            end = left[pid, token][0] if (pid, token) in left else self.killed[pid]
            assert end <= later[0], f"{pid} has token {token} until {end}, but {later}"
        value = int((self.directory / "counter").read_bytes())
        counted = sum(counted for _, counted in left.values())
        # A killed process may have counted without writing its log entry.
        assert counted <= value <= counted + len(self.killed)
        assert self.alive <= {pid for *_, pid in holds}
        assert refuses or not notes["refused"]
        for granted, asked, *_ in holds:
            allowed = TTL + 3.0
            for begin, end in self.causes:
                if begin < granted and asked < end + TTL + 3.0:
                    allowed += end - begin + TTL + 0.5
            in_time(granted - asked, allowed)
        return max(later[0] - one[0] for one, later in itertools.pairwise(holds))


@TWO_SERVERS
def test_a_killed_process_delays_others_only_by_its_lease(doomed, tmp_path):
    """It is the holder, the first waiter, or any other. A new one takes its place."""
    crowd = Crowd(doomed, tmp_path)
    for who in ("holder", "head", "middle") * volume(1):
        waiting, holder = crowd.in_full()
        middle = waiting[len(waiting) // 2]
        crowd.kill({"holder": holder, "head": waiting[0], "middle": middle}[who])
        crowd.replace()
        crowd.moves_on()
    for _ in range(volume(2)):
        # This one is killed at any moment.
        crowd.kill(random.choice(sorted(crowd.alive)))
        crowd.replace()
        crowd.moves_on(2)
    in_time(crowd.check(), TTL + 3.0)


@TWO_SERVERS
def test_a_stopped_first_waiter_is_skipped(doomed, tmp_path):
    """It is skipped, and served when it continues."""
    crowd = Crowd(doomed, tmp_path)
    for _ in range(volume(1)):
        waiting, _ = crowd.in_full()
        stopped_at = time.monotonic()
        os.kill(waiting[0], signal.SIGSTOP)
        try:
            crowd.moves_on()
            # Its claim is deleted after 3 seconds without a heartbeat.
            time.sleep(max(0.0, stopped_at + 3.5 - time.monotonic()))
        finally:
            os.kill(waiting[0], signal.SIGCONT)
            crowd.causes.append((stopped_at, time.monotonic()))
    in_time(crowd.check(refuses=False), TTL + 3.0)


@TWO_SERVERS
def test_the_queue_survives_a_restart_of_the_server(doomed, tmp_path):
    """The server is stopped once, and crashes once."""
    with SERVERS[ENGINE]() as server:
        # This database is there from the start.
        name = "postgres" if ENGINE == "postgresql" else "mysql"
        environment = server.environment | {"DLOCKS_TEST_NAME": name}
        doomed(**environment).call(jobs.migrate_databases, "default")
        crowd = Crowd(doomed, tmp_path, **environment)
        for end in (server.stop, server.crash):
            crowd.in_full()
            crowd.observer.call(disconnect)
            began = time.monotonic()
            end()
            server.start()
            crowd.causes.append((began, time.monotonic()))
            crowd.moves_on()
        crowd.check()


# Lost replies.


def unprepared(conf):
    return conf | {"OPTIONS": conf.get("OPTIONS", {}) | {"prepare": False}}


@pytest.fixture
def through_proxy(doomed, settings):
    """Return a proxy, a process behind it and two other processes.

    The proxy can drop replies. It finds the text of a statement that is not prepared.
    """
    proxy = Proxy(int(PORT))
    aliases = {using: unprepared(settings.DLOCKS[using]) for using in ROWS}
    environment = {
        "DLOCKS_TEST_PORT": str(proxy.port),
        "DLOCKS_TEST_ALIASES": json.dumps(aliases),
    }
    yield proxy, doomed(**environment), doomed(), doomed()
    proxy.close()


def test_a_claim_joins_the_queue_once_when_its_reply_is_lost(through_proxy, in_queue):
    """A lost reply to a later poll costs another poll."""
    proxy, waiting, holder, observer = through_proxy
    for key in ROWS:
        waiting.call(jobs.try_once, key, using=key)
        token = holder.call(jobs.acquire, key, using=key)
        proxy.swallow(b" INTO ")
        waiting.start(jobs.wait_quietly, key, using=key, timeout=20)
        in_queue(1, key)
        assert proxy.swallowed.wait(10), key
        assert observer.call(jobs.waiters, key) in {(1, 1), (1, 0)}
        proxy.swallow(TURNS)
        assert proxy.swallowed.wait(10), key
        assert holder.call(jobs.release_all) == ["released"]
        released = time.monotonic()
        granted, later = waiting.hear()
        assert later > token, key
        assert observer.call(jobs.waiters, key) == (0, 0)
        in_time(granted - released, 1.5)
        # A caller that never learns its position leaves the queue too.
        assert holder.call(jobs.acquire, key, using=key) > later
        proxy.swallow(b" INTO ")
        assert waiting.call(jobs.acquire, key, using=key, timeout=1) == "LockTimeout"
        assert proxy.swallowed.is_set()
        assert observer.call(jobs.waiters, key) == (0, 0)
        assert holder.call(jobs.release_all) == ["released"]


def test_a_handover_with_a_lost_reply_is_a_release(through_proxy, in_queue):
    """The holder had the key alone, or shared it."""
    proxy, holder, waiting, observer = through_proxy
    for using, shared in (*((using, False) for using in ROWS), ("default", True)):
        key = f"release {using} {shared}"
        token = holder.call(jobs.acquire, key, using=using, shared=shared)
        waiting.start(jobs.wait_quietly, key, using=using, timeout=20)
        in_queue(1, key)
        one_statement = ENGINE == "postgresql" and using != "insert" and not shared
        proxy.swallow(b"taken AS" if one_statement else b"COMMIT")
        assert holder.call(jobs.release_all) == ["released"], key
        assert proxy.swallowed.wait(10), key
        assert waiting.hear()[1] > token, key
        assert observer.call(jobs.waiters, key) == (0, 0)


def test_a_share_whose_lost_reply_is_about_its_claim_is_released(through_proxy):
    """Another transaction has locked the key, so that only the claim is deleted."""
    proxy, worker, other, observer = through_proxy
    assert worker.call(jobs.acquire, "stock:7", shared=True)
    with other.doing(jobs.lock_row, "stock:7"):
        proxy.swallow(b"DELETE")
        assert worker.call(jobs.release_all) == ["released"]
        assert proxy.swallowed.is_set()
    assert isinstance(observer.call(jobs.try_once, "stock:7"), int)


def check_delay_of_a_handover(doomed, in_queue, disturb, limit):
    """Check that a key is handed over in time in spite of a fault.

    The waiter is on the same host, then on another one. ``disturb`` causes the fault.
    It is called with another process and the sessions that existed before the wait.
    """
    holder, near, admin, far = doomed(), doomed(), doomed(), doomed(far=True)
    for waiting in near, far:
        token = holder.call(jobs.acquire, "stock:7")
        before = admin.call(jobs.other_sessions)
        waiting.start(jobs.wait_quietly, "stock:7", timeout=20)
        in_queue(1)
        disturb(admin, before)
        assert holder.call(jobs.release_all) == ["released"]
        released = time.monotonic()
        granted, later = waiting.hear()
        assert later > token
        assert admin.call(jobs.waiters, "stock:7") == (0, 0)
        in_time(granted - released, limit)


@TWO_SERVERS
def test_a_waiter_polls_at_once_after_its_session_ended(doomed, in_queue):
    def end_sessions(admin, before):
        assert admin.call(jobs.kill_other_sessions, but=before)

    check_delay_of_a_handover(doomed, in_queue, end_sessions, 0.3)


def test_a_lost_notification_costs_a_poll(doomed, in_queue):
    """The channel of the claim is replaced by another one."""

    def lose_channel(admin, before):
        admin.call(jobs.write_channels, "elsewhere")

    check_delay_of_a_handover(doomed, in_queue, lose_channel, 1.0)
