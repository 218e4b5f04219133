"""The rows that a guarded transaction locks."""

import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from dlocks import LockBackendError, db_lock, db_rwlock
from dlocks.models import LockClaim, ResourceLock
from tests import jobs, rows
from tests.for_each import for_each
from tests.internals import Claim, backends, holders
from tests.timing import in_time

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]
SERVERS = pytest.mark.engine("postgresql", "mariadb")
EVERY_SERVER = pytest.mark.engine("postgresql", "mariadb", "mysql")


@EVERY_SERVER
@for_each("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_guarded_shared_hold_blocks_no_work_on_other_claims(level, workers):
    """A transaction of another process guards a shared hold of "stock".

    A stale key is taken over, waiting readers of a key are admitted, the claims of a
    key are cleaned up, and an administrator ends other claims on "stock" itself.
    """
    (holder,) = workers(1)
    backend = backends["default"]

    @contextmanager
    def guarded():
        holder.start(jobs.share_under_guard, "stock", level=level)
        yield holder.hear()
        holder.tell()
        assert holder.hear() == "ended"
        LockClaim.objects.all().delete()
        ResourceLock.objects.using("default").delete()

    with jobs.isolated(level):
        if connection.vendor == "mysql":
            with connection.cursor() as cursor:
                # No statement may wait at all. The default of 50 seconds is longer than
                # a test may take.
                cursor.execute("SET innodb_lock_wait_timeout = 5")

        rows.free("price")
        for number in range(3):
            rows.stale_share("price", 1001 + number)
        with guarded():
            began = time.monotonic()
            db_lock("price", timeout=4).acquire().release()
            in_time(time.monotonic() - began, 4.0)

        rows.free("price")
        waiting = [rows.waits("price", shared=True).pk for _ in range(3)]
        with guarded():
            # The owners are random. This one sorts directly before the owner of the
            # guarded hold.
            owner = rows.OWNER[:16] + "f" * 16
            waiting.append(rows.waits("price", shared=True, owner=owner).pk)
            backend.maintenance.tidy("price")
            admitted = LockClaim.objects.filter(pk__in=waiting, version__gt=1000)
            tokens = list(admitted.order_by("pk").values_list("version", flat=True))
            assert len(tokens) == 4
            assert tokens == sorted(set(tokens)), "in the order of the queue"
            now = rows.now("price")
            assert (now.shares, now.waiters, now.version) == (4, 0, tokens[-1])

        rows.held("price")
        for _ in range(3):
            rows.waits("price")
            rows.dead("price")
        ResourceLock.objects.filter(pk="price").update(waiters=0)
        with guarded():
            assert backend.maintenance.tidy("price") == 0
            assert LockClaim.objects.filter(key_resource="price").count() == 3
            assert rows.now("price").waiters == 3

        rows.free("stock")
        tokens = [rows.shares("stock", 1001 + number).version for number in range(3)]
        # These have no recent heartbeat, but are too recent to be deleted
        # automatically.
        recent = timezone.now() - timedelta(seconds=1)
        places = [rows.claim("stock", recent).pk for _ in range(3)]
        with guarded() as token:
            assert [backend.maintenance.end_share("stock", one) for one in tokens] == [
                True
            ] * 3
            assert [
                backend.maintenance.take_out("stock", place) for place in places
            ] == [True] * 3
            assert not backend.maintenance.end_share("stock", token)


@EVERY_SERVER
@for_each("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_a_try_does_not_wait_for_a_guarded_share(level, workers):
    """Its statements read that share. The level of its session stays as it is."""
    (holder,) = workers(1)
    holder.start(jobs.share_under_guard, "stock")
    assert holder.hear()
    with jobs.isolated(level):
        began, book = time.monotonic(), db_rwlock("stock")
        assert book.write().try_acquire() is None
        book.read().try_acquire().release()
        in_time(time.monotonic() - began, 4.0)
        with transaction.atomic(), connection.cursor() as cursor:
            ResourceLock.objects.select_for_update().get()
            if connection.vendor == "mysql":
                # The server refreshes this table ten times a second.
                time.sleep(0.2)
                cursor.execute(
                    "SELECT trx_isolation_level FROM information_schema.innodb_trx"
                    " WHERE trx_mysql_thread_id = CONNECTION_ID()"
                )
            else:
                cursor.execute("SELECT upper(current_setting('transaction_isolation'))")
            assert cursor.fetchone() == (level,)
    holder.tell()
    assert holder.hear() == "ended"


@EVERY_SERVER
def test_a_renewal_does_not_wait_for_a_guarded_share(workers, monkeypatch):
    """The guard has begun since the keeper looked. Its transaction may be long.

    The first lease of a waiter is short, so that a step renews it.
    """
    (holder,) = workers(1)
    holder.start(jobs.share_under_guard, "stock")
    assert holder.hear()
    share = LockClaim.objects.get()
    claim = Claim(key="stock", ttl=3600.0, shared=True, owner=share.owner)
    monkeypatch.setattr(holders, "HANDOVER_LEASE", 600.0)
    began = time.monotonic()
    left = backends["default"].renew([claim])
    in_time(time.monotonic() - began, 4.0)
    assert 0 < left[share.owner] <= 30
    holder.tell()
    assert holder.hear() == "ended"


@SERVERS
def test_two_guards_of_one_shared_hold_wait_with_a_limit(monkeypatch, threads):
    """An exclusive lock behaves in the same way."""
    monkeypatch.setattr(holders, "LIVE_WAIT", 0.5)
    hold = db_rwlock("stock").read().acquire()
    inside, leave = threading.Event(), threading.Event()

    def guard():
        with hold.atomic():
            inside.set()
            leave.wait(20)

    thread = threads(guard)
    assert inside.wait(20)
    with pytest.raises(LockBackendError, match="'stock' .* is locked by another trans"):
        hold.atomic().__enter__()
    monkeypatch.setattr(holders, "LIVE_WAIT", 20)
    timer = threading.Timer(0.5, leave.set)
    timer.start()
    with hold.atomic():
        hold.check()
    timer.join()
    thread.join(30)
    hold.release()


@EVERY_SERVER
@for_each("who", ["a writer", "an operator"])
def test_a_share_that_a_guard_renews_within_a_step_is_not_ended(
    who, workers, monkeypatch
):
    """A step has read that the share has expired. Then its transaction commits."""
    (holder,) = workers(1)
    holder.start(jobs.keep_share, "stock", ttl=1.5)
    token = holder.hear()
    backend, claims = backends["default"], LockClaim.objects.by_clock()
    store, commits = backend.store, iter([True])
    if who == "an operator":
        # What is stale can be cleared before the grace has passed.
        monkeypatch.setattr(store.reader, "grace", 600.0)
    grace = 0.0 if who == "an operator" else store.reader.grace
    while claims.get(version=token).seconds_left > -2 * grace:
        time.sleep(0.05)
    usual = store._without_kept

    def commit_first(key):
        if next(commits, False):
            holder.tell()
            assert holder.hear() == "committed"
        return usual(key)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_without_kept", commit_first)
        if who == "an operator":
            assert not backend.maintenance.end_share("stock", token, stale_only=True)
        else:
            assert db_lock("stock").try_acquire() is None
    assert next(commits, None) is None
    holder.tell()
    assert holder.hear() == "ended"
