"""The deadline of a lease whose ttl changes while a reply is on its way."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial

import pytest

from dlocks import LockLost, db_lock
from tests.internals import clock, keeper

pytest_plugins = ["tests.moments"]
pytestmark = pytest.mark.front


@pytest.fixture
def lease():
    hold = db_lock("stock:7", using="memory", ttl=60).acquire()
    yield hold._parts[0].lease
    hold.release()


def test_a_renewal_that_begins_within_a_change_counts_as_an_earlier_one(
    lease, monkeypatch
):
    """Another thread sends the earlier ttl, and its reply comes last."""
    sent = []
    replace = dataclasses.replace

    def switch(claim, **changes):
        if not sent:
            sent.append((clock.now(), lease.next_claim(may_be_late=False).ttl))
        return replace(claim, **changes)

    monkeypatch.setattr(dataclasses, "replace", switch)
    lease.change(1, None)
    lease.record_answer(*sent[0])
    assert sent[0][1] == pytest.approx(60, abs=1)
    assert lease.deadline <= clock.now() + 1


def test_a_change_within_the_record_of_a_reply_is_kept(lease):
    """A signal handler shortens the lease while its thread records a reply."""

    handled = []

    class Handled(float):
        def __radd__(self, sent):
            if not handled:
                handled.append(lease.change(1, None))
            return sent + float(self)

    sent = clock.now()
    lease.record_answer(sent, Handled(60))
    assert lease.deadline <= clock.now() + 1


def test_a_change_that_is_interrupted_leaves_no_deadline_after_the_lease(
    lease, strike_in_dlocks
):
    """Renewals may have the shorter ttl from then on."""
    for number in itertools.count():
        lease.change(60, None)
        lease.record_answer(clock.now(), 60)
        struck = strike_in_dlocks(number, partial(lease.change, 1, None))
        sent, claim = clock.now(), lease.next_claim(may_be_late=False)
        lease.record_answer(sent, claim.ttl)
        assert lease.deadline <= sent + claim.ttl, number
        if not struck:
            break
    assert number > 10


# The end of a lease whose renewal is on its way.


@pytest.fixture
def renewed_after_the_look(monkeypatch):
    """Return a hold whose renewal arrives after a look at its deadline."""
    hold = db_lock("stock:7", using="memory", ttl=60, renew=False).acquire()
    (holding,) = hold._parts
    # Only the test looks at it.
    keeper.remove(holding)
    holding.lease.shorten(clock.now())
    assert not hold.held

    def why_not(lease):
        lease.record_answer(clock.now(), 50)
        return "it was not renewed"

    monkeypatch.setattr(type(holding.lease), "why_not", why_not)
    yield hold
    assert hold.held
    hold.release()


def test_a_renewal_after_the_look_at_the_deadline_is_no_loss(renewed_after_the_look):
    """The look of the keeper, and the end of the hold, are one step."""
    (holding,) = renewed_after_the_look._parts
    holding.watch.check_expiry(holding)


def test_a_renewal_while_its_caller_checks_a_hold_is_no_loss(renewed_after_the_look):
    renewed_after_the_look.check()


# The end of a lease that may be renewed after its deadline.


@pytest.mark.engine("sqlite")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("use", ["check", "renew"])
def test_a_late_lease_does_not_go_on_after_its_max_hold(use, until):
    """On SQLite, a transaction may keep renewals waiting until then."""
    hold = db_lock("stock:7", max_hold=0.3).acquire()
    (holding,) = hold._parts
    # Only the test looks at it.
    keeper.remove(holding)
    holding.lease.shorten(clock.now())
    until(lambda: clock.now() > holding.lease.last_at)
    with pytest.raises(LockLost, match="max_hold"):
        getattr(hold, use)()
    with pytest.raises(LockLost):
        hold.release()
