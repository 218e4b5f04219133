"""What the sessions of waiters show to other processes."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import pytest
from django.db import connection, transaction

from dlocks import LockDeadlock, LockTimeout, db_lock
from tests import jobs
from tests.internals import backends, callers, disconnect
from tests.promises.runtime.test_deadlocks import SERVERS, wait_for_looks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql"),
]


@pytest.fixture(autouse=True)
def end_sessions(transactional_db):
    yield
    disconnect(backends["session"])


@pytest.mark.engine("postgresql")
def test_the_newest_keys_of_a_transaction_are_shown_to_others():
    """Other processes see a part of many keys, and need the newest ones."""
    names = [f"a long key {number}" for number in range(60)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(transaction.atomic())
        for name in names:
            stack.enter_context(db_lock(name, using="session"))
        holding = callers.holding_of(threading.current_thread(), backends["session"])
    assert [held.key for held in holding] == names


@SERVERS
def test_a_waiter_that_holds_a_key_waits_in_the_engine(threads, until):
    """Other processes can see what it holds.

    It may be served before waiters of its own process that hold nothing.
    """
    backend, order = backends["session"], []

    def take(name):
        with db_lock("a", using="session", timeout=30):
            order.append(name)
            time.sleep(0.05)

    def nest():
        with db_lock("b", using="session"):
            take("nested")

    with db_lock("a", using="session"):
        waiters = []
        for number, wait in enumerate(
            [lambda: take("first"), lambda: take("second"), nest, lambda: take("last")]
        ):
            waiters.append(threads(wait))
            until(lambda number=number: backend.waiting("a") > number)
        # The first one and the nested one.
        name, shown = backend.sessions.name("a"), backend.sessions.of_name
        until(lambda: sum(not one.granted for one in shown(name)) == 2)
    for waiter in waiters:
        waiter.join(30)
    assert order == ["first", "nested", "second", "last"]


@SERVERS
def test_waits_without_a_held_key_send_no_more_to_the_server(
    monkeypatch, threads, until
):
    backend, sent = backends["session"], []
    row = backend.sessions.kind.first_row
    monkeypatch.setattr(
        backend.sessions.kind,
        "first_row",
        lambda *args: sent.append(args[1]) or row(*args),
    )
    with db_lock("a", using="session"):
        waiter = threads(lambda: db_lock("a", using="session").acquire().release())
        until(lambda: backend.waiting("a") == 1)
        wait_for_looks()
    waiter.join(30)
    assert any("31536000" in sql or "pg_advisory_lock(" in sql for sql in sent)
    assert not [sql for sql in sent if "/*dlocks" in sql]


@SERVERS
def test_a_comment_of_another_version_is_skipped(monkeypatch):
    """Old and new processes run side by side during a deployment."""
    backend = backends["session"]
    texts = json.dumps(
        ["/*dlocks [1]*/ SELECT 1", "/*dlocks {*/ SELECT 1", "/*dlocks 2*/"]
    )
    monkeypatch.setattr(backend.sessions, "ask", lambda statement, value: (texts,))
    assert list(backend.inspector.waiting_claims()) == []


@SERVERS
def test_deadlocks_are_not_found_if_the_server_shows_no_statements(
    threads, monkeypatch
):
    """The callers wait for their timeouts."""
    kind, both = backends["session"].sessions.kind, threading.Barrier(2)
    refused = {**kind.statements, "comments": "SELECT no_such_column"}
    monkeypatch.setattr(kind, "statements", refused)
    monkeypatch.setattr(kind, "begin", lambda self, begin=kind.begin: begin(self))

    def nest(first, second, timeout):
        with db_lock(first, using="session"):
            both.wait(30)
            try:
                with db_lock(second, timeout=timeout, using="session"):
                    return "both"
            except LockDeadlock:
                return "deadlock"
            except LockTimeout:
                return "late"

    nesting = [threads(lambda: nest("a", "b", 30)), threads(lambda: nest("b", "a", 2))]
    for thread in nesting:
        thread.join(60)
    assert [thread.results for thread in nesting] == [["both"], ["late"]]


@SERVERS
def test_a_hold_of_another_alias_is_part_of_a_deadlock(settings, threads):
    """Both aliases use the locks of the same database."""
    settings.DLOCKS = {**settings.DLOCKS, "again": {**settings.DLOCKS["session"]}}
    both = threading.Barrier(2)

    def nest(first, second):
        with db_lock(first, using="session"):
            both.wait(30)
            try:
                with db_lock(second, timeout=8, using="again"):
                    return "both"
            except LockTimeout as error:
                return type(error).__name__

    nesting = [threads(lambda: nest("a", "b")), threads(lambda: nest("b", "a"))]
    for thread in nesting:
        thread.join(60)
    assert sorted(thread.results[0] for thread in nesting) == ["LockDeadlock", "both"]
    disconnect(backends["again"])


@SERVERS
def test_a_hold_of_a_lost_session_is_no_part_of_a_deadlock(workers, doomed, until):
    """Its caller still waits, but another one that does not wait has the key."""
    backend, waiter, (other,) = backends["session"], doomed(), workers(1)
    other.start(jobs.nest, "b", "a", using="session")
    other.hear()
    waiter.start(jobs.wait_and_release, "a", "b", using="session")
    waiter.hear()
    until(lambda: backend.waiting("b") == 1)
    shown = backend.sessions.of_name(backend.sessions.name("a"))
    (held,) = (one for one in shown if one.granted)
    with connection.cursor() as cursor:
        end = (
            "SELECT pg_terminate_backend(%s)"
            if backend.sessions.kind.shares
            else "KILL %s"
        )
        cursor.execute(end, [held.number])
    with db_lock("a", using="session", timeout=5):
        other.tell()
        until(lambda: backend.waiting("a") == 1)
        wait_for_looks()
        assert backend.waiting("a") == 1
    assert other.hear() == "both"
