"""A process with all imports done, which forks workers within milliseconds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.nemesis.task import Task


class ProcessPool:
    """The client of the process, which starts workers."""

    def __init__(
        self, environment: Mapping[str, str], log: Path, before: Sequence[str] = ()
    ) -> None:
        """Start the process with this environment, and ``before`` as a prefix."""
        self._log_path = log
        self._log = log.open("ab")
        self._process = subprocess.Popen(
            [*before, sys.executable, "-m", "tests.nemesis.process_pool"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **os.environ,
                **environment,
                "DJANGO_SETTINGS_MODULE": "tests.settings",
            },
        )
        self._mutex = threading.Lock()

    def start(self, task: Task) -> int:
        """Start a worker and return its process id."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with self._mutex:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
                process.stdin.flush()
            if answer := process.stdout.readline():
                return int(answer)
            log = self._log_path.read_text(errors="replace")[-3000:]
            raise RuntimeError(
                f"The process pool ended with {process.wait(15)}:\n{log}"
            )

    def close(self) -> None:
        """End the process together with its workers."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        self._log.close()


def main() -> None:
    import django

    django.setup()

    from tests.nemesis import worker
    from tests.servers import die_with_parent

    # The process is started by one thread, and workers end together with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    children: list[int] = []
    for line in iter(sys.stdin.buffer.readline, b""):
        task = Task(**json.loads(line))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                die_with_parent(signal.SIGKILL)
                os.close(0)
                worker.main(task)
                status = 0
            except BaseException:
                traceback.print_exc()
                note = Path(task.directory) / f"worker-{task.slot}-{os.getpid()}.crash"
                note.write_text(traceback.format_exc())
            sys.stderr.flush()
            os._exit(status)
        children.append(child)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    deadline = time.monotonic() + 5
    for child in children:
        with contextlib.suppress(ChildProcessError, ProcessLookupError):
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.01)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
