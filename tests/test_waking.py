"""Waking of the next waiter on MariaDB and MySQL: its cost and its failures."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest
from django.db import connection
from django.db.backends.signals import connection_created
from django.db.utils import OperationalError

from dlocks import db_lock, db_rwlock
from tests import jobs
from tests.internals import InnoDB, backends, waiters_of
from tests.settings import ENGINE
from tests.timing import in_time, seldom

pytestmark = [
    pytest.mark.engine("mariadb", "mysql"),
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    pytest.mark.timeout(120),
]


@pytest.fixture
def looks(monkeypatch):
    """Return the claims that this process has polled without a notification."""
    looked = []
    # An earlier test may have switched to polling.
    monkeypatch.setattr(waiters_of(backends["default"]), "_poll_until", 0.0)
    look = type(backends["default"]).poll

    def counting(self, claims, *, heartbeat=True):
        looked.append(claims)
        return look(self, claims, heartbeat=heartbeat)

    monkeypatch.setattr(type(backends["default"]), "poll", counting)
    return looked


def test_waiters_are_notified_and_do_not_poll(workers):
    """Eight processes take thirty turns each, while seven wait at any time.

    There are fewer polls than turns.
    """
    crowd, turns = workers(8), 30
    for worker in crowd:
        worker.start(jobs.take_turns, "stock:7", times=turns)
    looks = sum(worker.hear() for worker in crowd)
    seldom(looks, len(crowd) * turns)


def test_a_claim_that_joins_a_sleeping_process_is_notified(in_queue, threads, looks):
    """A thread that waits for another key already sleeps in the server.

    That sleep began without the new claim.
    """
    held = [db_lock(key).acquire() for key in ("stock:7", "stock:8")]
    first = threads(lambda: db_lock("stock:7").acquire().release())
    in_queue(1)
    second = threads(lambda: db_lock("stock:8").acquire().release())
    in_queue(1, "stock:8")
    for hold in held:
        hold.release()
    for thread in (first, second):
        thread.join(30)
    seldom(len(looks), 3)


@pytest.mark.parametrize("shared", [False, True])
def test_exclusive_and_shared_waiters_are_notified(shared, in_queue, threads):
    held = db_lock("stock:7").acquire()

    def wait():
        hold = (db_rwlock("stock:7").read() if shared else db_lock("stock:7")).acquire()
        granted = time.monotonic()
        hold.release()
        return granted

    waiting = [threads(wait) for _ in range(3)]
    in_queue(3)
    released = time.monotonic()
    held.release()
    for thread in waiting:
        thread.join(30)
        in_time(thread.results[0] - released, 1.5)


def states():
    """Return the states of sessions that sleep or wait for a named lock."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT state FROM information_schema.processlist WHERE state LIKE"
            " 'User %%'"
        )
        return sorted(state for (state,) in cursor.fetchall())


@pytest.mark.engine("mariadb")
def test_one_session_sleeps_and_others_wait_for_a_named_lock(workers, until):
    """Sleeping sessions share a mutex in the server.

    If two sleep, waking one of them may keep both for two seconds.
    """
    crowd = workers(4)
    keys = [f"stock:{number}" for number in range(len(crowd))]
    held = {key: db_lock(key).acquire() for key in keys}
    for worker, key in zip(crowd, keys, strict=True):
        worker.start(jobs.take_turns, key, times=1)
    until(lambda: states() == ["User lock", "User lock", "User lock", "User sleep"])
    # The sleeping process may be served first. Another one takes its place.
    for worker, key in zip(crowd, keys, strict=True):
        held[key].release()
        worker.hear()
    until(lambda: "User lock" not in states())


@pytest.mark.engine("mysql")
def test_every_waiting_process_sleeps_on_mysql(workers, until):
    """MySQL wakes sessions independently, so each process has its own sleep."""
    crowd = workers(4)
    keys = [f"stock:{number}" for number in range(len(crowd))]
    held = {key: db_lock(key).acquire() for key in keys}
    for worker, key in zip(crowd, keys, strict=True):
        worker.start(jobs.take_turns, key, times=1)
    until(lambda: states() == ["User sleep"] * 4)
    for worker, key in zip(crowd, keys, strict=True):
        held[key].release()
        worker.hear()
    assert "User lock" not in states()


def test_a_statement_time_limit_only_ends_the_sleep(in_queue, threads, looks, caplog):
    """A project may set such a limit for all its sessions."""

    def bound(connection, **rest):
        with connection.cursor() as cursor:
            limit = (
                "max_execution_time = 300"
                if ENGINE == "mysql"
                else "max_statement_time = 0.3"
            )
            cursor.execute(f"SET SESSION {limit}")

    def wait():
        with db_lock("stock:7") as hold:
            return hold.waited

    held = db_lock("stock:7").acquire()
    connection_created.connect(bound)
    try:
        thread = threads(wait)
        in_queue(1)
        time.sleep(1.5)
        held.release()
        thread.join(30)
    finally:
        connection_created.disconnect(bound)
    assert thread.results[0] > 1.5
    assert not caplog.records
    seldom(len(looks), 3)


