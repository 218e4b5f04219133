"""On MariaDB and MySQL the one whose turn it is, is woken: what that costs, and what remains when it fails."""

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
from dlocks.backends.database.dialects import MySQL
from dlocks.conf import backends
from dlocks.waiting import room_of
from tests import jobs
from tests.timing import in_time, seldom

pytestmark = [
    pytest.mark.engine("mariadb"),
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    pytest.mark.timeout(120),
]


@pytest.fixture
def looks(monkeypatch):
    """The claims that this process has looked for, instead of being told."""
    looked = []
    # Another test may have had reason to look.
    monkeypatch.setattr(room_of(backends["default"]), "_looks_until", 0.0)
    look = type(backends["default"]).look

    def counting(self, claims, *, heard=True):
        looked.append(claims)
        return look(self, claims, heard=heard)

    monkeypatch.setattr(type(backends["default"]), "look", counting)
    return looked


def test_those_who_wait_are_told_of_their_turn_and_do_not_look_for_it(workers):
    """Eight processes, thirty turns each: fewer looks than turns, though seven wait at any time."""
    crowd, turns = workers(8), 30
    for worker in crowd:
        worker.start(jobs.take_turns, "stock:7", times=turns)
    looks = sum(worker.hear() for worker in crowd)
    seldom(looks, len(crowd) * turns)


def test_a_claim_that_comes_while_its_process_sleeps_for_others_is_told_too(in_line, threads, looks):
    """By a thread that waits for another key, when the sleep in the server has begun without it."""
    held = [db_lock(key).acquire() for key in ("stock:7", "stock:8")]
    first = threads(lambda: db_lock("stock:7").acquire().release())
    in_line(1)
    second = threads(lambda: db_lock("stock:8").acquire().release())
    in_line(1, "stock:8")
    for hold in held:
        hold.release()
    for thread in (first, second):
        thread.join(30)
    seldom(len(looks), 3)


@pytest.mark.parametrize("shared", [False, True])
def test_both_who_are_alone_and_who_share_are_told(shared, in_line, threads):
    held = db_lock("stock:7").acquire()

    def wait():
        hold = (db_rwlock("stock:7").read() if shared else db_lock("stock:7")).acquire()
        granted = time.monotonic()
        hold.release()
        return granted

    waiting = [threads(wait) for _ in range(3)]
    in_line(3)
    released = time.monotonic()
    held.release()
    for thread in waiting:
        thread.join(30)
        in_time(thread.results[0] - released, 1.5)


def test_of_all_who_wait_on_a_server_one_sleeps_and_the_others_wait_for_a_named_lock(workers, until):
    """Where two sleep, whoever wakes one of them may keep both for two seconds: they share a mutex in the server."""
    crowd = workers(4)
    keys = [f"stock:{number}" for number in range(len(crowd))]

    def states():
        with connection.cursor() as cursor:
            cursor.execute("SELECT state FROM information_schema.processlist WHERE state LIKE 'User %%'")
            return sorted(state for (state,) in cursor.fetchall())

    held = {key: db_lock(key).acquire() for key in keys}
    for worker, key in zip(crowd, keys, strict=True):
        worker.start(jobs.take_turns, key, times=1)
    until(lambda: states() == ["User lock", "User lock", "User lock", "User sleep"])
    # Whoever sleeps may be the first to go: another one takes its place.
    for worker, key in zip(crowd, keys, strict=True):
        held[key].release()
        worker.hear()
    until(lambda: "User lock" not in states())


def test_a_bound_on_the_time_of_statements_ends_the_sleep_and_nothing_else(in_line, threads, looks, caplog):
    """As a project may have set it for all of its sessions."""

    def bound(connection, **rest):
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION max_statement_time = 0.3")

    def wait():
        with db_lock("stock:7") as hold:
            return hold.waited

    held = db_lock("stock:7").acquire()
    connection_created.connect(bound)
    try:
        thread = threads(wait)
        in_line(1)
        time.sleep(1.5)
        held.release()
        thread.join(30)
    finally:
        connection_created.disconnect(bound)
    assert thread.results[0] > 1.5
    assert not caplog.records
    seldom(len(looks), 3)


