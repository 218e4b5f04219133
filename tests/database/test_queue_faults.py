"""The queue after failures of its waiters or of the server."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import time

import pytest

from tests import jobs
from tests.processes import Worker
from tests.proxy import Proxy
from tests.servers import SERVERS
from tests.settings import ENGINE
from tests.timing import eventually, in_time
from tests.volume import volume

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
]

WAITERS = 16
TTL = 1.5
# Seconds for which a random process is killed each second.
SECONDS = volume(10)


@pytest.fixture(scope="module")
def server():
    """Start a server for this module, to be stopped and crashed."""
    with SERVERS[ENGINE]() as started:
        worker = Worker(**environment(started))
        worker.call(jobs.migrate)
        worker.close()
        yield started


def environment(server, port=None):
    return {
        **server.environment,
        "DLOCKS_TEST_NAME": "faults",
        "DLOCKS_TEST_PORT": str(port or server.port),
    }


class Crowd:
    """Processes that queue for one key again and again, and their log."""

    def __init__(self, server, doomed, directory):
        self.directory = directory
        (directory / "counter").write_bytes(b"%020d" % 0)
        self.key = "crowd"
        self.worker, self.observer = (doomed(**environment(server)) for _ in range(2))
        self.worker.start(jobs.crowd, WAITERS, str(directory), self.key, ttl=TTL)
        self.alive = set(self.worker.hear())
        self.killed = {}
        # Periods that may make others wait, as pairs of start and end.
        self.causes = []

    def line(self):
        return self.observer.call(jobs.line, self.key)

    def in_full(self):
        """Wait until every process but the holder is in the queue.

        Return the queued processes and the holder.
        """

        def full():
            waiting, holder = self.line()
            if len(waiting) >= len(self.alive) - 2 and holder in self.alive:
                return waiting, holder
            return None

        return eventually(full)

    def kill(self, pid):
        if pid not in self.alive:
            return
        self.alive.discard(pid)
        now = time.monotonic()
        self.causes.append((now, now))
        os.kill(pid, signal.SIGKILL)
        self.killed[pid] = time.monotonic()

    def replace(self):
        self.worker.tell("more")
        self.alive.add(self.worker.hear())

    def grants(self):
        return sum(kind == "granted" for _, kind, *_ in self.notes())

    def notes(self):
        if not (self.directory / "log").exists():
            return []
        # The last line may be incomplete.
        lines = (self.directory / "log").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def moves_on(self, number=WAITERS):
        """Wait until ``number`` more holds were granted."""
        before = self.grants()
        eventually(lambda: self.grants() >= before + number)

    def check(self, *, refuses=True):
        """Check that every live process was served and that no holds overlap.

        No process may wait for long without a cause.
        """
        self.worker.tell("end")
        assert self.worker.hear() == [], "processes were lost in the queue"
        failures = [path.read_text() for path in self.directory.glob("failed-*")]
        assert not failures, failures[0]
        notes = self.notes()
        left = {(pid, token): (end, counted) for pid, kind,
            *rest in notes if kind == "left"
                for end, token, counted in [rest]}  # fmt: skip
        holds = sorted(
            (granted, asked, token, pid)
            for pid, kind, *rest in notes if kind == "granted"
            for asked, granted, token in [rest]
        )  # fmt: skip
        # A process that is stopped between its grant and its log entry continues too
        # late. It knows that it has lost the hold.
        late = [
            (pid, token)
            for granted, _, token, pid in holds
            if (pid, token) in left and left[pid, token][0] < granted
        ]
        assert not any(left[one][1] for one in late)
        holds = [hold for hold in holds if (hold[3], hold[2]) not in late]
        tokens = [token for _, _, token, _ in holds]
        assert all(one < other for one, other in itertools.pairwise(tokens)), (
            "tokens go back"
        )
        for (granted, _, token, pid), (
            next_granted,
            _,
            next_token,
            next_pid,
        ) in itertools.pairwise(holds):
            end = left[pid, token][0] if (pid, token) in left else self.killed[pid]
            assert granted <= next_granted
            assert end <= next_granted, (
                f"{pid} has token {token} until {end}, {next_pid} has {next_token} from"
                f" {next_granted}"
            )
        value = int((self.directory / "counter").read_bytes())
        counted = sum(counted for _, counted in left.values())
        # A killed process may have counted without writing its log entry.
        assert counted <= value <= counted + len(self.killed)
        waits = sorted(granted - asked for granted, asked, _, _ in holds)
        gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(holds)]
        print(
            f"{ENGINE}: {len(holds)} holds, {len(self.killed)} killed, waits up to"
            f" {waits[-1]:.2f} s (median {waits[len(waits) // 2]:.3f}), longest pause"
            f" {max(gaps):.2f} s, refused"
            f" {sum(note[1] == 'refused' for note in notes)}, trouble"
            f" {sum(note[1] == 'trouble' for note in notes)}"
        )
        served = {pid for _, _, _, pid in holds}
        assert self.alive <= served
        waited = []
        for granted, asked, *_ in holds:
            allowed = TTL + 3.0
            for begin, end in self.causes:
                if begin < granted and asked < end + TTL + 3.0:
                    allowed += end - begin + TTL + 0.5
            waited.append((granted - asked, allowed))
        assert refuses or not [note for note in notes if note[1] == "refused"]
        for seconds, allowed in waited:
            in_time(seconds, allowed)
        return max(gaps)


@pytest.fixture
def line_of(server, doomed, tmp_path):
    if server.process is None:
        server.start()
    crowd = Crowd(server, doomed, tmp_path)
    yield crowd
    for pid in crowd.alive:
        with_suppressed_signal(pid, signal.SIGCONT)
    if server.process is None:
        server.start()


def with_suppressed_signal(pid, number):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@pytest.mark.parametrize("who", ["holder", "head", "middle"])
def test_a_killed_process_delays_others_only_by_its_lease(who, line_of):
    """The victim is the holder, the first waiter, or one in the middle."""
    for _ in range(volume(1)):
        waiting, holder = line_of.in_full()
        line_of.kill(
            {
                "holder": holder,
                "head": waiting[0],
                "middle": waiting[len(waiting) // 2],
            }[who]
        )
        line_of.moves_on()
    longest = line_of.check()
    in_time(longest, TTL + 3.0)


def test_random_kills_lose_no_waiter(line_of):
    """A process is killed each second, and another one takes its place."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(1.0)
        line_of.kill(random.choice(sorted(line_of.alive)))
        line_of.replace()
    line_of.moves_on()
    line_of.check()


