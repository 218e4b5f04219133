"""A process with all imports done, which forks workers within milliseconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.nemesis.task import Task
from tests.processes import Worker
from tests.servers import die_with_parent


class ProcessPool:
    """The client of the process, which starts workers."""

    def __init__(
        self,
        environment: Mapping[str, str],
        log: Path,
        *,
        network: str = "",
        preload: Mapping[str, str] | None = None,
        package: Path | None = None,
    ) -> None:
        """Start the process with this environment, and in a network namespace.

        A library is preloaded only if its variables are set when the program starts.
        With a directory ``package``, dlocks is imported from there.
        """
        self._mutex = threading.Lock()
        before, path = dict(os.environ), list(sys.path)
        if package is not None:
            # The variable is empty, but the worker starts a new interpreter for it. A
            # fork would have imported dlocks.
            preload = {"LD_PRELOAD": "", **(preload or {})}
            sys.path.insert(0, str(package))
        os.environ.update(preload or {})
        try:
            self._process = Worker(**environment, **(preload or {}))
        finally:
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(before)
        self._process.start(serve, str(log), network)

    def start(self, task: Task) -> int:
        """Start a worker and return its process id."""
        with self._mutex:
            self._process.tell(task)
            return int(self._process.hear())

    def close(self) -> None:
        """End the process together with its workers."""
        with contextlib.suppress(OSError, EOFError):
            self._process.tell(None)
            self._process.hear(15)
        self._process.close()


def serve(pipe: Any, log: str, network: str) -> None:
    """Fork a worker for each task, until there are no more."""
    from tests.nemesis import worker

    if network:
        enter_network(network)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    # The process is started by one thread, and workers end together with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    children: list[int] = []
    while (task := pipe.hear()) is not None:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent(signal.SIGKILL)
                worker.main(task)
                status = 0
            except BaseException:
                traceback.print_exc()
                note = Path(task.directory) / f"worker-{task.slot}-{os.getpid()}.crash"
                note.write_text(traceback.format_exc())
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
        pipe.say(child)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    deadline, sleep = time.monotonic() + 5, worker.tolerant(time.sleep)
    for child in children:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                sleep(0.01)


def enter_network(path: str) -> None:
    """Move this process into a network namespace."""
    clone_newnet = 0x40000000
    with Path(path).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), clone_newnet):
            raise OSError(ctypes.get_errno(), "setns() failed", path)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
