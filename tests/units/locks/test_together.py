"""The release of several keys, while a block of another caller begins."""

from __future__ import annotations

import threading

import pytest

from dlocks import db_lock
from tests.internals import acquire, together

pytestmark = pytest.mark.front


def test_a_block_that_begins_during_a_release_keeps_its_keys(monkeypatch, threads):
    """Another thread releases the hold, and its acquirer begins a block just then."""
    hold = db_lock("a", "b", using="memory").acquire()
    looked, entered = threading.Event(), threading.Event()
    leave = together._leave_simply

    def late(*arguments, **options):
        looked.set()
        assert entered.wait(20)
        return leave(*arguments, **options)

    monkeypatch.setattr(together, "_leave_simply", late)
    other = threads(hold.release)
    assert looked.wait(20)
    monkeypatch.undo()
    with hold:
        entered.set()
        with pytest.raises(RuntimeError, match="in a block that holds it"):
            other.join(20)
        hold.check()
    assert not hold.held
    assert not db_lock("a", using="memory").locked()


def test_a_loss_before_the_caller_has_the_hold_is_no_silent_one(monkeypatch):
    """One of the keys is lost after the last wait. All are acquired again."""
    lost, made = [], []
    usual = acquire.Hold

    def make(lock, parts, entries):
        if not made:
            entries[0].hold.lose("it was cleared")
        made.append(usual(lock, parts, entries))
        return made[-1]

    monkeypatch.setattr(acquire, "Hold", make)
    with db_lock("a", "b", using="memory", on_lost=lost.append) as hold:
        assert hold.held
    assert len(made) == 2
    assert lost == []
