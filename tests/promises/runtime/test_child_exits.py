"""The exit of processes that skip atexit.

Such processes are the children of multiprocessing and the workers of Celery.
"""

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dlocks import LeaderElection
from dlocks.models import HoldRecord, ResourceLock
from tests.celery_app import application
from tests.timing import TooLateError, eventually

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

ROOT = Path(__file__).parent.parent.parent
# A process takes a second to start, and each look costs a query.
until = partial(eventually, pause=0.05)


@pytest.fixture
def program():
    """Return a function that starts ``python -m ...`` on this test's database.

    The process is killed at the end of the test.
    """
    started = []

    def start(*arguments, **environment):
        ignored = "ignore:This process:DeprecationWarning"
        process = subprocess.Popen(
            [sys.executable, "-W", ignored, "-m", *arguments],
            env={
                **os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings",
                "PYTHONPATH": str(ROOT), **environment,
            },
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def records():
    return dict(HoldRecord.objects.values_list("key_resource", "ending"))


def all_of(*names):
    """Return the records of the holds of children with these names."""
    return {
        f"{name}{key}": ending
        for name in names
        for key, ending in {"left": "F", **dict.fromkeys(ENDED, "R")}.items()
    }


ENDED = [f"ended:{number}" for number in range(6)]


def test_a_child_releases_and_records(program, tmp_path, is_busy):
    """A child releases its holds and writes its history before it exits.

    After ``os.fork()`` it calls ``dlocks.shutdown()`` for this. The key of an election
    is free at once, too. A lock is not released while a thread of the child works under
    it. multiprocessing waits for the threads of a child.
    """
    children = [f"{kind}:work" for kind in ("fork", "forkserver", "pool", "os.fork")]
    last, end = "fork:work_in_a_thread", tmp_path / "end"
    process = program(
        "tests.children", *children, "fork:lead", last, DLOCKS_TEST_END=str(end)
    )
    until(ResourceLock.objects.filter(pk="thread").exists)
    before = all_of(*(f"{child}:" for child in children))
    everything = before | all_of(f"{last}:")
    if sys.version_info < (3, 13):
        # The other holds are released before the thread has ended. Newer Python
        # versions join the threads first.
        until(lambda: records() == everything)
    assert before.items() <= records().items()
    row = ResourceLock.objects.by_clock().get(pk="leader:cleaner")
    assert row.state == "free"
    assert LeaderElection("cleaner").leader() is None
    assert is_busy("thread")
    end.touch()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    for line in output.splitlines():
        assert re.match(r"'\S+:left' was never released by \S+, whose process", line)
    assert records() == {**everything, "thread": "R"}
    for key in "thread", *(key for key in everything if key.endswith("left")):
        assert not is_busy(key)


@pytest.mark.once
def test_a_replaced_celery_worker_releases_and_records(program, tmp_path):
    """A worker releases its holds and writes its history before it exits.

    With ``--max-tasks-per-child`` a worker is replaced after its tasks. After SIGTERM
    the workers exit too.
    """
    worker = program(
        "celery", "-A", "tests.celery_app", "worker", "--pool=prefork",
        "--concurrency=1", "--loglevel=INFO", "--max-tasks-per-child=2",
        "--without-gossip", "--without-mingle", "--without-heartbeat",
        DLOCKS_TEST_BROKER=str(tmp_path),
    )  # fmt: skip
    celery = application(tmp_path, set_as_current=False)
    for name in "abc":
        celery.send_task("tests.celery_app.work", [name])
    left = ResourceLock.objects.filter(pk__endswith="left")
    until(lambda: left.count() == 3)
    # The first process has ended, and the second one still holds a key.
    ended = HoldRecord.objects.filter(key_resource__endswith="left")
    until(lambda: ended.count() == 2)
    # A new row is free for a moment.
    until(lambda: left.filter(status="P").count() == 1)
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=60)
    expected = all_of("a", "b", "c")
    if expected.keys() - records().keys() == {"cleft"}:
        # A second SIGTERM ends a worker that exits slowly (Pool._terminate_pool() of
        # billiard), and may hit the last write.
        raise TooLateError("Celery ended the worker before it had exited.")
    assert records() == expected, output
    assert not left.filter(status="P").exists()
