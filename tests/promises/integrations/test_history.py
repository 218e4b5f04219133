"""The history: one record per ended hold, at no cost for the caller."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import LockLost, db_lock, db_rwlock
from dlocks.models import ResourceLock
from dlocks.testing import lose
from tests import jobs, rows
from tests.promises.commands.running import refused, run
from tests.scripts import run_python
from tests.written import nothing_is_left, records

__all__ = ["nothing_is_left"]

pytestmark = [
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]


def flush_history(pipe):
    """Write the history that this process has buffered."""
    records()


RECORDED = ("--using", "recorded")


# Records.


@pytest.mark.storage
def test_an_ended_hold_has_a_record(monkeypatch):
    """The times are those of the database's clock, and the holder is that of the row.

    A hold is released, failed with an error, lost, or handed over.
    """
    with monkeypatch.context() as patch:
        patch.setattr(threading.current_thread(), "name", "x" * 300)
        with db_lock("stock:7", using="recorded") as hold:
            pass
    (one,) = records()
    assert (one.key_resource, one.token) == ("stock:7", hold.token)
    assert one.holder == ResourceLock.objects.get().holder
    assert len(one.holder) == 255
    found = one.owner_ip, one.scope, one.shared, one.waited
    assert found == (hold.claim.owner_ip, "L", False, 0)
    now = time.time()
    begin, end = one.begin_time.timestamp(), one.end_time.timestamp()
    assert now - 10 < begin <= end < now + 0.1
    with pytest.raises(ZeroDivisionError), db_lock("failed", using="recorded"):
        1 / 0  # noqa: B018
    with pytest.raises(LockLost), db_lock("lost", using="recorded"):
        lose("lost", using="recorded")
    db_lock("given", using="recorded").acquire().detach()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        with db_lock("inside", using="recorded"):
            1 / 0  # noqa: B018
    endings = {}
    for one in records():
        endings[one.key_resource] = one.get_ending_display(), one.scope
    assert endings == {
        "stock:7": ("released", "L"), "failed": ("failed", "L"), "lost": ("lost", "L"),
        "given": ("handed over", "L"), "inside": ("failed", "T"),
    }  # fmt: skip
    run("clear_lock", "given", *RECORDED, "--yes", "--reason", "tests")


@pytest.mark.storage
def test_shared_holds_several_keys_and_waits_are_recorded(worker, until):
    """Each shared hold and each of several keys has its own record."""
    with (
        db_rwlock("shared", using="recorded").read(),
        db_lock("a", "b", using="recorded"),
    ):
        pass
    with db_lock("busy", using="recorded") as mine:
        worker.start(jobs.wait_quietly, "busy", using="recorded")
        until(mine.queue_length)
    worker.hear()
    worker.call(flush_history)
    found = {(one.key_resource, one.shared): one.token for one in records(waited=0)}
    assert set(found) == {("shared", True), ("a", False), ("b", False), ("busy", False)}
    (waited,) = records(waited__gt=0)
    assert waited.key_resource == "busy"
    assert waited.token > found["busy", False]


# Cost.


def test_the_history_costs_the_caller_no_statement():
    """Without the option nothing is recorded, and re-entering adds no record."""
    with db_lock("stock:8"), db_lock("stock:9", using="memory"):
        pass
    lock = db_lock("stock:7", using="recorded")
    with lock, lock:
        pass
    assert [record.key_resource for record in records()] == ["stock:7"]
    with CaptureQueriesContext(connection) as queries:
        with lock:
            pass
    assert len(queries) == 2, queries.captured_queries
    with CaptureQueriesContext(connection) as queries:
        with transaction.atomic(), lock:
            pass
    assert not [query for query in queries if "holdrecord" in query["sql"]]
    assert len(records()) == 3


# Failures.


SCRIPT = """
import django, os, sys
django.setup()
for case in ("exit", "kill"):
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
from dlocks import db_lock, history
with db_lock(f"ended {case}", using="recorded"):
    pass
left = db_lock(f"left {case}", using="recorded").acquire()
if case == "kill":
    history.flush()
    os.kill(os.getpid(), 9)
if os.fork() == 0:
    history.flush()
    os._exit(0)
os.wait()
"""


def test_a_process_writes_its_remaining_records_at_exit():
    """At a normal exit no record is lost, not even that of the last hold.

    A fork does not write the records of its parent. A killed process loses only its
    last batch.
    """
    done = run_python(
        "-c", SCRIPT, DJANGO_SETTINGS_MODULE="tests.settings",
        warnings="ignore:This process:DeprecationWarning",
    )  # fmt: skip
    assert done.stdout.split() == ["0", "-9"]
    # The only warning is that of the hold that was left.
    (warning,) = done.stderr.splitlines()
    assert warning.startswith("'left exit' was never released by")
    endings = [(record.key_resource, record.ending) for record in records()]
    assert endings == [("ended exit", "R"), ("left exit", "F"), ("ended kill", "R")]


# Retention.


@pytest.mark.storage
def test_old_records_are_deleted():
    """``reap_locks`` deletes records after 30 days, or after a given time."""
    for key, days in (("old", 31), ("recent", 29), ("now", 0)):
        rows.ended(key, ago=days * 86400)
    reap = ("reap_locks", *RECORDED)
    done = "0 stale locks cleared, 1 record of the history deleted.\n"
    dry = done.replace("cleared", "would be cleared")
    assert run(*reap, "--dry-run") == dry.replace("deleted", "would be deleted")
    assert run(*reap) == done
    assert [record.key_resource for record in records()] == ["recent", "now"]
    assert run(*reap, "--history-for", "12h") == done
    assert [record.key_resource for record in records()] == ["now"]
    message = refused(*reap, "--history-for", "long")
    assert "--history-for takes a duration such as" in message
