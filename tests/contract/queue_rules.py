"""The rules of the contract of backends about the queue and shared holds."""

from __future__ import annotations

import time
from typing import Any

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.values import Claim, Grant, Ticket

from .case import ContractCase, in_time


class QueueRules(ContractCase):
    """The rules about the queue of a key, and about shared holds."""

    def enqueued(self, claim: Claim, number: int | None = None) -> Ticket:
        """Add a claim to the queue. It must not be granted yet."""
        ticket = self.backend.enqueue(claim, "", number)
        assert ticket is not None
        self.assertIsNone(ticket.grant)
        return ticket

    def queued(self, number: int) -> list[Claim]:
        """Return the claim of a holder, and those of a number of its waiters."""
        holder, waiting = self.held(), [self.claim() for _ in range(number)]
        for claim in waiting:
            self.enqueued(claim)
        return [holder, *waiting]

    def turn(self, claim: Claim) -> Grant:
        """Poll until the claim is granted, as its caller does."""
        deadline = time.monotonic() + 10
        while True:
            ticket = self.backend.poll([claim]).get(claim.owner)
            assert ticket is not None, "the claim is not in the queue"
            if ticket.grant is not None:
                return ticket.grant
            in_time(time.monotonic(), deadline, "the claim was not granted")
            time.sleep(0.01)

    def test_a_release_hands_over_in_the_order_of_arrival(self) -> None:
        self.needs_positions()
        holder, *waiting = (self.claim() for _ in range(4))
        tokens = [self.granted(holder).token]
        for number, claim in enumerate(waiting):
            self.enqueued(claim)
            self.assertEqual(self.backend.waiting(claim.key), number + 1)
        self.assertEqual(
            [self.backend.poll([claim])[claim.owner].ahead for claim in waiting],
            [0, 1, 2],
        )
        for claim in waiting:
            self.released(holder)
            tokens.append(self.turn(claim).token)
            self.assertIn(claim.owner, self.backend.renew([claim]))
            holder = claim
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertEqual(self.backend.waiting(holder.key), 0)
        self.released(holder)
        self.held()

    def test_a_waiter_for_a_free_key_is_granted_at_once(self) -> None:
        self.needs_positions()
        claim = self.claim()
        ticket = self.backend.enqueue(claim)
        assert ticket is not None
        if ticket.grant is None:
            # The claim needs no position, since it may acquire the key at once.
            self.assertTrue(ticket.must_retry)
            self.assertIsNone(ticket.position)
            self.granted(claim)
        self.assertIn(claim.owner, self.backend.renew([claim]))
        self.assertEqual(self.backend.waiting(claim.key), 0)

    def test_no_newcomer_overtakes_the_queue(self) -> None:
        self.needs_positions()
        holder, first, second = self.queued(2)
        self.backend.release(holder)
        self.refused(self.claim())
        self.backend.release(first)
        self.refused(self.claim())
        self.assertTrue(self.turn(second))

    def test_queueing_twice_keeps_one_position(self) -> None:
        self.needs_positions()
        holder, claim = self.held(), self.claim()
        for _ in range(3):
            self.enqueued(claim)
        self.assertEqual(self.backend.waiting(claim.key), 1)
        self.backend.release(holder)
        grant = self.turn(claim)
        for _ in range(2):
            ticket = self.backend.enqueue(claim)
            self.assertTrue(
                ticket is not None and (ticket.must_retry or ticket.grant is not None)
            )
        self.assertGreaterEqual(self.granted(claim).token, grant.token)
        self.released(claim)
        self.held()

    def test_a_cancelled_claim_leaves_the_queue(self) -> None:
        self.needs("supports_queue")
        holder, gone, claim = self.queued(2)
        self.assertFalse(self.backend.release(gone))
        self.assertFalse(self.backend.release(gone))
        if not self.engine_queue:
            self.assertEqual(self.backend.waiting(claim.key), 1)
        self.assertNotIn(gone.owner, self.backend.poll([gone]))
        self.backend.release(holder)
        self.assertTrue(self.turn(claim))

    def test_a_cancelled_turn_passes_to_the_next_waiter(self) -> None:
        self.needs_positions()
        holder, gone, claim = self.queued(2)
        self.backend.release(holder)
        self.released(gone)
        self.assertTrue(self.turn(claim))

    def test_a_waiter_without_heartbeats_is_skipped_until_it_returns(self) -> None:
        self.needs_positions()
        holder, silent, claim = self.claim(), self.claim(), self.claim()
        self.granted(holder)
        number = self.enqueued(silent).position
        self.enqueued(claim)
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT + 2.0
        while self.backend.waiting(claim.key) != 1:
            in_time(time.monotonic(), deadline, "the dead claim still counts")
            self.backend.poll([claim])
            time.sleep(0.1)
        self.backend.release(holder)
        self.turn(claim)
        ticket = self.backend.poll([silent]).get(silent.owner) or self.enqueued(
            silent, number
        )
        self.assertEqual(ticket.ahead, 0)
        last = self.claim()
        self.enqueued(last)
        self.backend.release(claim)
        self.turn(silent)
        self.backend.release(silent)
        self.turn(last)

    def test_an_expired_lease_goes_to_the_queue(self) -> None:
        self.needs("supports_queue")
        holder, claim = self.claim(ttl=self.ttl), self.claim()
        before = time.monotonic()
        token = self.granted(holder).token
        self.enqueued(claim)
        self.assertGreater(self.turn(claim).token, token)
        self.assertGreaterEqual(time.monotonic() - before, self.ttl - 0.002)
        self.assertFalse(self.backend.release(holder))

    def test_a_key_kept_after_release_goes_to_the_queue(self) -> None:
        self.needs("supports_queue")
        holder, claim = self.queued(1)
        before = time.monotonic()
        self.backend.release(holder, rest_for=0.3)
        self.assertTrue(self.turn(claim))
        self.assertGreaterEqual(time.monotonic() - before, 0.3 - 0.002)

    def test_no_newcomer_overtakes_the_queue_of_a_kept_key(self) -> None:
        """The first waiter has not polled since the key became free."""
        self.needs_positions()
        holder, claim = self.queued(1)
        self.backend.release(holder, rest_for=0.1)
        time.sleep(0.15)
        self.refused(self.claim())
        self.assertTrue(self.turn(claim))

    def shared(self, **options: Any) -> Claim:
        return self.claim(shared=True, **options)

    def test_a_key_has_as_many_shared_holds_as_permits(self) -> None:
        claims = [self.accepted(shared=True, permits=3) for _ in range(3)]
        tokens = [self.granted(claim).token for claim in claims]
        self.assertEqual(tokens, sorted(set(tokens)))
        self.refused(self.shared(permits=3))
        self.released(claims[1])
        self.assertGreater(self.granted(self.shared(permits=3)).token, tokens[-1])

    def test_readers_and_writers_exclude_each_other(self) -> None:
        self.needs("supports_sharing")
        alone, share = self.claim(), self.held(shared=True)
        self.refused(alone)
        self.released(share)
        self.granted(alone)
        self.refused(share)
        self.released(alone)
        self.granted(share)

    def test_a_shared_hold_is_renewed_and_released_like_any(self) -> None:
        """Its claim can be repeated, and it ends after its ttl."""
        self.needs("supports_sharing")
        share, stranger = self.shared(), self.shared()
        token = self.granted(share).token
        self.assertGreaterEqual(self.granted(share).token, token)
        self.assertTrue(self.backend.verify([share], 2))
        self.assertFalse(self.backend.verify([stranger], 2))
        self.assertFalse(self.backend.release(stranger))
        self.assertEqual(set(self.backend.renew([share, stranger])), {share.owner})
        share = self.kept_by_renewing(shared=True)
        alone = self.claim(share.key)
        self.granted_in_time(alone)
        self.lost(share)
        self.assertFalse(self.backend.release(share))
        self.released(alone)
        share = self.held(shared=True)
        self.assertTrue(self.backend.release(share, rest_for=0.5))
        # This renewal was on its way.
        self.assertEqual(dict(self.backend.renew([share])), {})
        self.granted_in_time(alone)

    def test_many_shares_are_renewed_together(self) -> None:
        self.needs("supports_sharing")
        claims = [self.held(f"contract:{number}", shared=True) for number in range(20)]
        self.backend.release(claims[0])
        self.assertEqual(
            set(self.backend.renew(claims)), {claim.owner for claim in claims[1:]}
        )

    def test_polls_do_not_prolong_a_shared_hold(self) -> None:
        """A late heartbeat of a granted claim is not a renewal."""
        self.needs("supports_sharing", "supports_queue")
        holder, share, alone = self.held(), self.shared(ttl=self.ttl), self.claim()
        self.enqueued(share)
        self.backend.release(holder)
        self.turn(share)
        deadline = time.monotonic() + 10
        while self.backend.acquire(alone) is None:
            in_time(time.monotonic(), deadline, "the shared hold did not end")
            self.backend.poll([share])
            time.sleep(0.01)

    def test_a_reader_queues_behind_a_waiting_writer(self) -> None:
        self.needs("supports_sharing")
        self.needs_positions()
        reading, writing, later = self.held(shared=True), self.claim(), self.shared()
        self.enqueued(writing)
        self.refused(later)
        self.enqueued(later)
        self.backend.release(reading)
        self.turn(writing)
        self.backend.release(writing)
        self.turn(later)

    def test_waiting_readers_are_admitted_together(self) -> None:
        self.needs("supports_sharing", "supports_queue")
        alone, sharing = self.held(), [self.shared() for _ in range(3)]
        for claim in sharing:
            self.enqueued(claim)
        last = self.claim()
        self.enqueued(last)
        self.backend.release(alone)
        tokens = [self.turn(claim).token for claim in sharing]
        # The first leases are short.
        self.backend.renew(sharing)
        self.assertEqual(tokens, sorted(set(tokens)))
        for claim in sharing:
            self.assertIsNone(self.backend.poll([last])[last.owner].grant)
            self.released(claim)
        self.assertGreater(self.turn(last).token, tokens[-1])