def test_a_wake_up_that_is_lost_costs_a_poll(monkeypatch, workers, in_line):
    _, other = workers(2)
    hold = db_lock("stock:7").acquire()
    other.start(jobs.wait_quietly, "stock:7", timeout=20)
    in_line(1)
    monkeypatch.setattr(MySQL, "wake", "DO 0")
    hold.release()
    released = time.monotonic()
    granted, token = other.hear()
    assert token > hold.token
    in_time(granted - released, 1.0)


def test_no_other_session_of_the_same_account_is_ever_interrupted(workers):
    """Somebody's statement that lasts as long as four processes wait for each other."""
    crowd = workers(4)
    for worker in crowd:
        worker.start(jobs.longest_wait, "stock:7", seconds=2)
    with connection.cursor() as cursor:
        for _ in range(2):
            cursor.execute("SELECT SLEEP(0.9)")
            assert cursor.fetchone() == (0,)
    for worker in crowd:
        worker.hear()


def test_who_may_not_wake_a_session_of_another_account_says_so_once_and_the_others_look(doomed, in_line, looks):
    """Two accounts at one table: each may end only its own statements."""
    with connection.cursor() as cursor:
        cursor.execute("CREATE OR REPLACE USER another@'127.0.0.1'")
        cursor.execute(
            f"GRANT ALL ON {connection.ops.quote_name(connection.settings_dict['NAME'])}.* TO another@'127.0.0.1'"
        )
    other = doomed(far=True, DLOCKS_TEST_USER="another")
    try:
        warnings = other.call(jobs.noted_while_serving, "first")
        assert warnings == []
        hold = db_lock("stock:7").acquire()
        other.start(jobs.noted_while_serving, "stock:7")
        in_line(1)
        served = []
        hold.release()
        for number in range(3):
            with db_lock("stock:7", timeout=20) as mine:
                served.append(mine.token)
                if number < 2:
                    in_line(1)
        (warning,) = other.hear()
        assert "KILL QUERY" in warning
        assert served == sorted(served)
    finally:
        other.kill()
        with connection.cursor() as cursor:
            cursor.execute("DROP USER another@'127.0.0.1'")


def test_where_a_proxy_refuses_to_kill_one_looks_and_is_told_of_it(caplog, monkeypatch, channel):
    backend = backends["default"]
    # It is told once.
    monkeypatch.setattr(backend, "_refused", False)

    def refuse(execute, sql, params, many, context):
        if sql.startswith("KILL"):
            raise OperationalError(1227, "Access denied")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse), caplog.at_level(logging.WARNING, "dlocks"):
        assert not backend.listen(channel).hears_all
    assert "Access denied" in caplog.text
    connection.close()


def test_where_the_next_statement_may_run_in_another_session_one_looks(channel):
    """As behind a proxy that does not keep sessions: the named lock is not the session's own."""
    backend = backends["default"]
    elsewhere = connection.copy()

    def other_session(execute, sql, params, many, context):
        if "GET_LOCK" in sql:
            with elsewhere.cursor() as cursor:
                return cursor.execute(sql, params)
        return execute(sql, params, many, context)

    try:
        with connection.execute_wrapper(other_session):
            assert not backend.listen(channel).hears_all
    finally:
        elsewhere.close()
    assert backend.listen(channel).hears_all
    connection.close()
    assert type(backend)("default", listen=False).listen(channel) is None


def test_a_process_may_end_while_it_sleeps_in_the_server(in_line):
    """With a thread that waits, and without a warning."""
    text = (
        "import os, threading, time\n"
        "os.environ['DJANGO_SETTINGS_MODULE'] = 'tests.settings'\n"
        "import django; django.setup()\n"
        "from dlocks import db_lock\n"
        "from dlocks.conf import backends\n"
        "from django.db import connection\n"
        "threading.Thread(target=db_lock('stock:7', timeout=60).acquire, daemon=True).start()\n"
        "while not backends['default'].waiting('stock:7'): time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "connection.close()\n"
    )
    with db_lock("stock:7"):
        ended = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error", "-c", text], capture_output=True, timeout=60
        )
    assert (ended.returncode, ended.stdout) == (0, b"")
    assert b"Error" not in ended.stderr, ended.stderr
    assert b"Warning" not in ended.stderr, ended.stderr
