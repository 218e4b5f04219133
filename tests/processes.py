"""Processes that tests talk to: each runs functions of tests/jobs.py on request."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("spawn")


class Worker:
    """
    A process of its own, with its own connections.

    A job is ``function(pipe, *args, **kwargs)``: it may speak with the test over the pipe before it returns.
    """

    def __init__(self, **environment: str) -> None:
        # Whether its last job has ended: one that a failed test left at work is of no use to the next.
        self.is_idle = True
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(theirs, environment), daemon=True)
        self.process.start()
        theirs.close()

    def start(self, job: Any, *args: Any, **kwargs: Any) -> None:
        self.is_idle = False
        self.pipe.send((job, args, kwargs))

    def hear(self, seconds: float = 60.0) -> Any:
        """Return what the job says next."""
        if not self.pipe.poll(seconds):
            raise TimeoutError("the process said nothing")
        kind, value = self.pipe.recv()
        self.is_idle = kind != "said"
        if kind == "error":
            raise RuntimeError(value)
        return value

    def tell(self, value: Any = "go") -> None:
        self.pipe.send(value)

    def call(self, job: Any, *args: Any, **kwargs: Any) -> Any:
        self.start(job, *args, **kwargs)
        return self.hear()

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

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


class Pipe:
    """The job's side of the conversation."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, value: Any) -> None:
        self._connection.send(("said", value))

    def hear(self) -> Any:
        return self._connection.recv()


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment, DJANGO_SETTINGS_MODULE="tests.settings")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import django

    django.setup()
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