def test_a_stopped_first_waiter_is_skipped(line_of):
    """It is skipped, and served when it continues."""
    for _ in range(volume(1)):
        waiting, _ = line_of.in_full()
        stopped_at = time.monotonic()
        os.kill(waiting[0], signal.SIGSTOP)
        try:
            line_of.moves_on(2 * WAITERS)
            time.sleep(3.0)
        finally:
            os.kill(waiting[0], signal.SIGCONT)
            line_of.causes.append((stopped_at, time.monotonic()))
        line_of.moves_on()
    longest = line_of.check(refuses=False)
    in_time(longest, TTL + 3.0)


@pytest.mark.parametrize("how", ["stop", "crash"])
def test_the_queue_survives_a_restart_of_the_server(how, server, line_of):
    line_of.in_full()
    began = time.monotonic()
    getattr(server, how)()
    server.start()
    line_of.causes.append((began, time.monotonic()))
    line_of.moves_on(2 * WAITERS)
    line_of.check()


# Lost replies.


@pytest.fixture
def through_proxy(server, doomed):
    """Return a proxy, a process behind it and two other processes.

    The proxy can drop replies.
    """
    if server.process is None:
        server.start()
    proxy = Proxy(server.port)
    yield (
        proxy,
        doomed(**environment(server, proxy.port)),
        doomed(**environment(server)),
        doomed(**environment(server)),
    )
    proxy.close()


