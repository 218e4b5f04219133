"""Texts of callers cannot forge lines of logs, or act on a terminal."""

import logging
import threading

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from dlocks import LockTimeout, db_lock
from tests.promises.commands.running import run

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]


FORGED = "x\r\n2026-01-01 INFO dlocks.audit forged\x1b[2J\x85\u2028\u2029\u202e\0"
# What ends a line, acts on a terminal, or turns the direction of writing.
HARMFUL = set("\r\n\x0b\x0c\x1b\x85\u2028\u2029\u202e\0")


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
        locks = reverse("admin:dlocks_resourcelock_changelist")
        client = Client()
        client.force_login(User.objects.create_superuser("boss"))
        page = client.get(locks, {"alias": using})
        shown.append(page.content.decode())
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
