from __future__ import annotations
import asyncio, gc, sys, threading, time, warnings
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from dlocks import LockBackendError, LockError, LockLost, LockTimeout, db_lock
from dlocks.conf import backends
from dlocks.keeper import keeper, Keeper
from dlocks.models import ResourceLock
from dlocks.transactions import OpenTransaction
from tests import jobs

pytestmark = pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"])

@pytest.fixture
def is_busy(elsewhere):
    def ask(key="stock:7", using="default"):
        found = elsewhere(db_lock(key, using=using).try_acquire)
        if found is not None:
            elsewhere(found.release)
        return found is None
    return ask

@pytest.mark.engine("postgresql", "mariadb")
def test_a1_inner_rollback_gives_lease_back_early(is_busy):
    with transaction.atomic():
        with db_lock("stock:7", scope="lease") as hold:
            pass
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            1 / 0
        time.sleep(0.3)
        busy = is_busy()
    assert busy, "somebody else got the key although the transaction was open"

def test_a1m_memory():
    t = []
    with transaction.atomic():
        with db_lock("stock:7", using="memory") as hold:
            pass
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            1 / 0
        time.sleep(0.3)
        held = hold.held
    assert held

def test_a2_autocommit_off_commit_never_gives_back(is_busy):
    connection.ensure_connection()
    transaction.set_autocommit(False)
    try:
        with db_lock("stock:7", using="memory") as hold:
            pass
        transaction.commit()
        time.sleep(0.5)
        held = hold.held
    finally:
        transaction.rollback(); transaction.set_autocommit(True)
    assert not held, "still held after the commit"

@pytest.mark.engine("postgresql", "mariadb")
def test_a3_autocommit_off_held_after_commit(elsewhere):
    connection.ensure_connection()
    transaction.set_autocommit(False)
    try:
        hold = db_lock("stock:7").acquire()
        transaction.commit()
        other = elsewhere(db_lock("stock:7").try_acquire)
        both = hold.held, other is not None
        if other: other.release()
    finally:
        transaction.rollback(); transaction.set_autocommit(True)
    assert both != (True, True)

def test_a4_decorated_atomic_is_one_object(elsewhere):
    kept = []
    @transaction.atomic
    def work():
        kept.append(db_lock("stock:7").acquire())
        return kept[0].held, kept[-1].token
    first = work()
    assert not kept[0].held
    old_held, second_token = work()
    assert second_token > first[1], "two transactions, one token"
    assert not old_held

def test_a4b_takeover_between(elsewhere):
    kept = []
    @transaction.atomic
    def work():
        kept.append(db_lock("stock:7").acquire())
    work()
    def other():
        with db_lock("stock:7"): pass
    elsewhere(other)
    work()   # LockLost on a plain acquire of a free key

@pytest.mark.engine("postgresql")
def test_a4c_recursive(elsewhere):
    got = []
    with db_lock("stock:7"): pass
    @transaction.atomic
    def work(depth):
        if depth == 0:
            got.append(db_lock("stock:7").acquire())
            raise ValueError
        try:
            work(depth - 1)
        except ValueError:
            pass
        other = elsewhere(db_lock("stock:7").try_acquire)
        both = got[0].held, other is not None
        if other: other.release()
        return both
    assert work(1) != (True, True)

def test_a5_inner_atomic_ends_good_hold_told_lost(is_busy):
    @transaction.atomic
    def helper():
        return db_lock("stock:7").acquire()
    with transaction.atomic():
        hold = helper()
        if connection.vendor != "sqlite": assert is_busy()
        hold.check()
        hold.release()

@pytest.mark.engine("postgresql", "mariadb")
def test_a6_self_wait():
    with transaction.atomic():
        with db_lock("stock:7"): pass
        started = time.monotonic()
        with pytest.raises(RuntimeError):
            db_lock("stock:7", scope="lease", timeout=1).acquire()

@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.parametrize("using", ["default", "memory"])
def test_a7_race_settle_enter(using):
    bad = []
    lock = db_lock("stock:7", scope="lease", using=using)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        end = time.monotonic() + 25
        n = 0
        while time.monotonic() < end and not bad:
            n += 1
            with transaction.atomic():
                with lock: pass
                transaction.set_rollback(True)
            time.sleep((n % 60) / 1000)
            with lock as hold:
                time.sleep(0.002)
                if not hold.held:
                    bad.append(n)
    assert not bad, bad

@pytest.mark.engine("postgresql", "mariadb")
def test_a8_reentrant_false_sequential():
    lock = db_lock("stock:7", scope="lease", reentrant=False)
    with transaction.atomic():
        with lock: pass
        with lock: pass

def test_a8m():
    lock = db_lock("stock:7", using="memory", reentrant=False)
    with transaction.atomic():
        with lock: pass
        with lock: pass
