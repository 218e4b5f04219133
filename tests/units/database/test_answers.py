"""Requests that the database does not answer as usual."""

from __future__ import annotations

import threading

import pytest
from django.db import connection, transaction

from dlocks import db_lock
from tests import rows
from tests.internals import LockClaim, ResourceLock, backends
from tests.models import Counter

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_lease_that_cannot_be_written_is_not_prolonged(monkeypatch):
    """Other processes see the row unchanged, and count from then."""
    backend = backends["watching"]
    for shared in False, True:
        lock = db_lock("stock:7", using="watching", shared=shared)
        with lock as hold, monkeypatch.context() as patch:
            patch.setattr(backend, "_count", lambda *args, locked=None: locked())
            left = backend.renew([hold.claim])
            patch.undo()
            assert left == {hold.claim.owner: 0.0}


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_a_statement_that_is_only_slow_is_not_cancelled(monkeypatch):
    """A commit may wait for a standby.

    Only a statement that waits for a locked table is cancelled.
    """
    monkeypatch.setattr("dlocks.backends.database.watchdog.LOCK_WAIT_LIMIT", 0.05)
    sleep = "pg_sleep(0.6)" if connection.vendor == "postgresql" else "SLEEP(0.6)"
    found = backends["default"]._rows(f"SELECT {sleep}, 'dlocks_resourcelock'", {})
    assert len(found) == 1


@pytest.mark.engine("postgresql", "sqlite")
def test_a_lease_that_the_commit_renews_is_not_stale(threads, until, monkeypatch):
    """With ``takeover=False``, a transaction that ends just now is no stale holder."""
    inside, end = threading.Event(), threading.Event()
    kind = type(backends["brisk"])
    find = kind.in_transactions

    def hold():
        with db_lock("stock:7", using="brisk", ttl=0.3) as held, held.atomic():
            inside.set()
            assert end.wait(60)

    def find_after_the_end(backend, rows, *others):
        end.set()
        thread.join(60)
        return find(backend, rows, *others)

    thread = threads(hold)
    assert inside.wait(30)
    until(lambda: ResourceLock.objects.by_clock().get().seconds_left < 0)
    monkeypatch.setattr(kind, "in_transactions", find_after_the_end)
    lock = db_lock("stock:7", using="brisk", takeover=False, timeout=30)
    with lock as next_hold:
        assert not next_hold.takeover


@pytest.mark.engine("mariadb")
def test_a_step_that_the_server_rolls_back_runs_again(threads, until):
    """A deadlock of row locks costs a retry, and is no error.

    The step has locked the key and waits for a claim. A transaction does the opposite.
    """
    rows.held("stock:7")
    dead = rows.claim("stock:7", rows.PAST)
    with transaction.atomic(), connection.cursor() as cursor:
        # The server rolls back the transaction that has changed fewer rows.
        Counter.objects.bulk_create(Counter(name=f"{one}") for one in range(100))
        LockClaim.objects.select_for_update().get(pk=dead.pk)
        removal = threads(lambda: backends["default"].take_out("stock:7", dead.pk))

        def waits():
            cursor.execute(
                "SELECT COUNT(*) FROM information_schema.processlist WHERE id <>"
                " CONNECTION_ID() AND info LIKE '%FOR UPDATE WAIT%'"
            )
            return cursor.fetchone()[0]

        until(waits)
        ResourceLock.objects.select_for_update().get(pk="stock:7")
    removal.join(30)
    assert removal.results == [True]
    assert not LockClaim.objects.exists()