def test_a_lost_wake_up_costs_a_poll(monkeypatch, workers, in_queue):
    _, other = workers(2)
    hold = db_lock("stock:7").acquire()
    other.start(jobs.wait_quietly, "stock:7", timeout=20)
    in_queue(1)
    monkeypatch.setattr(InnoDB, "wake", "DO 0")
    hold.release()
    released = time.monotonic()
    granted, token = other.hear()
    assert token > hold.token
    in_time(granted - released, 1.0)


def test_no_other_session_of_the_account_is_interrupted(workers):
    """Another statement runs while four processes wait for each other."""
    crowd = workers(4)
    for worker in crowd:
        worker.start(jobs.longest_wait, "stock:7", seconds=2)
    with connection.cursor() as cursor:
        for _ in range(2):
            cursor.execute("SELECT SLEEP(0.9)")
            assert cursor.fetchone() == (0,)
    for worker in crowd:
        worker.hear()


def test_a_refused_wake_up_is_logged_once_and_waiters_poll(doomed, in_queue, looks):
    """Two accounts use one table. Each may end only its own statements."""
    with connection.cursor() as cursor:
        cursor.execute("DROP USER IF EXISTS another@'127.0.0.1'")
        cursor.execute("CREATE USER another@'127.0.0.1'")
        cursor.execute(
            "GRANT ALL ON"
            f" {connection.ops.quote_name(connection.settings_dict['NAME'])}.* TO"
            " another@'127.0.0.1'"
        )
    other = doomed(far=True, DLOCKS_TEST_USER="another")
    try:
        warnings = other.call(jobs.noted_while_serving, "first")
        assert warnings == []
        hold = db_lock("stock:7").acquire()
        other.start(jobs.noted_while_serving, "stock:7")
        in_queue(1)
        served = []
        hold.release()
        for number in range(3):
            with db_lock("stock:7", timeout=20) as mine:
                served.append(mine.token)
                if number < 2:
                    in_queue(1)
        (warning,) = other.hear()
        assert "KILL QUERY" in warning
        assert served == sorted(served)
    finally:
        other.kill()
        with connection.cursor() as cursor:
            cursor.execute("DROP USER another@'127.0.0.1'")


def test_a_waiter_polls_if_a_proxy_refuses_kill_query(caplog, monkeypatch, channel):
    backend = backends["default"]
    # The refusal is logged only once.
    monkeypatch.setattr(backend, "_refused", False)

    def refuse(execute, sql, params, many, context):
        if sql.startswith("KILL"):
            raise OperationalError(1227, "Access denied")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse), caplog.at_level(logging.WARNING, "dlocks"):
        assert not backend.notifier(channel).hears_all
    assert "Access denied" in caplog.text
    connection.close()


def test_a_waiter_polls_if_a_proxy_changes_sessions(channel):
    """A proxy may not keep sessions.

    The named lock then belongs to another session.
    """
    backend = backends["default"]
    other_connection = connection.copy()

    def other_session(execute, sql, params, many, context):
        if "GET_LOCK" in sql:
            with other_connection.cursor() as cursor:
                return cursor.execute(sql, params)
        return execute(sql, params, many, context)

    try:
        with connection.execute_wrapper(other_session):
            assert not backend.notifier(channel).hears_all
    finally:
        other_connection.close()
    assert backend.notifier(channel).hears_all
    connection.close()
    assert type(backend)("default", listen=False).notifier(channel) is None


def test_a_process_may_end_while_it_sleeps_in_the_server(in_queue):
    """The process has a waiting thread and ends without a warning."""
    text = (
        "import os, threading, time\nos.environ['DJANGO_SETTINGS_MODULE'] ="
        " 'tests.settings'\nimport django; django.setup()\nfrom dlocks import"
        " db_lock\nfrom dlocks.conf import backends\nfrom django.db import"
        " connection\nthreading.Thread(target=db_lock('stock:7', timeout=60).acquire,"
        " daemon=True).start()\nwhile not backends['default'].waiting('stock:7'):"
        " time.sleep(0.01)\ntime.sleep(0.2)\nconnection.close()\n"
    )
    with db_lock("stock:7"):
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", "-c", text],
            capture_output=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert b"Error" not in ended.stderr, ended.stderr
    assert b"Warning" not in ended.stderr, ended.stderr
