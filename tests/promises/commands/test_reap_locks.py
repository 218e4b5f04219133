"""The command reap_locks."""

import time
from datetime import timedelta

import pytest
from django.db import OperationalError, ProgrammingError, connection, transaction
from django.utils import timezone

from dlocks import db_semaphore
from dlocks.models import LockClaim, ResourceLock
from tests import jobs, rows
from tests.promises.admin.pages import counters
from tests.promises.commands.running import refused, run
from tests.volume import volume

pytestmark = [pytest.mark.front, pytest.mark.django_db]


@pytest.fixture
def table(db):
    rows.held("held")
    rows.stale("stale:1")
    rows.stale("stale:2")
    rows.free("old")
    rows.write("recent", rows.S, timezone.now())


def states():
    found = ResourceLock.objects.by_clock()
    return {lock.pk: (lock.state, lock.status) for lock in found}


@pytest.mark.storage
@pytest.mark.usefixtures("table")
def test_reap_locks_changes_only_keys_under_the_prefix():
    """With a prefix, ``--using`` changes nothing of another project.

    This includes its locks, shared holds, rows and records.
    """
    rows.stale("shop:1")
    rows.free("shop:old")
    rows.stale("shopping")
    reap = ("reap_locks", "--using", "prefixed", "--idle-for", "30d")
    dry = run(*reap, "--dry-run")
    assert dry == "1 stale lock would be cleared, 1 unused row would be deleted.\n"
    assert run(*reap) == dry.replace("would be ", "")
    stale = [key for key, (state, _) in states().items() if state == "stale"]
    assert sorted(stale) == ["shopping", "stale:1", "stale:2"]
    assert "old" in states()


@pytest.mark.storage
@pytest.mark.usefixtures("table")
def test_dry_run_counts_what_a_run_would_do():
    """``--dry-run`` changes nothing and reports the numbers of the next run.

    Stale locks become free and failed, and no other row changes. ``--idle-for`` deletes
    rows that were unused for that long. It never deletes a row that is held or was just
    freed.
    """
    before = list(ResourceLock.objects.order_by("pk").values())
    out = run("reap_locks", "--idle-for", "12h", "--dry-run")
    assert out == "2 stale locks would be cleared, 1 unused row would be deleted.\n"
    assert list(ResourceLock.objects.order_by("pk").values()) == before
    assert run("reap_locks", "--idle-for", "12h") == out.replace("would be ", "")
    assert states() == {
        "held": ("held", "P"),
        "stale:1": ("free", "F"),
        "stale:2": ("free", "F"),
        "recent": ("free", "S"),
    }
    rows.free("old")
    assert run("reap_locks") == "0 stale locks cleared.\n"
    assert "old" in states()


@pytest.fixture
def just_expired(settings):
    """Write locks that are stale, but within the grace of the alias "patient"."""
    just = timezone.now() - timedelta(seconds=5)
    rows.write("late", rows.P, just)
    rows.free("shared", version=1)
    rows.claim("shared", just, version=100)
    patient = {**settings.DLOCKS["default"], "OPTIONS": {"grace": 60}}
    settings.DLOCKS = {**settings.DLOCKS, "patient": patient}
    return just


@pytest.mark.usefixtures("just_expired")
def test_nothing_is_cleared_within_the_grace():
    """A lock and a shared hold that have just ended are kept and not counted."""
    rows.stale("stale:1")
    rows.stale("stale:2")
    two = "2 stale locks would be cleared.\n"
    for arguments in (["--using", "patient"], []):
        assert run("reap_locks", *arguments, "--dry-run") == two
        assert run("reap_locks", *arguments) == two.replace("would be ", "")
        kept = LockClaim.objects.exists(), rows.now("late").status == rows.P
        assert set(kept) == {bool(arguments)}


