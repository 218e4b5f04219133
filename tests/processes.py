"""Processes that run functions of tests/jobs.py for the tests."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import multiprocessing
import os
import random
import re
import secrets
import signal
import sqlite3
import tempfile
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.timing import TooLateError

# A process starts within milliseconds, because its imports are done once in the fork
# server. The fork server has no threads and no connections.
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(["tests.preload"])
_spawning = multiprocessing.get_context("spawn")
_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """A process with its own connections.

    A process that is ``far`` notifies others, and is notified, as if it were on another
    host.

    A job is ``function(pipe, *args, **kwargs)``. It may exchange messages with the test
    over the pipe before it returns.
    """

    def __init__(self, *, far: bool = False, **environment: str) -> None:
        self.far = far
        # Whether the last job has ended. A process that a failed test left at work
        # cannot be used by the next test.
        self.is_idle = True
        # A preloaded library must be present when the program starts.
        context = _spawning if "LD_PRELOAD" in os.environ else _forking
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, environment, far), daemon=True
        )
        self.process.start()
        theirs.close()
        _workers.add(self)

    def start(self, job: Any, *args: Any, **kwargs: Any) -> None:
        self.is_idle = False
        self.pipe.send((job, args, kwargs))

    def hear(self, seconds: float = 120.0) -> Any:
        """Return the next message of the job."""
        if not self.pipe.poll(seconds):
            raise TimeoutError("the process said nothing")
        kind, value = self.pipe.recv()
        self.is_idle = kind != "said"
        if kind == "error":
            # Lists of failures show the first line only.
            error = value.rstrip().rpartition("\n")[2]
            late = "TooLateError" in error
            raise (TooLateError if late else RuntimeError)(f"{error}\n{value}")
        return value

    def tell(self, value: Any = "go") -> None:
        self.pipe.send(value)

    def call(self, job: Any, *args: Any, **kwargs: Any) -> Any:
        """Start a job. Return what it says first, or its result if it says nothing."""
        self.start(job, *args, **kwargs)
        return self.hear()

    def go_on(self, value: Any = "go") -> Any:
        """Let a job go on. Return what it says next, or its result."""
        self.tell(value)
        return self.hear()

    @contextlib.contextmanager
    def doing(self, job: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Run a job around a block, from its first message, which is yielded.

        The job goes on at the end of the block, and has ended without an error then.
        """
        self.start(job, *args, **kwargs)
        try:
            yield self.hear()
        finally:
            self.tell()
        self.hear()

    def stop(self) -> None:
        """Stop the process, but on SQLite never in the middle of a write.

        A process that stops there would keep all others from writing.
        """
        self._stop()
        for _ in range(5):
            if not _nobody_can_write():
                return
            self.resume()
            time.sleep(random.uniform(0.001, 0.02))
            self._stop()

    def _stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        # The signal has been sent but may not have taken effect yet.
        deadline = time.monotonic() + 10
        while state_of(self.process.pid) not in "TZ" and time.monotonic() < deadline:
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.killed_at = time.monotonic()
        self.process.kill()
        self.process.join(10)
        self.pipe.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
        self.pipe.close()


def together(workers: Iterable[Worker]) -> list[Any]:
    """Let jobs go on when each has sent a message. Return their results."""
    workers = list(workers)
    for worker in workers:
        worker.hear()
    for worker in workers:
        worker.tell()
    return [worker.hear() for worker in workers]


def state_of(pid: int) -> str:
    """Return the state of a process in one letter, as ``ps`` does.

    It is Z also for a process that no longer exists.
    """
    return _state_in(Path(f"/proc/{pid}/stat"))


