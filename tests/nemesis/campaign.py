"""One campaign: a server, its workers, its seeded faults and the final check."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.clocks import faketime, step
from tests.nemesis import database
from tests.nemesis.bugs import BUGS, WITHOUT_A_LOCK, package_with
from tests.nemesis.checker import History, Report, check
from tests.nemesis.namespace import WAYS, Namespace
from tests.nemesis.process_pool import ProcessPool
from tests.nemesis.status_page import ASKING, HOLDING, IDLE, LEAVING, StatusPage
from tests.nemesis.task import Plan, Task, now
from tests.processes import Worker, state_of
from tests.proxy import Proxy
from tests.servers import SERVERS, START_SECONDS, Galera, MariaDB, PgBouncer, Server

STATES = {IDLE: "idle", ASKING: "asking", HOLDING: "holding", LEAVING: "leaving"}
# Attempts to stop a process in the wanted state. After these, any state is accepted.
SEEK = 40


class Campaign:
    def __init__(
        self,
        plan: Plan,
        directory: Path,
        server: Server | Galera | None,
        *,
        prepared: bool = False,
        locks: Server | None = None,
    ) -> None:
        self.plan = plan
        # The server of a peer's locks, if it is not the database.
        self.locks = locks
        # In a cluster the workers are spread over the nodes. The final state is read
        # from the first node.
        self.nodes = server.nodes if isinstance(server, Galera) else []
        # Whether the server has already been used by a campaign.
        self.prepared = prepared
        self.directory = directory
        self.server = server.nodes[0] if isinstance(server, Galera) else server
        self.random = random.Random(plan.seed)
        self.status_page = StatusPage(directory / "status-page")
        self.pids: dict[int, int] = {}
        self.stopped: dict[int, float] = {}
        self.proxy: Proxy | None = None
        self.pooler: PgBouncer | None = None
        self.namespace: Namespace | None = None
        self.process_pools: list[ProcessPool] = []
        # The end of the current partition.
        self.cut_until: float | None = None
        self._events = (directory / "campaign.history").open("w", buffering=1)
        self._over = threading.Event()
        self._ahead = False

    @property
    def environment(self) -> dict[str, str]:
        common = {"DLOCKS_TEST_DIRECTORY": str(self.directory)}
        if self.locks is not None:
            common["DLOCKS_TEST_REDIS"] = str(self.locks.port)
        if self.server is None:
            name = str(self.directory / "locks.sqlite3")
            return {"DLOCKS_TEST_ENGINE": "sqlite", "DLOCKS_TEST_NAME": name, **common}
        return {**self.server.environment, "DLOCKS_TEST_NAME": database.NAME, **common}

    def run(self, progress: Callable[[str], object] = lambda text: None) -> Report:
        plan = self.plan
        (self.directory / "plan.json").write_text(
            json.dumps(vars(plan), default=dict, indent=1)
        )
        with contextlib.ExitStack() as stack:
            stack.callback(self._events.close)
            others: list[dict[str, Any]] = [{}]
            if plan.skew:
                others.append({"preload": faketime(3600 * plan.skew)})
            if plan.through == "network":
                self.namespace = stack.enter_context(Namespace())
                others.append({"network": self.namespace.path})
            if plan.bug:
                package = stack.enter_context(package_with(plan.bug))
                others = [{**options, "package": package} for options in others]
            for options in others:
                pool = ProcessPool(self.environment, self.directory / "log", **options)
                stack.callback(pool.close)
                self.process_pools.append(pool)
            admin = Worker(**self.environment)
            stack.callback(admin.close)
            if self.server is not None and not self.prepared:
                database.create(self.server)
            admin.call(
                database.reset if self.prepared else database.prepare, list(plan.keys)
            )
            if plan.through in {"proxy", "network"}:
                assert self.server is not None
                where = () if self.namespace is None else (self.namespace.address,)
                self.proxy = Proxy(
                    self.server.port,
                    *where,
                    is_late=lambda seconds: self._note("late", now(), seconds),
                )
                stack.callback(self.proxy.close)
            elif plan.through == "pgbouncer":
                assert self.server is not None
                # A process that waits or is stopped in a transaction keeps its session.
                # With no more sessions than processes, all are taken at times, and then
                # no holder can release.
                self.pooler = stack.enter_context(
                    PgBouncer(self.server.port, sessions=plan.workers + 2)
                )
            watch = threading.Thread(target=self._watch_stalls, daemon=True)
            watch.start()
            stack.callback(self._over.set)
            for slot in range(plan.workers):
                self._start(slot)
            self._loop(progress)
            self._finish()
            self._over.set()
            watch.join()
            if self.nodes:
                self.nodes[0].catch_up()
            final = admin.call(database.final)
            if isinstance(self.server, MariaDB) and plan.engine in {"mariadb", "mysql"}:
                final["granted"] = database.logged(self.server)
            (self.directory / "final.json").write_text(json.dumps(final))
        return check(History.read(self.directory), one_writer=plan.engine == "sqlite")

    def _loop(self, progress: Callable[[str], object]) -> None:
        plan, names = self.plan, list(self.plan.faults)
        weights = [plan.faults[name] for name in names]
        began, told, done = now(), now(), 0
        end = began + plan.seconds
        while now() < end:
            self._resume()
            if now() >= told + (0.5 if plan.bug or not plan.locked else 10):
                told = now()
                progress(f"{told - began:.0f} s, {done} faults")
                if (plan.bug or not plan.locked) and self._shows():
                    # The expected violation has been found.
                    return
            if not names:
                time.sleep(0.1)
                continue
            time.sleep(
                min(self.random.uniform(0, 2 * plan.pause), max(0.0, end - now()))
            )
            (name,) = self.random.choices(names, weights)
            getattr(self, f"_fault_{name}")()
            done += 1

    def _shows(self) -> bool:
        """Return whether the history already shows the expected violations."""
        shown = set(check(History.read(self.directory, until=now())).violations)
        return (
            not shown.isdisjoint(BUGS[self.plan.bug].shows)
            if self.plan.bug
            else shown >= WITHOUT_A_LOCK
        )

    def _finish(self) -> None:
        for slot in list(self.stopped):
            self._continue(slot)
        for link in [] if self.proxy is None else self.proxy.links():
            link.swallows, link.late, link.delayed_until = False, 0.0, 0.0
        if self.cut_until is not None:
            self._heal()
        self.status_page.finish()
        deadline = now() + 25
        while any(_alive(pid) for pid in self.pids.values()) and now() < deadline:
            time.sleep(0.02)
        self._note("over", now())
        hanging = {slot: pid for slot, pid in self.pids.items() if _alive(pid)}
        if hanging and self.server is not None:
            seen = database.sessions(self.server)
            (self.directory / "sessions").write_text(seen)
        for slot, pid in hanging.items():
            note = self.directory / f"worker-{slot}-{pid}.crash"
            note.write_text(f"The process {pid} did not end; see its history.")
            with contextlib.suppress(ProcessLookupError):
                # It writes its stacks into the file of its process pool meanwhile.
                os.kill(pid, signal.SIGUSR2)
                time.sleep(0.5)
                os.kill(pid, signal.SIGKILL)

    def _start(self, slot: int) -> None:
        plan = self.plan
        port = (
            self.proxy.port
            if self.proxy is not None
            else self.pooler.port
            if self.pooler is not None
            else 0
        )
        host = ""
        if self.namespace is not None:
            host, port = (
                (self.namespace.address, port) if self._is_there(slot) else ("", 0)
            )
        if self.nodes:
            port = self.nodes[slot % len(self.nodes)].port
        task = Task(
            plan=plan,
            slot=slot,
            seed=self.random.getrandbits(32),
            directory=str(self.directory),
            host=host,
            port=port,
            far=slot % 3 == 2,
        )
        self.pids[slot] = self.process_pools[slot % len(self.process_pools)].start(task)
        if self.cut_until is not None and self._is_there(slot):
            self._note("partition", now(), self.pids[slot], "idle", "")

    def _is_there(self, slot: int) -> bool:
        """Return whether this worker is in the other namespace."""
        return slot % len(self.process_pools) == 1

    def _note(self, *event: Any) -> None:
        self._events.write(json.dumps(event) + "\n")

    def _watch_stalls(self) -> None:
        """Record when the machine stalled or ran other work.

        Delays in this time are not caused by the locks. A campaign alone keeps two
        processors busy, so its work takes up to three times as long as it would alone.
        Only the time beyond that is recorded.
        """
        last = now()
        while not self._over.wait(0.25):
            began, worked = now(), time.thread_time()
            while time.thread_time() < worked + 0.008:
                pass
            moment = now()
            taken = max(
                (moment - last) * (1 - 3 * 0.008 / (moment - began)),
                began - last - 0.35,
            )
            if taken > 0:
                self._note("stall", moment, taken)
            last = moment

    # Faults.

    def _catch(self, *states: int) -> tuple[int, float, str, str] | None:
        """Stop a process in one of these states, if one can be caught.

        Return its slot, the time, its state and its key.
        """
        running = [
            slot
            for slot in self.pids
            if slot not in self.stopped and _alive(self.pids[slot])
        ]
        if not running:
            return None
        for number in range(SEEK):
            candidates = [
                slot for slot in running if self.status_page.read(slot)[0] in states
            ]
            slot = self.random.choice(candidates or running)
            pid, moment = self.pids[slot], now()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                _await_stop(pid)
                state, key = self.status_page.read(slot)
                if state in states or number == SEEK - 1:
                    return slot, moment, STATES[state], self.plan.keys[key]
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.001)
        return None

    def _sought(self) -> int:
        if self.plan.seek and self.random.random() < 0.7:
            return next(
                state for state, name in STATES.items() if name == self.plan.seek
            )
        return self.random.choices([HOLDING, ASKING, LEAVING], [6, 2, 1])[0]

    def _fault_stop(self) -> None:
        """Stop a process that holds, acquires or releases a lock.

        It is stopped for less or more than its lease.
        """
        if len(self.stopped) > self.plan.workers // 2 - 1:
            # Some processes must keep running, to compete with the stopped ones when
            # they resume.
            return
        caught = self._catch(self._sought())
        if caught is not None:
            slot, moment, state, key = caught
            self._note("stop", moment, self.pids[slot], state, key)
            self.stopped[slot] = now() + self.random.uniform(0.6, 3.0) * self.plan.ttl

    def _fault_kill(self) -> None:
        caught = self._catch(self._sought())
        if caught is not None:
            slot, _, state, key = caught
            pid = self.pids[slot]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._note("kill", now(), pid, state, key)
            self._start(slot)

    def _resume(self) -> None:
        for slot, until in list(self.stopped.items()):
            if now() >= until:
                self._continue(slot)
        if self.cut_until is not None and now() >= self.cut_until:
            self._heal()

    def _continue(self, slot: int) -> None:
        del self.stopped[slot]
        self._note("cont", now(), self.pids[slot])
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[slot], signal.SIGCONT)

    def _fault_partition(self) -> None:
        """Cut off the other namespace while one of its processes holds a lock.

        The cut is in one or both directions, for long or for a few packets.
        """
        if self.cut_until is not None:
            return
        assert self.namespace is not None
        there = [slot for slot in self.pids if self._is_there(slot)]
        for _ in range(SEEK):
            if HOLDING in (self.status_page.read(slot)[0] for slot in there):
                break
            time.sleep(0.001)
        for slot in there:
            state, key = self.status_page.read(slot)
            self._note(
                "partition", now(), self.pids[slot], STATES[state], self.plan.keys[key]
            )
        self.namespace.cut(self.random.choice(list(WAYS)))
        self.cut_until = now() + self.random.uniform(
            0.6, 3.0
        ) * self.plan.ttl * self.random.choice([1, 0.1])

    def _heal(self) -> None:
        assert self.namespace is not None
        self.namespace.heal()
        self.cut_until = None
        for slot, pid in self.pids.items():
            if self._is_there(slot):
                self._note("heal", now(), pid)

    def _fault_clock(self) -> None:
        """Step the server's clock forward or back by less than the grace."""
        assert self.server is not None
        self._ahead = not self._ahead
        step(self.server.directory / "clock", 0.4 if self._ahead else 0.0)
        self._note("clock", now(), 0.4 if self._ahead else -0.4)

    def _fault_sessions(self) -> None:
        """End all sessions from the server's side, or every second one."""
        assert self.server is not None
        ended = database.end_sessions(
            self.server, self.random, everybody=self.random.random() < 0.3
        )
        self._note("sessions", now(), ended)

    def _fault_restart(self) -> None:
        assert self.server is not None
        self._note("down", now(), "restart")
        self.server.restart()
        self._note("up", now())

    def _fault_crash(self) -> None:
        server = self.locks or self.server
        assert server is not None
        self._note("down", now(), "crash")
        server.crash()
        server.start()
        self._note("up", now())

    def _fault_node_crash(self) -> None:
        """Kill a node of the cluster and restart it a little later.

        It then receives the writes that it has missed.
        """
        node = self.random.choice(self.nodes)
        self._note("down", now(), "node crash")
        node.crash()
        time.sleep(self.random.uniform(0, 1.0) * self.plan.ttl)
        node.come_back(*(one for one in self.nodes if one is not node))
        self._wait_until_all_are_there()
        self._note("up", now())

    def _fault_node_stop(self) -> None:
        """Stop a node for a moment, or until the others continue without it."""
        node = self.random.choice(self.nodes)
        assert node.process is not None
        self._note("down", now(), "node stop")
        node.process.send_signal(signal.SIGSTOP)
        time.sleep(self.random.choice([0.5, 2.0, 8.0]))
        node.process.send_signal(signal.SIGCONT)
        self._wait_until_all_are_there()
        self._note("up", now())

    def _wait_until_all_are_there(self) -> None:
        """Wait until all nodes have joined the cluster again.

        A node that was away for long joins again. Its own status alone does not show
        that it was away.
        """
        deadline = now() + START_SECONDS
        while not all(
            one.is_ready() and one.status("wsrep_cluster_size") == str(len(self.nodes))
            for one in self.nodes
        ):
            if now() > deadline:
                raise RuntimeError("The nodes did not form a cluster again.")
            time.sleep(0.05)

    def _fault_swallow(self) -> None:
        """Forward a request, and cut the connection instead of its reply."""
        assert self.proxy is not None
        for link in self.proxy.one(self.random):
            link.swallows = True
        self._note("swallow", now())

    def _fault_delay(self) -> None:
        """Delay replies for a while."""
        assert self.proxy is not None
        until = now() + self.random.uniform(0.1, 1.2) * self.plan.ttl
        for link in self.proxy.some(self.random):
            link.delayed_until = until
        self._note("delay", now())

    def _fault_late(self) -> None:
        """Delay the replies to the next requests, whenever these are sent."""
        assert self.proxy is not None
        seconds = self.random.uniform(0.1, 1.2) * self.plan.ttl
        for link in self.proxy.some(self.random):
            link.late = seconds

    def _fault_cut(self) -> None:
        assert self.proxy is not None
        for link in self.proxy.one(self.random):
            link.cut()
        self._note("cut", now())


