"""The exit of processes that skip atexit.

Such processes are the children of multiprocessing and the workers of Celery.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlocks import LeaderElection, db_lock
from tests.celery_app import application
from tests.internals import HoldRecord, ResourceLock

pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
]

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def program(request):
    """Return a function that starts ``python -m ...`` on this test's database.

    The process is killed at the end of the test.
    """

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

        def stop():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

        request.addfinalizer(stop)
        return process

    return start


def records():
    return dict(HoldRecord.objects.values_list("key_resource", "ending"))


ALL = {**{f"ended:{number}": "R" for number in range(6)}, "left": "F"}


@pytest.mark.parametrize("kind", ["fork", "forkserver", "pool", "os.fork"])
def test_a_child_releases_and_records(kind, program):
    """A child releases its holds and writes its history before it exits.

    After ``os.fork()`` it calls ``dlocks.shutdown()`` for this.
    """
    process = program("tests.children", kind)
    assert process.communicate(timeout=60) == ("", None)
    assert process.returncode == 0
    assert records() == ALL
    with db_lock("left", timeout=0):
        pass
    if kind == "fork":
        # The key of an election is free at once, too.
        leader = program("tests.children", kind, "lead")
        assert leader.communicate(timeout=60) == ("", None)
        row = ResourceLock.objects.by_clock().get(pk="leader:cleaner")
        assert row.state == "free"
        assert LeaderElection("cleaner").leader() is None


def test_a_running_thread_of_a_child_keeps_its_lock(program, until, tmp_path, is_busy):
    """A lock is not released while a thread of the child works under it.

    multiprocessing waits for the threads of a child.
    """
    end = tmp_path / "end"
    process = program(
        "tests.children", "fork", "work_in_a_thread", DLOCKS_TEST_END=str(end)
    )
    if sys.version_info < (3, 13):
        # The other holds are released before that. Newer Python versions join the
        # threads first.
        until(lambda: records() == ALL, seconds=60)
    until(lambda: is_busy("thread"), seconds=60)
    end.touch()
    output, _ = process.communicate(timeout=60)
    if output:
        # The keeper may see the end of the main thread before the process exits.
        assert sys.version_info >= (3, 13)
        assert re.fullmatch("'left' was never released by .*\n", output)
    assert not is_busy("thread")
    assert records() == {**ALL, "thread": "R"}


@pytest.fixture
def celery(program, tmp_path):
    """Return a function that starts a prefork Celery worker and sends it a task."""

    def start(*options):
        worker = program(
            "celery", "-A", "tests.celery_app", "worker", "--pool=prefork",
            "--concurrency=1", "--loglevel=INFO",
            "--without-gossip", "--without-mingle", "--without-heartbeat", *options,
            DLOCKS_TEST_BROKER=str(tmp_path),
        )  # fmt: skip
        application(tmp_path, set_as_current=False).send_task("tests.celery_app.work")
        return worker

    return start


@pytest.mark.once
def test_a_replaced_celery_worker_releases_and_records(celery, until):
    """With ``--max-tasks-per-child`` a worker is replaced after its tasks.

    It releases its holds and writes its history before it exits.
    """
    celery("--max-tasks-per-child=1")
    until(lambda: records() == ALL, seconds=60)
    with db_lock("left", timeout=0):
        pass


@pytest.mark.once
def test_a_warm_celery_shutdown_releases_and_records(celery, until):
    """After SIGTERM the workers release and record before they exit."""
    worker = celery()
    until(lambda: ResourceLock.objects.filter(pk="left").exists(), seconds=60)
    worker.send_signal(signal.SIGTERM)
    output, _ = worker.communicate(timeout=60)
    assert records() == ALL, output
    with db_lock("left", timeout=0):
        pass
