"""LockLost names the person or caller that took the key, and when and why."""

from __future__ import annotations

import logging
import time
from functools import partial

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.test import Client

from dlocks import LockBackendError, LockLost, db_lock, db_rwlock, db_semaphore
from dlocks.backends.base import Inspector
from dlocks.backends.database import PessimisticBackend
from dlocks.testing import expire, held_elsewhere
from tests import jobs, rows
from tests.for_each import for_each
from tests.promises.admin.names import END
from tests.promises.admin.pages import end, fields, page
from tests.promises.commands.running import run
from tests.promises.locks.keys import clear
from tests.sync_and_async import sync_and_async

pytestmark = pytest.mark.front

# The flush after a test with users also writes all permissions again.
COMMITS = pytest.mark.django_db(transaction=True)


@pytest.fixture
def anna(transactional_db):
    """Return a function that forces a hold's release in the admin, as Anna."""

    def force(hold):
        client = Client()
        user, _ = User.objects.get_or_create(
            username="anna", is_staff=True, is_superuser=True
        )
        client.force_login(user)
        button = {"force_release": f"lock {hold.token} {hold.key}"}
        sent = {**fields(page(client.post(END, button))), "reason": "deploy hung"}
        assert "release of 1 lock was forced" in end(client, sent)

    return force


@sync_and_async
async def test_a_forced_release_in_the_admin_is_explained(do, anna, settings):
    """LockLost names the user and the reason, which DLOCKS_SHOW_HOLDER hides."""
    by_anna = (
        r"^'stock:7' was lost by .*: anna wrote in the admin \d\.\d s ago: Forced"
        r" .*Reason: deploy hung\.$"
    )
    hidden = r"it was force released in the admin \d\.\d s ago"
    for shown, explained in ((True, by_anna), (False, hidden)):
        settings.DLOCKS_SHOW_HOLDER = shown
        hold = await do.ask(db_lock("stock:7"), "acquire")
        await do.sync(anna, hold)
        with pytest.raises(LockLost, match=explained) as lost:
            await do.ask(hold, "check")
        assert ("anna" in str(lost.value)) == shown
        assert ("deploy hung" in str(lost.value)) == shown


@pytest.mark.engine("sqlite", "postgresql")
def test_a_renewal_and_a_block_explain_a_forced_release_too(anna, caplog, until):
    """A renewal logs the same text as the error at the end of the block.

    A guarded transaction raises the same error, and the caller can use its connection
    afterwards.
    """
    with (
        pytest.raises(LockLost, match="anna wrote in the admin .*deploy hung"),
        # The first renewal, after 2 s, comes after the entry in the admin's log.
        db_lock("stock:7", ttl=6) as hold,
    ):
        with caplog.at_level(logging.WARNING, logger="dlocks"):
            anna(hold)
            until(lambda: "anna wrote in the admin" in caplog.text)
    hold = db_lock("stock:7").acquire()
    anna(hold)
    with pytest.raises(LockLost, match="anna wrote in the admin"), hold.atomic():
        pytest.fail("the transaction began")
    assert User.objects.count() == 1


def test_the_forced_release_of_another_hold_explains_nothing(anna, in_other_thread):
    """An admin log entry about another holder of the key explains nothing here."""
    hold = db_lock("stock:7").acquire()
    expire(hold)
    other = in_other_thread(db_lock("stock:7").acquire)
    anna(other)
    with pytest.raises(LockLost) as lost:
        hold.check()
    assert "anna" not in str(lost.value)
    assert "it was cleared, force released or taken over" in str(lost.value)
    with pytest.raises(LockLost, match="anna wrote in the admin"):
        in_other_thread(other.check)


@COMMITS
def test_a_loss_is_reported_without_the_table_of_the_admins_log():
    """A project may have no admin, or the database may be one of before its tables."""
    hold = db_lock("stock:7").acquire()
    clear("stock:7")
    with rows.without_table(LogEntry), pytest.raises(LockLost):
        hold.check()


@COMMITS
@for_each("using", ["default", "optimistic", "insert"])
def test_a_lock_cleared_by_a_command_refers_to_the_audit_log(using):
    """Its reason is only there."""
    hold = db_lock("stock:7", using=using).acquire()
    clear("stock:7", using)
    said = (
        r"it was cleared, force released or taken over by a shared hold \d\.\d s ago\."
        r" The log dlocks\.audit names the user and the reason, if a person did it\.$"
    )
    with pytest.raises(LockLost, match=said):
        hold.check()


