"""How the commands read many rows, report an outage, and compare when they write."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.utils import timezone

from dlocks import LockBackendError, db_lock
from tests import jobs, rows
from tests.internals import (
    Claim,
    PessimisticBackend,
    Ticket,
    backends,
    duration,
    operations,
)
from tests.promises.commands.running import (
    lines,
    listed,
    refused,
    without_terminal,
)

__all__ = ["without_terminal"]

pytestmark = [pytest.mark.front, pytest.mark.django_db]


# In a transaction, each command begins with a savepoint.
@pytest.mark.django_db(transaction=True)
@pytest.mark.driver
def test_many_locks_and_long_queues_are_read_in_pages(
    monkeypatch, django_assert_max_num_queries
):
    """Ten thousand rows are read in pages, with any keys.

    The command never has a hundred thousand rows in memory at once. A page of locks is
    followed by the claims for them.
    """
    monkeypatch.setattr(operations, "PAGE", 4)
    sizes, pages = [], operations.pages

    def spied(*args, **options):
        for page in pages(*args, **options):
            sizes.append(len(page))
            yield page

    monkeypatch.setattr("dlocks.management.commands.list_locks.pages", spied)
    keys = ["B", "a", "a b", "b", "b:1", "ä", "🔒"]
    for number, key in enumerate(keys):
        rows.held(key)
        for _ in range(number * 2):
            rows.waits(key)
    with django_assert_max_num_queries(2 + 2 * 14):
        found = listed("--waiting")
    for number, key in enumerate(keys):
        positions = [claim["position"] for claim in found[key]["queue"]]
        assert positions == list(range(1, 2 * number + 1))
    sizes.clear()
    # On MariaDB and MySQL, one looks for keys that a transaction may keep.
    with django_assert_max_num_queries(5 + (connection.vendor == "mysql")):
        lines("list_locks")
    assert sizes == [4, 3]


def test_a_list_without_rows_is_limited(monkeypatch):
    """The list of another backend has at most a thousand keys."""
    monkeypatch.setattr("dlocks.backends.listing.LISTED", 2)
    backends.reset()
    claims = [Claim(key=key, ttl=30.0) for key in "cab"]
    for claim in claims:
        backends["memory"].acquire(claim)
    assert lines("list_locks", "--using", "memory") == ["a", "b"]
    for claim in claims:
        backends["memory"].release(claim)


def test_a_database_failure_is_reported_in_one_line(monkeypatch):
    rows.stale("a")

    def fail(*args, **kwargs):
        raise LockBackendError("the database is away")

    monkeypatch.setattr("dlocks.management.commands.list_locks.pages", fail)
    monkeypatch.setattr(backends["default"], "clear", fail)
    monkeypatch.setattr(backends["default"].maintenance, "reap", fail)
    for command in ("list_locks",), ("clear_lock", "a", "--yes"), ("reap_locks",):
        assert refused(*command) == "the database is away"


def test_a_duration_is_shown_in_its_largest_unit():
    """It is the largest unit of which there are at least two."""
    shown = {
        0.04: "0.0 s", 0.4: "0.4 s", -3: "-3.0 s", 42: "42 s", 119: "119 s",
        180: "3 minutes", 7199: "120 minutes", -5 * 3600: "-5 hours",
        90000: "25 hours", 86400 * 3: "3 days",
    }  # fmt: skip
    assert {seconds: duration(seconds) for seconds in shown} == shown


@pytest.mark.driver
@pytest.mark.django_db(transaction=True)
def test_a_refused_turn_does_not_end_the_wait(monkeypatch, workers, until):
    """A notified caller is refused, because the reaper has the row just then.

    It still waits for its turn in the queue.
    """
    (holder,) = workers(1)
    backend = backends["default"]
    queue = backend.enqueue
    again = Ticket(must_retry=True)
    monkeypatch.setattr(backend, "enqueue", lambda *args: queue(*args) and again)

    def take():
        try:
            with db_lock("stock:7", timeout=50) as hold:
                return hold
        finally:
            connections.close_all()

    holder.start(jobs.hold, "stock:7")
    token = holder.hear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take)
        until(lambda: backend.waiting("stock:7") == 1)
        holder.tell()
        hold = waiting.result(60)
    assert hold.token > token
    assert hold.waited < 20
    assert holder.hear() == "released"


def test_a_write_keeps_what_has_expired_again_since_it_was_read():
    """A hold that is renewed after the command has read it may expire meanwhile."""
    just = timezone.now() - timedelta(seconds=0.1)
    rows.write("late", rows.P, just)
    rows.free("shared", version=1)
    rows.claim("shared", just, version=100)
    backend = PessimisticBackend("default", grace=60)
    for end, number in (
        (backend.clear, 1000),
        (backend.maintenance.end_share, 100),
    ):
        key = "late" if number == 1000 else "shared"
        assert not end(key, number, stale_only=True)
        assert end(key, number)
        assert not end(key, number), "it is free"