def states_of(pid: int) -> set[str]:
    """Return the states of the threads of a process."""
    return {_state_in(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")}


def _state_in(path: Path) -> str:
    try:
        return path.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def _nobody_can_write() -> bool:
    """Return whether SQLite's write lock is held for longer than a write takes."""
    from django.db import connection

    if (
        connection.vendor != "sqlite"
        or not Path(connection.settings_dict["NAME"]).exists()
    ):
        return False
    database = sqlite3.connect(
        connection.settings_dict["NAME"], timeout=0.3, isolation_level=None
    )
    with contextlib.closing(database):
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return True
    return False


def _stacks(pid: int) -> Path:
    return Path(
        os.environ.get("DLOCKS_TEST_DIRECTORY", tempfile.gettempdir()), f"stacks-{pid}"
    )


def stack_dumps() -> list[str]:
    """Return the stacks of all threads of the processes at work.

    There is one line per thread, with its innermost call first.
    """
    working = [
        worker
        for worker in _workers
        if worker.process.is_alive() and not worker.is_idle
    ]
    for worker in working:
        # The process may have ended just now.
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.process.pid, signal.SIGUSR2)
    # A stopped process does not answer.
    time.sleep(0.5 if working else 0)
    lines = []
    for worker in working:
        with contextlib.suppress(OSError):
            for stack in re.split(r"\n\n", _stacks(worker.process.pid).read_text()):
                calls = re.findall(r'/([^/"]+)", line (\d+) in (\w+)', stack)[:9]
                lines.append(
                    f"process {worker.process.pid}: "
                    + " < ".join(":".join(call) for call in calls)
                )
    return lines


class Pipe:
    """The job's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: Any) -> None:
        self._connection.send(("said", value))

    def hear(self) -> Any:
        return self._connection.recv()

    def pause(self, value: Any) -> None:
        """Say something, and go on when told."""
        self.say(value)
        self.hear()

    def poll(self) -> bool:
        return self._connection.poll()


def _serve(connection: Connection, environment: dict[str, str], far: bool) -> None:
    os.environ.update(environment, DJANGO_SETTINGS_MODULE="tests.settings")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # ``stack_dumps()`` reads this file. It stays open for as long as the process lives.
    faulthandler.register(signal.SIGUSR2, file=_stacks(os.getpid()).open("w"))
    import django

    django.setup()
    if far:
        go_far_away()
    if environment:
        _read_settings_again()
    pipe = Pipe(connection)
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        job, args, kwargs = request
        try:
            result = job(pipe, *args, **kwargs)
        except BaseException:
            connection.send(("error", traceback.format_exc()))
        else:
            connection.send(("done", result))


def on_database(**changes: object) -> dict[str, str]:
    """Return the environment of a process with changed settings of the database."""
    from django.db import connection

    names = "ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT"
    there = {name: str(connection.settings_dict[name]) for name in names}
    return {"DLOCKS_TEST_DATABASES": json.dumps({"default": {**there, **changes}})}


def disconnect(pipe: Pipe) -> None:
    """Close the connections of a worker, whose sessions a test may have ended."""
    from django.db import connections

    connections.close_all()


def go_far_away() -> None:
    """Make this process behave as if no other process were on the same host."""
    from tests.internals import notify

    other_host = f"{secrets.token_hex(4)}_"
    notify.this_host = lambda: other_host


def _read_settings_again() -> None:
    """Read the settings again with the environment of this process.

    The first reading was before the fork, in another environment. Its result has not
    been used yet.
    """
    from django.conf import settings
    from django.core.signals import setting_changed
    from django.db import connections

    module = importlib.reload(importlib.import_module("tests.settings"))
    for alias in list(connections):
        if hasattr(connections._connections, alias):  # type: ignore[attr-defined]
            del connections[alias]
    for name in ("DATABASES", "DLOCKS"):
        setattr(settings, name, getattr(module, name))
        setting_changed.send(
            sender=None, setting=name, value=getattr(module, name), enter=True
        )
    connections._settings = None  # type: ignore[assignment]
    vars(connections).pop("settings", None)


def living(group: int) -> list[Path]:
    """Return the processes of a process group, without zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, process_group, *_ = (
                path.read_text().rpartition(")")[2].split()
            )
        except OSError:
            continue
        if state != "Z" and int(process_group) == group:
            found.append(path)
    return found