def run(
    plan: Plan,
    kept: Path | None = None,
    progress: Callable[[str], object] = lambda text: None,
    server: Server | Galera | None = None,
    *,
    prepared: bool = False,
    locks: Server | None = None,
) -> Report:
    """Run a plan and return its report.

    Without ``server`` it starts one. The history is kept in the directory ``kept``, if
    there is one.
    """
    with contextlib.ExitStack() as stack:
        if kept is None:
            directory = Path(
                stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="dlocks-nemesis-")
                )
            )
        else:
            directory = kept
            directory.mkdir(parents=True, exist_ok=True)
            for name in ("worker-*", "campaign.history", "final.json", "status-page"):
                # Files of an earlier run with this seed would be read as part of this
                # history.
                for path in directory.glob(name):
                    path.unlink()
        if server is None and plan.engine != "sqlite":
            server = stack.enter_context(server_for(plan.engine, clock=plan.clock))
        return Campaign(plan, directory, server, prepared=prepared, locks=locks).run(
            progress
        )


@contextlib.contextmanager
def server_for(engine: str, *, clock: bool = False) -> Iterator[Server | Galera]:
    """Start a server whose clock can be stepped, or a cluster of three nodes."""
    if engine == "galera":
        with Galera() as cluster:
            yield cluster
        return
    server = SERVERS[engine]()
    if clock:
        server.environment_of_its_own = faketime(steps=server.directory / "clock")
    if isinstance(server, MariaDB):
        server.options = database.BINARY_LOG
    with server:
        yield server


def _alive(pid: int) -> bool:
    return state_of(pid) not in "ZX"


def _await_stop(pid: int) -> None:
    deadline = now() + 1
    while now() < deadline and state_of(pid) not in "TZX":
        time.sleep(0.0005)
