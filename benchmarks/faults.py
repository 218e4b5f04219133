"""What happens to a lock when its holder dies or pauses, or its server dies."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from django.db import connections, transaction

from benchmarks.contenders import CONTENDERS, Contender, Dlocks, DlocksAlias
from benchmarks.crew import PROCESSES, WorkerError
from tests.servers import Server

# Seconds for which a lock outlives a holder that does not renew it. This is the
# shortest session that ZooKeeper allows by default.
TTL = 4
# Seconds of waiting beyond the ttl. A longer wait ends only with the pause, or never.
MARGIN = 8.0
# Seconds within which a holder is notified of a loss. Leases of 30 s are renewed every
# 10 s, so a later notification will not come.
NOTIFIED_WITHIN = 12.0
# Seconds that count as at once.
BRIEFLY = 0.1
# Seconds for which a key is tried after its server is back. The first hold's lease
# lasts longer.
AFTER_RESTART = 5.0

TABLE = "benchmarks_work"
WORK = ("unguarded", "token-checked", "guarded")


class Actor:
    """A process with one contender, which reports its progress over a pipe."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        ttl: float | None,
        *arguments: Any,
    ) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        self.process = PROCESSES.Process(
            target=_act, args=(function, theirs, name, ttl, *arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def hear(self, seconds: float = 60.0) -> Any:
        """Return its next report, or None if there is none within ``seconds``."""
        if not self.pipe.poll(seconds):
            return None
        try:
            well, answer = self.pipe.recv()
        except EOFError:
            raise WorkerError("a worker died") from None
        if not well:
            raise WorkerError(answer)
        return answer

    def must_say(self, word: Any) -> None:
        if (said := self.hear()) != word:
            raise WorkerError(f"said {said!r}, not {word!r}")

    def go_on(self) -> None:
        self.pipe.send(None)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


def _act(
    function: Callable[..., Any],
    pipe: Connection,
    name: str,
    ttl: float | None,
    *arguments: Any,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    contender = CONTENDERS[name]
    if ttl is not None:
        contender.ttl = ttl

    def say(word: Any) -> None:
        pipe.send((True, word))

    try:
        contender.start()
        function(contender, say, pipe.recv, *arguments)
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))


@contextmanager
def actors() -> Iterator[Callable[..., Actor]]:
    """Yield a function that starts an actor. The end of the block ends them all."""
    started: list[Actor] = []

    def start(*arguments: Any) -> Actor:
        started.append(Actor(*arguments))
        return started[-1]

    try:
        yield start
    finally:
        for actor in started:
            actor.close()


def _hold(contender: Contender, say: Any, hear: Any, key: str) -> None:
    with contender.hold(key) as held:
        say("held")
        hear()
        # Another process may hold the key now. Measure how long this one believes that
        # it still does.
        deadline = time.monotonic() + NOTIFIED_WITHIN
        while (believes := _believes(held)) and time.monotonic() < deadline:
            time.sleep(0.01)
        say(None if believes else time.monotonic())
        hear()


def _take(contender: Contender, say: Any, hear: Any, key: str) -> None:
    # Connect, by acquiring a key of its own.
    with contender.hold(f"{key}-beside"):
        pass
    say("ready")
    hear()
    say("asking")
    with contender.hold(key):
        say(time.monotonic())
        hear()


def _believes(held: Any) -> bool:
    """Return whether the holder still believes that it has the lock."""
    for attribute in ("held", "is_acquired"):
        if isinstance(answer := getattr(held, attribute, None), bool):
            return answer
    # redis-py does not notify a holder.
    return True


def kill(names: list[str]) -> dict[str, float | None]:
    """Kill the holder, and return the seconds until the next one has the lock."""
    seconds: dict[str, float | None] = {}
    with actors() as start:
        nexts = {name: start(_take, name, TTL, "kill") for name in names}
        for actor in nexts.values():
            actor.must_say("ready")
        holders = {name: start(_hold, name, TTL, "kill") for name in names}
        for actor in holders.values():
            actor.must_say("held")
        for actor in nexts.values():
            actor.go_on()
            actor.must_say("asking")
        # Let all of them begin to wait.
        time.sleep(0.5)
        killed = {}
        for name, actor in holders.items():
            killed[name] = time.monotonic()
            actor.signal(signal.SIGKILL)
        for name, actor in nexts.items():
            granted = actor.hear(TTL + MARGIN)
            seconds[name] = None if granted is None else granted - killed[name]
    return seconds


def pause(names: list[str], work: str) -> dict[str, str]:
    """Pause the holder for longer than its lease, then let it continue.

    During the pause, the next holder does the same work. Each one reads a number and
    writes that number plus one. Return the outcome of each contender.
    """
    outcomes = {}
    with actors() as start:
        seconds = {}
        for name in names:
            if why := _cannot(CONTENDERS[name], work):
                outcomes[name] = why
            else:
                seconds[name] = start(_read_and_write, name, TTL, work)
        for actor in seconds.values():
            actor.must_say("ready")
        firsts = {name: start(_read_and_write, name, TTL, work) for name in seconds}
        for actor in firsts.values():
            actor.must_say("ready")
            actor.go_on()
        for actor in firsts.values():
            actor.must_say("read")
            actor.signal(signal.SIGSTOP)
        try:
            for actor in seconds.values():
                actor.go_on()
            got = {}
            deadline = time.monotonic() + TTL + MARGIN
            for name, actor in seconds.items():
                got[name] = (
                    actor.hear(max(0.0, deadline - time.monotonic())) is not None
                )
                if got[name]:
                    actor.go_on()
                    actor.must_say("written")
        finally:
            for actor in firsts.values():
                actor.signal(signal.SIGCONT)
        for name, actor in firsts.items():
            actor.go_on()
            said = actor.hear()
            outcomes[name] = (
                "no other holder"
                if not got[name]
                else "lost an update"
                if said == "written"
                else "refused"
            )
    return outcomes


def _cannot(contender: Contender, work: str) -> str | None:
    from dlocks.conf import backends

    if work == "unguarded":
        return None
    if not isinstance(contender, DlocksAlias):
        return "no token" if work == "token-checked" else "not supported"
    if work == "guarded" and not backends[contender.using].supports_guard:
        return "not supported"
    return None


def _read_and_write(contender: Contender, say: Any, hear: Any, work: str) -> None:
    from dlocks import LockError

    # The work is in the database of the locks, if they are in one.
    database = contender.database if isinstance(contender, Dlocks) else "postgresql"
    key = f"{contender.name} {work}"

    def run(statement: str, *parameters: Any) -> Any:
        with connections[database].cursor() as cursor:
            cursor.execute(statement.format(table=TABLE), parameters)
            return (
                cursor.fetchone()[0]
                if statement.startswith("SELECT")
                else cursor.rowcount
            )

    with contender.hold(f"{key}-beside {os.getpid()}"):
        run("SELECT COUNT(*) FROM {table}")
    say("ready")
    hear()
    try:
        with contender.hold(key) as hold:
            if work == "token-checked":
                run(
                    "UPDATE {table} SET token = %s WHERE name = %s AND token <= %s",
                    hold.token,
                    key,
                    hold.token,
                )
            value = run("SELECT value FROM {table} WHERE name = %s", key)
            say("read")
            hear()
            if work == "unguarded":
                written = run(
                    "UPDATE {table} SET value = %s WHERE name = %s", value + 1, key
                )
            elif work == "token-checked":
                written = run(
                    "UPDATE {table} SET value = %s WHERE name = %s AND token = %s",
                    value + 1,
                    key,
                    hold.token,
                )
            else:
                with hold.atomic():
                    written = run(
                        "UPDATE {table} SET value = %s WHERE name = %s", value + 1, key
                    )
            say("written" if written else "refused")
    except LockError:
        # The loss may also be raised at the end of the block, after the write.
        say("refused")
    except Exception as error:
        if (
            "acquire" not in type(error).__name__.lower()
            and "LockNotOwned" not in type(error).__name__
        ):
            raise
        say("refused")


def make_table(databases: list[str], names: list[str]) -> None:
    """Create the table on which the work is done."""
    for database in databases:
        with (
            transaction.atomic(using=database),
            connections[database].cursor() as cursor,
        ):
            cursor.execute(
                f"CREATE TABLE {TABLE} (name varchar(100) PRIMARY KEY, value bigint NOT"
                " NULL, token bigint NOT NULL)"
            )
            cursor.executemany(
                f"INSERT INTO {TABLE} (name, value, token) VALUES (%s, 0, 0)",
                [(f"{name} {work}",) for name in names for work in WORK],
            )


def restart(name: str, servers: list[Server]) -> str:
    """Kill the server while a lock is held, and start it again.

    Return whether another process acquires the lock as well.
    """
    with actors() as start:
        holder = start(_hold, name, None, "restart")
        holder.must_say("held")
        for server in servers:
            server.crash()
        for server in servers:
            server.start()
        following = start(_take, name, None, "restart")
        following.must_say("ready")
        following.go_on()
        following.must_say("asking")
        granted = following.hear(AFTER_RESTART)
        holder.go_on()
        told = holder.hear()
    if granted is None:
        return "kept" if told is None else "reported as lost, not granted again"
    if told is None:
        return "granted twice, the first never notified"
    return (
        f"granted twice, for {told - granted:.1f} s"
        if told - granted > BRIEFLY
        else "lost, its holder notified"
    )