def test_clear_lock_keeps_what_has_just_expired(just_expired):
    """Within the grace, a small step of the clock may be the reason.

    A reason forces the release all the same.
    """
    rows.write("forced", rows.P, just_expired)
    for arguments in (["late"], ["late", "--stale-only"], ["shared", "--share", "100"]):
        why = refused("clear_lock", *arguments, "--yes", "--using", "patient")
        assert "expired a moment ago" in why
    assert rows.now("late").status == rows.P
    assert LockClaim.objects.exists()
    forced = ("forced", "--yes", "--reason", "its host is gone")
    assert "was cleared" in run("clear_lock", *forced, "--using", "patient")
    for arguments in (["late"], ["shared", "--share", "100"]):
        run("clear_lock", *arguments, "--yes")
    assert rows.now("late").status == rows.F
    assert not LockClaim.objects.exists()


@pytest.mark.usefixtures("table")
def test_durations_have_units():
    """They are seconds, minutes, hours or days. An error changes nothing."""
    many = "9" * 400 + "d"
    wrong = ["", "30", "d", "-5d", "1w", "1 d", "x", "1e3s", "٣d", many, "4000d"]
    for text in wrong:
        assert "--idle-for" in refused("reap_locks", f"--idle-for={text}")
        assert rows.now("stale:1").state == "stale"
    for text in ("90s", "15m", "12h", "30d", "1.5h", "0s"):
        out = run("reap_locks", "--idle-for", text, "--dry-run")
        assert "2 stale locks would be cleared" in out, text


def test_stale_holds_and_dead_claims_are_reaped_and_counted():
    """``reap_locks`` ends stale shared holds and reports their number.

    Live ones are unchanged. Claims of dead processes leave the queue, and the row is as
    if they never existed. A reaped lock goes to its first waiter. A claim whose lock
    row is gone is reaped too.
    """
    rows.free("catalogue")
    rows.shares("catalogue", 1001)
    rows.stale_share("catalogue", 1002)
    rows.stale("left")
    rows.waits("left", holder="web-2:1:t")
    rows.held("stock:7")
    for _ in range(3):
        rows.dead("stock:7")
    rows.waits("stock:7")
    ResourceLock.objects.filter(pk="stock:7").update(waiters=17, shares=4)
    before = LockClaim.objects.count()
    assert run("reap_locks", "--dry-run") == "2 stale locks would be cleared.\n"
    assert (counters("catalogue"), LockClaim.objects.count()) == ((0, 2), before)
    assert run("reap_locks") == "2 stale locks cleared.\n"
    lock = rows.now("left")
    assert (lock.state, lock.holder) == ("held", "web-2:1:t")
    assert LockClaim.objects.filter(key_resource="stock:7").count() == 1
    found = [counters(key) for key in ("catalogue", "left", "stock:7")]
    assert found == [(0, 1), (0, 0), (1, 0)]
    # The lease that its waiter has not yet accepted may end before the next run.
    lock.delete()
    rows.dead("gone")
    rows.stale_share("gone", 1003)
    rows.shares("alive", 1004)
    rows.dead("alive")
    assert run("reap_locks") == "1 stale lock cleared.\n"
    assert not LockClaim.objects.filter(key_resource="gone").exists()
    assert counters("alive") == (0, 1)
    assert run("reap_locks") == "0 stale locks cleared.\n"


def test_rows_with_claims_are_not_purged():
    """``--idle-for`` deletes no row with shared holds or waiters.

    It makes no difference whether they are counted.
    """
    for key in ("shared", "waited", "uncounted", "unused"):
        rows.free(key)
    rows.shares("shared", 1001)
    # A shared claim that only a free permit would admit. The key itself has long been
    # free.
    rows.shares("waited", 1002, permits=1)
    rows.waits("waited", shared=True, permits=1)
    rows.waits("uncounted")
    ResourceLock.objects.filter(pk="uncounted").update(waiters=0)
    dry = run("reap_locks", "--idle-for", "1d", "--dry-run")
    assert "1 unused row would be deleted" in dry
    assert "1 unused row deleted" in run("reap_locks", "--idle-for", "1d")
    assert set(states()) == {"shared", "uncounted", "waited"}


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_the_row_of_a_key_that_was_just_shared_is_not_purged():
    """Its time is that of the last exclusive hold, and its token a recent one."""
    with db_semaphore("api", permits=2):
        time.sleep(1.1)
    with db_semaphore("api", permits=2) as hold:
        pass
    assert "0 unused rows deleted" in run("reap_locks", "--idle-for", "1s")
    assert rows.now("api").version == hold.token
    time.sleep(1.1)
    assert "1 unused row deleted" in run("reap_locks", "--idle-for", "1s")


