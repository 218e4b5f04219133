"""The release of a lease when the transactions in which it was left have ended."""

from __future__ import annotations

import threading

import pytest
from django.db import transaction

from dlocks import db_lock
from tests.internals import Holding, backends

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def test_a_commit_waits_for_the_release_that_another_thread_sends(monkeypatch, threads):
    """That thread leaves the hold when the transaction has just ended.

    So the key is free after the commit. The commit waits no longer than that.
    """
    lock = db_lock("a", using="memory", scope="lease")
    hold = lock.acquire()
    backend, others = backends["memory"], []
    release, await_release = backend.release, Holding.await_release
    is_sending, may_send = threading.Event(), threading.Event()

    def slow(*arguments, **options):
        is_sending.set()
        assert may_send.wait(20)
        return release(*arguments, **options)

    def leave():
        monkeypatch.setattr(backend, "release", slow)
        others.append(threads(hold.release))
        assert is_sending.wait(20)

    def wait(*arguments):
        may_send.set()
        await_release(*arguments)

    monkeypatch.setattr(Holding, "await_release", wait)
    with transaction.atomic():
        # Before the callback by which the hold waits for the end.
        transaction.on_commit(leave)
        hold.release()
        assert lock.acquire() is hold
    is_free = not lock.locked()
    may_send.set()
    others[0].join(30)
    assert is_free