@pytest.mark.storage
@COMMITS
@for_each("using", ["default", "optimistic", "insert", "memory"])
def test_the_present_holder_is_named(using, until):
    """The error names the present holder of the key, or the last one."""
    lock = db_lock("stock:7", using=using)
    hold = lock.acquire()
    expire(hold)
    with (
        held_elsewhere("stock:7", using=using, holder="web-2:77"),
        pytest.raises(LockLost, match="hold has ended: it is now held by web-2:77"),
    ):
        hold.check()
    if using == "memory":
        return
    again = lock.acquire()
    expire(again)
    with held_elsewhere("stock:7", using=using, holder="web-2:77"):
        token = lock.holder().token
        # The insert backend deletes a row on release if the clock has passed its token.
        # The clock of SQLite has milliseconds.
        until(lambda: time.time() * 1e6 > token + 1000)
    had = r": web-2:77 took it over and released it \d\.\d s ago\.$"
    with pytest.raises(
        LockLost, match=r"this hold has ended\.$" if using == "insert" else had
    ):
        again.check()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@COMMITS
def test_a_transaction_that_took_the_key_over_is_not_said_to_have_released_it(workers):
    """It may still hold the key. A release in it is only seen after its commit."""
    (taker,) = workers(1)
    hold = db_lock("stock:7").acquire()
    expire(hold)
    taker.start(jobs.hold_in_transaction, "stock:7")
    assert taker.hear() > hold.token
    # The key was reserved for the transaction for a moment.
    time.sleep(0.2)
    with pytest.raises(LockLost, match=r" took it over in a transaction \d\.\d s ago"):
        hold.check()
    taker.tell()
    assert taker.hear() == "ended"


@COMMITS
def test_a_writer_that_loses_its_key_to_readers_is_not_told_of_a_person(
    in_other_thread,
):
    """An error names no writer as its own successor if the key was not taken over."""
    catalogue = db_rwlock("catalogue", timeout=0)
    hold = catalogue.write().acquire()
    read = catalogue.read().acquire()
    expire(hold)
    with pytest.raises(LockLost, match=r"this hold has ended\.$"):
        hold.check()
    read.release()
    hold = in_other_thread(catalogue.write().acquire)
    expire(hold)
    with (
        catalogue.read(),
        pytest.raises(
            LockLost, match=r"ended: it was .*or taken over by a shared hold"
        ),
    ):
        in_other_thread(hold.check)


@COMMITS
def test_another_permit_does_not_explain_the_loss_of_one(in_other_thread):
    """Other holders of a semaphore have not taken a lost permit, so none is named."""
    hold, other = (
        db_semaphore("api", 2).acquire(),
        in_other_thread(db_semaphore("api", 2).acquire),
    )
    share = "--share", f"{hold.token}"
    run("clear_lock", "api", *share, "--yes", "--reason", "tests")
    with pytest.raises(LockLost, match=r"this hold has ended\.$"):
        hold.check()
    in_other_thread(other.release)


class TimeLimitError(Exception):
    """A time limit that strikes a thread asynchronously, like that of RQ's timer."""


class FailingInspector(Inspector):
    def taken_by(self, claim, token, age):
        raise self.error


class WithFailingInspector(PessimisticBackend):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.inspector = FailingInspector(self)


@pytest.fixture
def failing(settings, monkeypatch):
    """Return a function that lets each explanation fail with an error."""
    settings.DLOCKS = {"default": {"BACKEND": f"{__name__}.WithFailingInspector"}}
    return partial(monkeypatch.setattr, FailingInspector, "error", raising=False)


@COMMITS
def test_a_time_limit_during_the_explanation_reaches_the_caller(failing, is_busy):
    """It is raised instead of LockLost, which the release then raises."""
    failing(TimeLimitError())
    hold = db_lock("stock:7").acquire()
    clear("stock:7")
    with pytest.raises(TimeLimitError):
        hold.check()
    with pytest.raises(LockLost):
        hold.release()
    assert not is_busy("stock:7")


@pytest.mark.engine("sqlite", "postgresql")
@COMMITS
def test_a_failed_explanation_does_not_hide_the_loss(failing):
    failing(LockBackendError("The server is away."))
    hold = db_lock("stock:7").acquire()
    clear("stock:7")
    with pytest.raises(LockLost, match=r"this hold has ended\.$"):
        hold.check()