def in_queue(observer, key, number):
    eventually(lambda: len(observer.call(jobs.line, key)[0]) == number)


FAMILY = pytest.mark.parametrize("using", ["default", "optimistic", "insert"])


@FAMILY
def test_a_claim_joins_the_queue_once_when_its_reply_is_lost(using, through_proxy):
    proxy, waiting, holder, observer = through_proxy
    key = f"place {using}"
    waiting.call(jobs.try_once, key, using=using)
    holder.start(jobs.hold, key, using=using)
    token = holder.hear()
    proxy.swallow(b" INTO ")
    waiting.start(jobs.wait_quietly, key, using=using, timeout=20)
    in_queue(observer, key, 1)
    assert proxy.swallowed.wait(10)
    assert observer.call(jobs.waiters, key) in {(1, 1), (1, 0)}
    holder.tell()
    assert holder.hear() == "released"
    assert waiting.hear()[1] > token
    assert observer.call(jobs.waiters, key) == (0, 0)


@FAMILY
@pytest.mark.parametrize("kind", ["lease", "share"])
def test_a_handover_with_a_lost_reply_is_a_release(using, kind, through_proxy):
    proxy, holder, waiting, observer = through_proxy
    key = f"release {using} {kind}"
    token = holder.call(jobs.acquire, key, using=using, shared=kind == "share")
    waiting.start(jobs.wait_quietly, key, using=using, timeout=20)
    in_queue(observer, key, 1)
    proxy.swallow(
        b"taken AS" if ENGINE == "postgresql" and kind == "lease" else b"COMMIT"
    )
    assert holder.call(jobs.release_all) == ["released"]
    assert proxy.swallowed.wait(10)
    assert waiting.hear()[1] > token
    assert observer.call(jobs.waiters, key) == (0, 0)


@FAMILY
def test_a_lost_reply_to_a_poll_costs_another_poll(using, through_proxy):
    proxy, waiting, holder, observer = through_proxy
    key = f"look {using}"
    token = holder.call(jobs.acquire, key, using=using)
    waiting.start(jobs.wait_quietly, key, using=using, timeout=20)
    in_queue(observer, key, 1)
    proxy.swallow(b"SELECT owner, id")
    assert proxy.swallowed.wait(10)
    assert holder.call(jobs.release_all) == ["released"]
    released = time.monotonic()
    granted, later = waiting.hear()
    assert later > token
    assert observer.call(jobs.waiters, key) == (0, 0)
    in_time(granted - released, 1.5)


@pytest.mark.parametrize("far", [False, True])
def test_a_waiter_polls_at_once_after_its_session_ended(far, server, doomed):
    if server.process is None:
        server.start()
    holder, waiting, admin = (doomed(far=far, **environment(server)) for _ in range(3))
    token = holder.call(jobs.acquire, "session")
    waiting.start(jobs.wait_quietly, "session", timeout=20)
    in_queue(admin, "session", 1)
    assert admin.call(jobs.kill_other_sessions)
    assert holder.call(jobs.release_all) == ["released"]
    released = time.monotonic()
    granted, later = waiting.hear()
    assert later > token
    assert admin.call(jobs.waiters, "session") == (0, 0)
    in_time(granted - released, 0.3)


@pytest.mark.parametrize("far", [False, True])
def test_a_lost_notification_costs_a_poll(far, server, doomed):
    """The channel of the claim is replaced by another one."""
    if server.process is None:
        server.start()
    holder, waiting, admin = (doomed(far=far, **environment(server)) for _ in range(3))
    token = holder.call(jobs.acquire, "message")
    waiting.start(jobs.wait_quietly, "message", timeout=20)
    in_queue(admin, "message", 1)
    admin.call(jobs.write_channels, "elsewhere")
    assert holder.call(jobs.release_all) == ["released"]
    released = time.monotonic()
    granted, later = waiting.hear()
    assert later > token
    in_time(granted - released, 1.0)
