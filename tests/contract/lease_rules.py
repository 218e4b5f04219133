"""The rules of the contract of backends about owners, ttls and tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from django.db import connections

from dlocks.values import Grant

from .case import ContractCase, in_time


class LeaseRules(ContractCase):
    """The rules about owners, ttls and tokens."""

    def race(self, acquire: Callable[[], Grant | None]) -> list[Grant]:
        """Return the grants of threads that start together.

        Each of the threads retries until one of them is granted.
        """
        barrier, grants = threading.Barrier(8), []

        def run() -> None:
            try:
                barrier.wait(30)
                for _ in range(50):
                    if (grant := acquire()) is not None:
                        grants.append(grant)
                    if grants:
                        break
                    time.sleep(0.01)
            finally:
                connections.close_all()

        with ThreadPoolExecutor(barrier.parties) as pool:
            for runner in [pool.submit(run) for _ in range(barrier.parties)]:
                runner.result()
        return grants

    def test_the_same_claim_is_granted_again(self) -> None:
        claim = self.claim()
        first = self.granted(claim)
        self.assertGreaterEqual(self.granted(claim).token, first.token)
        self.released(claim)

    def test_releasing_twice_is_harmless(self) -> None:
        claim = self.held()
        self.released(claim)
        self.backend.release(claim)
        other = self.held()
        self.backend.release(claim)
        self.assertIn(other.owner, self.backend.renew([other]))

    def test_only_the_owner_releases(self) -> None:
        self.needs("exclusive")
        self.held()
        self.assertFalse(self.backend.release(self.claim()))
        self.refused(self.claim())

    def test_only_the_owner_renews_and_recounts(self) -> None:
        self.needs("exclusive")
        self.held()
        self.lost(self.claim())

    def test_a_released_claim_is_not_renewed(self) -> None:
        self.needs("exclusive")
        claim = self.held()
        self.backend.release(claim)
        self.lost(claim)

    def test_a_taken_over_claim_changes_nothing_more(self) -> None:
        self.needs("exclusive")
        late = self.held(ttl=self.ttl)
        successor = self.claim()
        self.granted_in_time(successor)
        self.lost(late)
        self.assertFalse(self.backend.release(late))
        self.assertIn(successor.owner, self.backend.renew([successor]))

    def test_many_claims_are_renewed_together(self) -> None:
        claims = [self.held(f"contract:{number}") for number in range(20)]
        self.backend.release(claims[0])
        left = self.backend.renew(claims)
        self.assertEqual(
            set(left) - {claims[0].owner}, {claim.owner for claim in claims[1:]}
        )
        self.assertTrue(all(0 < seconds <= 30 for seconds in left.values()))

    def test_an_exchanged_claim_no_longer_holds_the_key(self) -> None:
        self.needs("supports_handover")
        claim, successor = self.claim(), self.claim(ttl=60.0)
        first = self.granted(claim)
        second = self.backend.exchange(claim, successor)
        assert second is not None
        self.assertGreater(second.token, first.token)
        self.needs("exclusive")
        self.assertEqual(set(self.backend.renew([claim, successor])), {successor.owner})
        self.assertFalse(self.backend.release(claim))
        self.refused(self.claim())
        self.assertIsNone(self.backend.exchange(claim, self.claim()))
        self.released(successor)

    def test_a_repeated_exchange_succeeds_again(self) -> None:
        self.needs("supports_handover")
        claim, successor = self.claim(), self.claim()
        self.granted(claim)
        self.assertIsNotNone(self.backend.exchange(claim, successor))
        self.assertIsNotNone(self.backend.exchange(claim, successor))

    def test_only_what_is_held_is_exchanged(self) -> None:
        self.needs("supports_handover", "exclusive")
        late = self.claim(ttl=0.05)
        self.assertIsNone(self.backend.exchange(late, self.claim()))
        self.granted(late)
        self.granted_in_time(other := self.claim())
        self.assertIsNone(self.backend.exchange(late, self.claim()))
        self.released(other)
        self.assertIsNone(self.backend.exchange(other, self.claim()))

    def test_of_many_successors_one_is_granted(self) -> None:
        self.needs("supports_handover", "exclusive")
        claim = self.held("contract:exchange")
        grants = self.race(
            lambda: self.backend.exchange(claim, self.claim("contract:exchange"))
        )
        self.assertEqual(len(grants), 1)

    def test_a_lease_without_renewal_ends_after_its_ttl(self) -> None:
        self.needs("exclusive")
        before = time.monotonic()
        self.held(ttl=self.ttl)
        after = time.monotonic()
        taken = self.granted_in_time(self.claim())
        self.assertGreaterEqual(taken - before, self.ttl - 0.002)
        in_time(taken - after, self.ttl + 2.0, "the key did not become free")

    def test_a_takeover_also_waits_for_the_grace(self) -> None:
        self.needs("exclusive")
        self.backend = self.make_backend(grace=0.4)
        before = time.monotonic()
        self.held(ttl=0.2)
        self.assertGreaterEqual(
            self.granted_in_time(self.claim()) - before, 0.6 - 0.002
        )

    def test_a_renewed_lease_outlives_its_ttl(self) -> None:
        self.needs("exclusive")
        self.released(self.kept_by_renewing())

    def test_a_released_key_is_free_at_once(self) -> None:
        for _ in range(5):
            self.released(self.held())

    def test_a_released_key_can_stay_taken_for_a_while(self) -> None:
        self.needs("exclusive")
        claim = self.held()
        before = time.monotonic()
        self.assertTrue(self.backend.release(claim, rest_for=0.3))
        self.assertGreaterEqual(
            self.granted_in_time(self.claim()) - before, 0.3 - 0.002
        )

    def test_a_grant_says_whether_it_is_a_takeover(self) -> None:
        self.needs("exclusive")
        self.accepted(takeover=False)
        self.held(ttl=0.05)
        deadline = time.monotonic() + 10
        while (grant := self.backend.acquire(claim := self.claim())) is None:
            in_time(time.monotonic(), deadline, "the key did not become free")
            time.sleep(0.01)
        self.assertTrue(grant.takeover)
        self.backend.release(claim)
        self.settle(claim.key)
        self.assertFalse(self.granted(self.claim()).takeover)

    def test_tokens_strictly_increase(self) -> None:
        tokens = []
        for number in range(10):
            claim = self.claim(ttl=0.001 if number % 3 == 0 else 30.0)
            self.granted_in_time(claim)
            if number % 2:
                tokens.append(self.granted(claim).token)
            self.backend.release(claim)
        self.assertEqual(tokens, sorted(set(tokens)))
