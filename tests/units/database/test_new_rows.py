"""The row of a key that had none."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from dlocks import LockTimeout, db_lock, db_rwlock
from dlocks.backends.base import TableLockedError
from dlocks.models import ResourceLock
from tests import jobs
from tests.for_each import for_each
from tests.internals import Claim, RowLockedError, backends
from tests.timing import in_time

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("using", ["default", "optimistic", "insert", "shared"])
@for_each("inside", [False, True])
def test_a_row_that_appears_meanwhile_is_not_waited_for(
    using, inside, monkeypatch, threads
):
    """A transaction has locked the row of a new key when a caller creates it.

    The caller has seen that there was no row.
    """
    lock = db_lock("stock:7", using=using, timeout=0)
    if using == "shared":
        using, lock = "default", db_rwlock("stock:7", timeout=0).read()
    store, over = backends[using].store, threading.Event()
    name = "insert" if using == "insert" and not inside else "create"
    write, others, create = getattr(store, name), [], store.create

    def hold():
        create(["stock:7"])
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get()
            held.set()
            over.wait(30)

    def write_later(*args, **options):
        if next(first, False):
            others.append(threads(hold))
            assert held.wait(30)
        return write(*args, **options)

    held, first = threading.Event(), iter([True])
    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(store, name, write_later)
        block = transaction.atomic() if inside else contextlib.nullcontext()
        try:
            with block, pytest.raises(LockTimeout):
                lock.acquire()
        finally:
            took = time.monotonic() - began
            over.set()
    (other,) = others
    other.join(30)
    in_time(took, 5.0)


@pytest.mark.front
@for_each("using", ["default", "optimistic"])
def test_creating_the_row_of_a_new_key_is_retried(using, monkeypatch):
    """On InnoDB, a statement about another new key may lock the gap for a moment."""
    store, tried = backends[using].store, []
    insert = store.insert

    def refused_once(claim, **options):
        tried.append(claim.key)
        if len(tried) == 1:
            raise RowLockedError
        insert(claim, **options)

    monkeypatch.setattr(store, "insert", refused_once)
    with db_lock("new", using=using, timeout=0):
        pass
    assert tried == ["new", "new"]


@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_an_inserted_row_is_granted_although_another_caller_has_locked_it(
    monkeypatch, workers
):
    """It was locked before the claim could draw its token."""
    (other,), backend = workers(1), backends["insert"]
    claim, insert = Claim(key="stock:7", ttl=30.0), backend.store.insert
    unlock = threading.Timer(0.5, other.tell)

    def insert_and_stall(*arguments, **options):
        insert(*arguments, **options)
        other.start(jobs.lock_row, "stock:7")
        assert other.hear() == "locked"
        unlock.start()

    monkeypatch.setattr(backend.store, "insert", insert_and_stall)
    grant = backend.acquire(claim)
    unlock.join()
    assert other.hear() == "unlocked"
    assert grant
    assert grant.token == ResourceLock.objects.get().version
    assert backend.release(claim)


@pytest.mark.engine("sqlite")
def test_a_key_is_busy_while_the_database_cannot_even_be_read(monkeypatch):
    """Without a write-ahead log, the commit of another writer excludes readers."""

    def busy(*_):
        raise RowLockedError

    def unreadable(*_):
        raise TableLockedError

    backend = backends["default"]
    monkeypatch.setattr(backend, "take", busy)
    monkeypatch.setattr(backend.session, "rows", unreadable)
    assert backend.acquire(Claim(key="stock:7", ttl=30.0)) is None


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@for_each("using", ["default", "optimistic"])
def test_a_lost_race_for_a_new_key_locks_no_row(using, monkeypatch, in_other_thread):
    """Many callers lose it at the start of a crowd, and would wait for each other."""
    lock, store = db_lock("stock:7", using=using), backends[using].store
    create, winners, first = store.create, [], iter([True])

    def create_later(*args, **options):
        if next(first, False):
            winners.append(in_other_thread(lock.acquire))
        return create(*args, **options)

    with monkeypatch.context() as patch, CaptureQueriesContext(connection) as queries:
        patch.setattr(store, "create", create_later)
        assert lock.try_acquire() is None
    sent = [one["sql"] for one in queries]
    assert [sql for sql in sent if re.match("SELECT .* FOR UPDATE", sql)] == []
    in_other_thread(winners[0].release)
