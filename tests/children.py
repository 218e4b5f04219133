"""Child processes that end by os._exit().

``python -m tests.children KIND:JOB ...`` starts each of them and waits for its end.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

import dlocks  # noqa: E402
from dlocks import LeaderElection, db_lock  # noqa: E402


def work(name: str = "") -> None:
    """Release six holds that are recorded in the history, and keep another one."""
    for number in range(6):
        with db_lock(f"{name}ended:{number}", using="recorded"):
            pass
    # The list keeps the hold alive. A hold without a reference is not renewed.
    left.append(db_lock(f"{name}left", using="recorded").acquire())


def work_in_a_thread(name: str) -> None:
    """Keep a hold, and a thread that holds a lock until a file exists."""

    def hold() -> None:
        with db_lock("thread", using="recorded"):
            begun.set()
            while not Path(os.environ["DLOCKS_TEST_END"]).exists():
                time.sleep(0.01)

    begun = threading.Event()
    threading.Thread(target=hold).start()
    begun.wait()
    work(name)


def lead(name: str) -> None:
    """Start an election in a thread and leave it running."""
    elected = threading.Event()
    left.append(LeaderElection("cleaner", on_elected=lambda hold: elected.set()))
    left[0].start()
    elected.wait()


left: list[object] = []


def run(kind: str, job: str) -> None:
    target, name = globals()[job], f"{kind}:{job}:"
    if kind == "os.fork":
        child = os.fork()
        if child == 0:
            target(name)
            dlocks.shutdown()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    elif kind == "pool":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(target, [name])
            pool.close()
            pool.join()
    else:
        process = multiprocessing.get_context(kind).Process(target=target, args=[name])
        process.start()
        process.join()
        assert process.exitcode == 0


if __name__ == "__main__":
    for one in sys.argv[1:]:
        run(*one.split(":"))
