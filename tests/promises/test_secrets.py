"""No text shows the secret owner of a hold, and none of a caller forges a line."""

import json
import logging
import threading

import pytest
from django.core.management import call_command
from django.db import connection
from django.views.debug import ExceptionReporter

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from dlocks.models import LockClaim, ResourceLock
from dlocks.values import Claim, HeldKey, WaitingClaim
from tests.promises.admin.names import LIST
from tests.promises.admin.pages import page, person
from tests.promises.commands.running import run

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]


def test_a_dump_contains_no_secret_owner(threads, in_queue, tmp_path):
    """``dumpdata`` writes digests of the owners of holds, shared holds and waiters.

    A hold that ``loaddata`` has written belongs to no process. Its former holder
    gets ``LockLost``. The next caller gets a larger token once the lease has expired.
    """
    lock = db_lock("stock:7", ttl=1, timeout=30)
    hold = lock.acquire()
    shared = [
        db_rwlock("doc").read().acquire(),
        db_semaphore("mails", permits=3).acquire(),
    ]

    def wait():
        with db_lock("mine"), db_lock("stock:7", timeout=30):
            pass

    waiter = threads(wait)
    in_queue(1)
    holds = ResourceLock.objects.exclude(owner="").values_list("owner", flat=True)
    claims = LockClaim.objects.values_list("owner", flat=True)
    owners = {*holds, *claims}
    # Two exclusive holds, two shared ones and a waiter.
    assert len(owners) >= 5
    for format in ("json", "jsonl", "xml"):
        dump = run("dumpdata", "dlocks", format=format)
        assert "stock:7" in dump
        assert not [owner for owner in owners if owner in dump], format
    hold.release()
    waiter.join()
    hold = lock.acquire()
    path = tmp_path / "dump.json"
    path.write_text(run("dumpdata", "dlocks.ResourceLock"))
    call_command("loaddata", str(path), verbosity=0)
    (found,) = json.loads(run("list_locks", "stock:7", "--json"))
    assert found["state"] in {"held", "stale"}
    with pytest.raises(LockLost):
        hold.check()
    with pytest.raises(LockLost):
        hold.release()
    with lock as successor:
        assert successor.token > hold.token
    for one in shared:
        one.release()


def mail_about(error):
    """Return what Django's error mail contains, without the frame of the test."""
    reporter = ExceptionReporter(None, type(error), error, error.__traceback__.tb_next)
    return reporter.get_traceback_text() + reporter.get_traceback_html()


def test_error_mails_contain_no_owner():
    """The frames of an error are those of dlocks, of Django and of the driver."""
    hold, shared = db_lock("stock:7").acquire(), db_rwlock("doc").read().acquire()
    names = [f"dlocks_{model}" for model in ("resourcelock", "lockclaim")]

    def rename(before, after):
        for name in names:
            with connection.cursor() as cursor:
                cursor.execute(f"ALTER TABLE {before}{name} RENAME TO {after}{name}")

    def guard():
        with hold.atomic():
            raise AssertionError

    mails = []
    rename("", "moved_")
    try:
        for ask in (hold.check, hold.renew, guard, shared.check, shared.release):
            with pytest.raises(LockBackendError) as raised:
                ask()
            mails.append(mail_about(raised.value))
    finally:
        rename("moved_", "")
    hold.release()
    for mail in mails:
        assert "dlocks/backends/database/" in mail
        assert hold.owner not in mail
        assert shared.owner not in mail


def test_no_value_of_a_backend_shows_an_owner():
    """A debugger, a log or an error mail may show it."""
    held = HeldKey("stock:7", "secret")
    claim = Claim(key="stock:8", ttl=30, owner="secret", holding=(held,))
    waiting = WaitingClaim(
        position=1, owner="secret", holder="web-3", owner_ip=None, key="stock:8",
        waited=1.0, silent=0.0, holding=(held,), permits=1, needs_all=True,
        held_by="secret", shared_by=("secret",),
    )  # fmt: skip
    shown = f"{held!r} {claim!r} {waiting!r}"
    assert "secret" not in shown
    assert {"stock:7", "stock:8", "web-3"} <= {*shown.replace("'", " ").split()}


FORGED = "x\r\n2026-01-01 INFO dlocks.audit forged\x1b[2J\x85\u2028\u2029\u202e\0"
# What ends a line, acts on a terminal, or turns the direction of writing.
HARMFUL = set("\r\n\x0b\x0c\x1b\x85\u2028\u2029\u202e\0")


@pytest.mark.holds
@pytest.mark.parametrize("using", ["default", "memory"])
def test_a_thread_name_cannot_forge_lines(using, settings, caplog, paused):
    """Line breaks and escape sequences of a thread's name are escaped everywhere.

    This applies to logs, errors, lists and the admin. A thread's name may contain a
    command line, as that of ``run_locked``.
    """
    settings.DLOCKS = {
        **settings.DLOCKS,
        using: {**settings.DLOCKS[using], "OPTIONS": {"slow_hold": 0, "slow_wait": 0}},
    }
    caplog.set_level(logging.DEBUG)

    def work():
        threading.current_thread().name = FORGED
        with db_lock("stock:7", using=using):
            yield

    end = paused(work)
    try:
        with pytest.raises(LockTimeout) as caught:
            db_lock("stock:7", using=using, timeout=0).acquire()
        shown = [run("list_locks", "--waiting", "--using", using).partition("\n")[2]]
        shown.append(run("list_locks", "--json", "--using", using))
        assert not HARMFUL - {"\n"} & set("".join(shown))
        boss = person("boss", is_superuser=True)
        shown.append(page(boss.get(LIST, {"alias": using})))
        assert all("forged" in text for text in shown)
        # A forged line would begin with it.
        assert not [text for text in shown if "\n2026" in text]
        assert not HARMFUL - {"\n"} & set(shown[-1])
    finally:
        end()
    holder = caught.value.holder
    for text in (str(caught.value), str(holder), repr(holder), holder.holder):
        assert "dlocks.audit forged" in text
        assert not HARMFUL & set(text)
    lines = [record for record in caplog.records if "forged" in record.getMessage()]
    assert len(lines) >= 3
    for record in lines:
        assert not HARMFUL & set(record.getMessage())
        assert not HARMFUL & set(str(getattr(record, "lock_holder", "")))
