"""The release of a lease when the transactions in which it was left have ended."""

from __future__ import annotations

import threading

import pytest
from django.db import transaction

from dlocks import db_lock
from dlocks.core import holding as module

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def test_threads_that_leave_at_once_share_one_settlement(monkeypatch, threads):
    """Otherwise the commit would wait for a release that the other one has sent."""
    both, begun = threading.Barrier(2), []

    class Slow(module.Settlement):
        def __init__(self, hold):
            super().__init__(hold)
            both.wait(20)

        def begin(self):
            begun.append(self)

    hold = db_lock("a", using="memory", scope="lease").acquire()
    (holding,) = hold._parts
    with transaction.atomic():
        hold.release()
        vars(holding).pop("_settlement")
        with monkeypatch.context() as patch:
            patch.setattr(module, "Settlement", Slow)
            for thread in [threads(holding._await_transactions) for _ in range(2)]:
                thread.join(30)
        assert len(begun) == 2
        assert begun[0] is begun[1]
        holding._await_transactions()