def without_records(execute, sql, *arguments):
    """Refuse statements as for a role that has no rights to the records."""
    if "dlocks_holdrecord" in sql:
        raise ProgrammingError("permission denied for table dlocks_holdrecord")
    return execute(sql, *arguments)


@pytest.mark.django_db(transaction=True)
def test_the_reaper_audits_only_a_run_with_changes(audited):
    """It audits its changes even if it fails afterwards."""
    rows.stale("a")
    rows.stale("b")
    rows.free("old")
    run("reap_locks", "--idle-for", "1d", "--dry-run")
    assert audited() == []
    run("reap_locks", "--idle-for", "1d")
    run("reap_locks", "--idle-for", "1d")
    (record,) = audited()
    assert record.audit_action == "reap"
    done = (record.audit_freed, record.audit_deleted, record.audit_forgotten)
    assert done == (2, 1, 0)
    said = "reap of 'default': 2 cleared, 1 unused rows deleted, 0 records deleted"
    assert record.getMessage().startswith(said)
    rows.stale("c")
    with connection.execute_wrapper(without_records):
        assert "permission denied" in refused("reap_locks")
    _, record = audited()
    assert record.audit_freed == 1


def lost_at_b(execute, sql, params, *arguments):
    """Fail the statements about one key, as if the server had gone before them."""
    if "b" in (params or ()):
        raise OperationalError("the server has gone away")
    return execute(sql, params, *arguments)


@pytest.mark.django_db(transaction=True)
def test_the_reaper_audits_what_it_cleared_before_an_error(audited):
    """An error at one key hides none of those that were cleared just before."""
    rows.stale("a")
    rows.stale("b")
    with connection.execute_wrapper(lost_at_b):
        assert "the server has gone away" in refused("reap_locks")
    assert (rows.now("a").state, rows.now("b").state) == ("free", "stale")
    (record,) = audited()
    assert record.audit_freed == 1


@pytest.mark.engine("sqlite")
@pytest.mark.django_db(transaction=True)
def test_a_busy_writer_is_not_reported_as_a_locked_table(paused):
    """SQLite locks the whole database, and has no VACUUM FULL to wait for."""
    rows.ended("old", ago=60 * 86400.0)

    def write():
        with transaction.atomic():
            rows.free("other")
            yield

    commit = paused(write)
    with connection.cursor() as cursor:
        ((usual,),) = cursor.execute("PRAGMA busy_timeout").fetchall()
        cursor.execute("PRAGMA busy_timeout = 100")
        try:
            said = refused("reap_locks")
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {usual}")
    commit()
    assert said.endswith(
        "Another transaction writes to the database. Wait for its end."
    )


# Races.


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_the_reaper_ends_no_renewed_shared_hold(workers):
    holders = workers(2)
    for holder in holders:
        holder.start(jobs.hold, ("api", 2), using="brisk", ttl=4.0)
        holder.hear()
    # Each hold is renewed twice.
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        assert run("reap_locks", "--using", "brisk") == "0 stale locks cleared.\n"
        time.sleep(0.03)
    assert counters("api") == (0, 2)
    for holder in holders:
        holder.tell()
        assert holder.hear() == "released"


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_the_reaper_removes_no_live_waiter(workers, tmp_path):
    """Reaping and purging lose no position, no counter and no lock.

    Other processes queue and share keys meanwhile.
    """
    path = tmp_path / "counter"
    path.write_text("0 0")
    counting, times = workers(3), volume(40)
    policy = {"times": times, "scope": "lease", "timeout": 60}
    for worker in counting:
        worker.start(jobs.count, str(path), "stock:7", **policy)
    while not all(worker.pipe.poll() for worker in counting):
        assert run("reap_locks", "--idle-for", "0s").startswith("0 stale locks cleared")
    tokens = [token for worker in counting for token in worker.hear()]
    assert len(set(tokens)) == 3 * times
    assert path.read_text().split()[0] == str(len(tokens))
    assert not LockClaim.objects.exists()
