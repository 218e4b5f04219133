"""Child processes that end by os._exit().

``python -m tests.children KIND`` starts one and waits for its end.
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


def work() -> None:
    """Release six holds that are recorded in the history, and keep another one."""
    for number in range(6):
        with db_lock(f"ended:{number}", using="recorded"):
            pass
    # The list keeps the hold alive. A hold without a reference is not renewed.
    left.append(db_lock("left", using="recorded").acquire())


def work_in_a_thread() -> None:
    """Keep a hold, and a thread that holds a lock until a file exists."""

    def hold() -> None:
        with db_lock("thread", using="recorded"):
            begun.set()
            while not Path(os.environ["DLOCKS_TEST_END"]).exists():
                time.sleep(0.01)

    begun = threading.Event()
    threading.Thread(target=hold).start()
    begun.wait()
    work()


def lead() -> None:
    """Start an election in a thread and leave it running."""
    elected = threading.Event()
    left.append(LeaderElection("cleaner", on_elected=lambda hold: elected.set()))
    left[0].start()
    elected.wait()


left: list[object] = []


def main(kind: str, job: str = "work") -> int:
    target = globals()[job]
    if kind == "os.fork":
        child = os.fork()
        if child == 0:
            target()
            dlocks.shutdown()
            os._exit(0)
        return os.waitpid(child, 0)[1]
    if kind == "pool":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            pool.apply(target)
            pool.close()
            pool.join()
        return 0
    process = multiprocessing.get_context(kind).Process(target=target)
    process.start()
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
