"""The rules of ``dlocks.backends.base`` as a test suite for every backend.

It is meant for the backends of dlocks and for those of third parties.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ClassVar
from unittest import SkipTest

from django.db import connections, transaction

from dlocks.backends.base import HEARTBEAT_TIMEOUT, Backend
from dlocks.testing.refusals import RefusalContract
from dlocks.values import Claim, Grant, Ticket


class BackendContract(RefusalContract):
    """A test suite for a backend.

    Inherit from it beside a test case class, and implement ``make_backend``:

    .. code-block:: python

        class TestMyBackend(BackendContract, TransactionTestCase):
            def make_backend(self, **options):
                return MyBackend("default", **options)

    Rules about expiring leases take real time: ``ttl`` and ``grace`` are fractions of a
    second.
    """

    __test__ = False
    ttl: ClassVar[float] = 0.4
    # Whether the queue is the engine's. Then the backend knows no positions, and cannot
    # skip a waiter without a heartbeat.
    engine_queue: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = (
            "make_backend" in dir(cls)
            and cls.make_backend is not BackendContract.make_backend
        )

    def make_backend(self, **options: Any) -> Backend:
        """Return a backend whose keys are not in use."""
        raise NotImplementedError

    @classmethod
    def setUpClass(cls) -> None:
        if not cls.__test__:
            raise SkipTest("a suite without a backend")
        super().setUpClass()

    def setUp(self) -> None:
        super().setUp()
        self.backend = self.make_backend(grace=0.0)

    def claim(self, key: str = "contract:1", **options: Any) -> Claim:
        return Claim(
            key=key,
            **{"ttl": 30.0, "holder": "contract", "owner_ip": "192.0.2.1", **options},
        )

    def granted(self, claim: Claim, backend: Backend | None = None) -> Grant:
        grant = (backend or self.backend).acquire(claim)
        self.assertIsNotNone(grant)
        assert grant is not None
        return grant

    def granted_in_time(self, claim: Claim, seconds: float = 10.0) -> float:
        """Retry until the claim is granted, and return the time of the grant."""
        deadline = time.monotonic() + seconds
        while self.backend.acquire(claim) is None:
            _in_time(time.monotonic(), deadline, "the key did not become free")
            time.sleep(0.01)
        return time.monotonic()

    def needs(self, *capabilities: str) -> None:
        for capability in capabilities:
            if not getattr(self.backend, capability):
                name = type(self.backend).__name__
                raise SkipTest(f"{name} does not have {capability}")

    def needs_positions(self) -> None:
        self.needs("supports_queue")
        if self.engine_queue:
            raise SkipTest("the queue is the engine's")

    # Rules 1 and 2.

    def test_a_free_key_is_granted(self) -> None:
        self.granted(self.claim())

    def test_a_held_key_is_not_granted_and_nobody_waits(self) -> None:
        self.needs("exclusive")
        self.granted(self.claim())
        started = time.monotonic()
        self.assertIsNone(self.backend.acquire(self.claim()))
        _in_time(time.monotonic() - started, 2.0, "acquire() waited")

    def test_keys_are_independent(self) -> None:
        self.granted(self.claim("contract:1"))
        self.granted(self.claim("contract:2"))

    def test_one_of_many_is_granted_a_new_key(self) -> None:
        self.needs("exclusive")
        self.assertEqual(
            len(self.race(lambda: self.backend.acquire(self.claim("contract:new")))), 1
        )

    def test_one_of_many_takes_over_a_stale_key(self) -> None:
        self.needs("exclusive")
        first = self.claim("contract:stale", ttl=0.05)
        self.granted(first)
        while self.backend.renew([first]):
            time.sleep(0.1)
        self.assertEqual(
            len(self.race(lambda: self.backend.acquire(self.claim("contract:stale")))),
            1,
        )

    def race(
        self, acquire: Callable[[], Grant | None], runners: int = 8
    ) -> list[Grant]:
        """Return the grants of threads that start together.

        Each of the ``runners`` threads retries until one of them is granted.
        """
        barrier, grants = threading.Barrier(runners), []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                barrier.wait(30)
                for _ in range(50):
                    if (grant := acquire()) is not None:
                        grants.append(grant)
                    if grants:
                        break
                    time.sleep(0.01)
            except BaseException as error:  # noqa: BLE001 (raised below)
                errors.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=run) for _ in range(runners)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        return grants

    # Rule 3.

    def test_the_same_claim_again_says_yes(self) -> None:
        claim = self.claim()
        first = self.granted(claim)
        self.assertGreaterEqual(self.granted(claim).token, first.token)
        self.assertTrue(self.backend.release(claim))

    def test_releasing_twice_is_harmless(self) -> None:
        claim = self.claim()
        self.granted(claim)
        self.assertTrue(self.backend.release(claim))
        self.backend.release(claim)
        other = self.claim()
        self.granted(other)
        self.backend.release(claim)
        self.assertIn(other.owner, self.backend.renew([other]))

    # Rule 5.

    def test_only_the_owner_releases(self) -> None:
        self.needs("exclusive")
        self.granted(self.claim())
        self.assertFalse(self.backend.release(self.claim()))
        self.assertIsNone(self.backend.acquire(self.claim()))

    def test_only_the_owner_renews_and_recounts(self) -> None:
        self.needs("exclusive")
        self.granted(self.claim())
        stranger = self.claim()
        self.assertEqual(dict(self.backend.renew([stranger])), {})
        self.assertFalse(self.backend.verify([stranger], 2))

    def test_a_released_claim_is_not_renewed(self) -> None:
        self.needs("exclusive")
        claim = self.claim()
        self.granted(claim)
        self.backend.release(claim)
        self.assertEqual(dict(self.backend.renew([claim])), {})
        self.assertFalse(self.backend.verify([claim], 2))

    def test_a_taken_over_claim_changes_nothing_more(self) -> None:
        self.needs("exclusive")
        late = self.claim(ttl=self.ttl)
        self.granted(late)
        successor = self.claim()
        self.granted_in_time(successor)
        self.assertEqual(dict(self.backend.renew([late])), {})
        self.assertFalse(self.backend.verify([late], 1))
        self.assertFalse(self.backend.release(late))
        self.assertIn(successor.owner, self.backend.renew([successor]))

    def test_many_claims_are_renewed_together(self) -> None:
        claims = [self.claim(f"contract:{number}") for number in range(20)]
        for claim in claims:
            self.granted(claim)
        self.backend.release(claims[0])
        left = self.backend.renew(claims)
        self.assertEqual(
            set(left) - {claims[0].owner}, {claim.owner for claim in claims[1:]}
        )
        self.assertTrue(all(0 < seconds <= 30 for seconds in left.values()))

    def test_an_exchanged_claim_has_given_way_to_its_successor(self) -> None:
        self.needs("supports_handover")
        claim, successor = self.claim(), self.claim(ttl=60.0)
        first = self.granted(claim)
        second = self.backend.exchange(claim, successor)
        assert second is not None
        self.assertGreater(second.token, first.token)
        self.needs("exclusive")
        self.assertEqual(set(self.backend.renew([claim, successor])), {successor.owner})
        self.assertFalse(self.backend.release(claim))
        self.assertIsNone(self.backend.acquire(self.claim()))
        self.assertIsNone(self.backend.exchange(claim, self.claim()))
        self.assertTrue(self.backend.release(successor))

    def test_an_exchange_asked_for_again_says_yes_again(self) -> None:
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
        self.assertTrue(self.backend.release(other))
        self.assertIsNone(self.backend.exchange(other, self.claim()))

    def test_of_many_successors_one_is_granted(self) -> None:
        self.needs("supports_handover", "exclusive")
        self.granted(claim := self.claim("contract:exchange"))
        self.assertEqual(
            len(
                self.race(
                    lambda: self.backend.exchange(
                        claim, self.claim("contract:exchange")
                    )
                )
            ),
            1,
        )

    # Rule 7.

    def test_a_silent_holder_keeps_the_key_for_its_ttl_and_no_longer(self) -> None:
        self.needs("exclusive")
        before = time.monotonic()
        self.granted(self.claim(ttl=self.ttl))
        after = time.monotonic()
        taken = self.granted_in_time(self.claim())
        self.assertGreaterEqual(taken - before, self.ttl - 0.002)
        _in_time(taken - after, self.ttl + 2.0, "the key did not become free")

    def test_the_grace_is_waited_for_besides(self) -> None:
        self.needs("exclusive")
        self.backend = self.make_backend(grace=0.4)
        before = time.monotonic()
        self.granted(self.claim(ttl=0.2))
        self.assertGreaterEqual(
            self.granted_in_time(self.claim()) - before, 0.6 - 0.002
        )

    def test_a_renewed_lease_outlives_its_ttl(self) -> None:
        self.needs("exclusive")
        self.assertTrue(self.backend.release(self.kept_by_renewing()))

    def kept_by_renewing(self, **options: Any) -> Claim:
        """Renew a claim for three times its ttl, and return it.

        No other claim may be granted its key in that time.

        If the machine pauses for longer than the ttl, the lease expires. Such an
        attempt is repeated.
        """
        for number in range(20):
            claim = self.claim(f"contract:renewed:{number}", ttl=self.ttl, **options)
            began = asked = time.monotonic()
            self.granted(claim)
            while time.monotonic() - began < 3 * self.ttl:
                before, asked = asked, time.monotonic()
                renewed = self.backend.renew([claim])
                answered = time.monotonic()
                other = self.backend.acquire(self.claim(claim.key))
                if (
                    answered - before >= self.ttl
                    or time.monotonic() - asked >= self.ttl
                ):
                    break
                self.assertIn(claim.owner, renewed)
                self.assertIsNone(other)
                time.sleep(0.02)
            else:
                return claim
        raise AssertionError(
            f"The machine paused for {self.ttl} seconds in each of 20 attempts."
        )

    def test_a_released_key_is_free_at_once(self) -> None:
        for _ in range(5):
            claim = self.claim()
            self.granted(claim)
            self.assertTrue(self.backend.release(claim))

    def test_a_key_can_be_kept_beyond_its_release(self) -> None:
        self.needs("exclusive")
        claim = self.claim()
        self.granted(claim)
        before = time.monotonic()
        self.assertTrue(self.backend.release(claim, keep=0.3))
        self.assertGreaterEqual(
            self.granted_in_time(self.claim()) - before, 0.3 - 0.002
        )

    # Rule 8.

    def test_a_takeover_is_known_to_be_one(self) -> None:
        self.needs("exclusive")
        self.accepted(takeover=False)
        self.granted(self.claim(ttl=0.05))
        deadline = time.monotonic() + 10
        while (grant := self.backend.acquire(claim := self.claim())) is None:
            _in_time(time.monotonic(), deadline, "the key did not become free")
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
            tokens.append(self.granted(claim).token if number % 2 else 0)
            self.backend.release(claim)
        tokens = [token for token in tokens if token]
        self.assertEqual(tokens, sorted(set(tokens)))

    # Several keys in one step: all or none. A backend may always reply that it cannot
    # do this.

    def several(self, **options: Any) -> list[Claim]:
        return [self.claim(f"contract:{number}", **options) for number in range(3)]

    def granted_together(self, claims: Sequence[Claim]) -> Sequence[Grant]:
        grants = self.backend.acquire_all(claims)
        if grants is None:
            raise SkipTest(f"{type(self.backend).__name__} acquires one key at a time")
        return grants

    def test_several_keys_are_granted_and_given_back_together(self) -> None:
        tokens: list[list[int]] = [[], [], []]
        for _ in range(3):
            claims = self.several()
            for number, grant in enumerate(self.granted_together(claims)):
                tokens[number].append(grant.token)
            self.assertTrue(self.backend.verify(claims))
            self.assertEqual(len(self.backend.renew(claims)), 3)
            for claim in claims:
                self.assertIsNone(self.backend.acquire(self.claim(claim.key)))
            self.assertTrue(self.backend.release_all(claims))
            self.assertFalse(self.backend.verify(claims))
        for of_key in tokens:
            self.assertEqual(of_key, sorted(set(of_key)))

    def test_several_keys_asked_for_again_are_granted_again(self) -> None:
        claims = self.several()
        first = self.granted_together(claims)
        again = self.granted_together(claims)
        self.assertTrue(
            all(new.token >= old.token for new, old in zip(again, first, strict=True))
        )

    def test_of_several_keys_none_is_granted_where_one_is_busy(self) -> None:
        self.granted_together(self.several(ttl=0.001))
        self.granted_in_time(self.claim("contract:1"))
        time.sleep(0.01)
        self.assertIsNone(self.backend.acquire_all(self.several()))
        for number in (0, 2):
            self.granted(self.claim(f"contract:{number}"))

    def test_of_several_keys_none_is_given_back_where_one_is_lost(self) -> None:
        claims = self.several()
        self.granted_together(claims)
        self.assertTrue(self.backend.release(claims[1]))
        self.granted(self.claim(claims[1].key))
        self.assertFalse(self.backend.verify(claims))
        self.assertFalse(self.backend.release_all(claims))
        for claim in (claims[0], claims[2]):
            self.assertIsNone(self.backend.acquire(self.claim(claim.key)))
            self.assertTrue(self.backend.release(claim))

    # Inspection.

    def test_the_holder_is_told(self) -> None:
        self.needs("exclusive")
        self.assertIsNone(self.backend.holder("contract:1"))
        claim = self.claim()
        grant = self.granted(claim)
        self.backend.verify([claim], 2)
        holder = self.backend.holder("contract:1")
        assert holder is not None
        self.assertEqual(
            (holder.key, holder.holder, holder.token),
            ("contract:1", "contract", grant.token),
        )
        self.assertEqual(
            (holder.owner_ip, holder.count, holder.stale), ("192.0.2.1", 2, False)
        )
        self.assertTrue(20 < holder.remaining < 30.001)
        self.assertNotIn(claim.owner, f"{holder!r}{holder}{claim!r}")
        self.backend.release(claim)
        self.assertIsNone(self.backend.holder("contract:1"))

    def test_keys_are_compared_byte_for_byte(self) -> None:
        keys = [
            "k",
            "K",
            "k ",
            " k",
            "ḱ",
            "k\u0301",
            "ß",
            "ss",
            "k\t",
            "k%",
            "k_",
            "\U0001f600" * 255,
            "'; DROP TABLE x",
        ]
        for key in keys:
            self.granted(self.claim(key))
        if self.backend.exclusive:
            for key in keys:
                self.assertIsNone(self.backend.acquire(self.claim(key)))

    # The queue.

    def settle(self, key: str) -> None:
        """Wait until a release is complete on all servers of the backend.

        A backend of several servers overrides this.
        """

    def in_line(self, claim: Claim, number: int | None = None) -> Ticket:
        """Add a claim to the queue. It must not be granted yet."""
        place = self.backend.enqueue(claim, "", number)
        assert place is not None
        self.assertIsNone(place.grant)
        return place

    def turn(self, claim: Claim, seconds: float = 10.0) -> Grant:
        """Poll until the claim is granted, as its caller does."""
        deadline = time.monotonic() + seconds
        while True:
            place = self.backend.poll([claim]).get(claim.owner)
            assert place is not None, "the claim is not in the queue"
            if place.grant is not None:
                return place.grant
            _in_time(time.monotonic(), deadline, "the claim was not granted")
            time.sleep(0.01)

    def test_a_release_hands_over_in_the_order_of_arrival(self) -> None:
        self.needs_positions()
        holder, *waiting = (self.claim() for _ in range(4))
        tokens = [self.granted(holder).token]
        for number, claim in enumerate(waiting):
            self.in_line(claim)
            self.assertEqual(self.backend.waiting(claim.key), number + 1)
        self.assertEqual(
            [self.backend.poll([claim])[claim.owner].ahead for claim in waiting],
            [0, 1, 2],
        )
        for claim in waiting:
            self.assertTrue(self.backend.release(holder))
            tokens.append(self.turn(claim).token)
            self.assertIn(claim.owner, self.backend.renew([claim]))
            holder = claim
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertEqual(self.backend.waiting(holder.key), 0)
        self.assertTrue(self.backend.release(holder))
        self.granted(self.claim())

    def test_a_claim_in_line_for_a_free_key_has_its_turn_at_once(self) -> None:
        self.needs_positions()
        claim = self.claim()
        place = self.backend.enqueue(claim)
        assert place is not None
        if place.grant is None:
            # The claim needs no position, since it may acquire the key at once.
            self.assertTrue(place.must_retry)
            self.assertIsNone(place.position)
            self.granted(claim)
        self.assertIn(claim.owner, self.backend.renew([claim]))
        self.assertEqual(self.backend.waiting(claim.key), 0)

    def test_nobody_overtakes_the_line(self) -> None:
        self.needs_positions()
        holder, first, second = self.claim(), self.claim(), self.claim()
        self.granted(holder)
        self.in_line(first)
        self.in_line(second)
        self.backend.release(holder)
        self.assertIsNone(self.backend.acquire(self.claim()))
        self.backend.release(first)
        self.assertIsNone(self.backend.acquire(self.claim()))
        self.assertTrue(self.turn(second))

    def test_standing_in_line_twice_is_one_place(self) -> None:
        self.needs_positions()
        holder, claim = self.claim(), self.claim()
        self.granted(holder)
        for _ in range(3):
            self.in_line(claim)
        self.assertEqual(self.backend.waiting(claim.key), 1)
        self.backend.release(holder)
        grant = self.turn(claim)
        for _ in range(2):
            place = self.backend.enqueue(claim)
            self.assertTrue(
                place is not None and (place.must_retry or place.grant is not None)
            )
        self.assertGreaterEqual(self.granted(claim).token, grant.token)
        self.assertTrue(self.backend.release(claim))
        self.granted(self.claim())

    def test_a_claim_that_is_given_up_leaves_the_line(self) -> None:
        self.needs("supports_queue")
        holder, gone, claim = self.claim(), self.claim(), self.claim()
        self.granted(holder)
        self.in_line(gone)
        self.in_line(claim)
        self.assertFalse(self.backend.release(gone))
        self.assertFalse(self.backend.release(gone))
        if not self.engine_queue:
            self.assertEqual(self.backend.waiting(claim.key), 1)
        self.assertNotIn(gone.owner, self.backend.poll([gone]))
        self.backend.release(holder)
        self.assertTrue(self.turn(claim))

    def test_a_turn_that_is_given_up_is_the_next_one_s(self) -> None:
        self.needs_positions()
        holder, gone, claim = self.claim(), self.claim(), self.claim()
        self.granted(holder)
        self.in_line(gone)
        self.in_line(claim)
        self.backend.release(holder)
        self.assertTrue(self.backend.release(gone))
        self.assertTrue(self.turn(claim))

    def test_a_claim_that_is_not_heard_of_is_passed_over_and_can_have_its_place_back(
        self,
    ) -> None:
        self.needs_positions()
        holder, silent, claim = self.claim(), self.claim(), self.claim()
        self.granted(holder)
        number = self.in_line(silent).position
        self.in_line(claim)
        deadline = time.monotonic() + HEARTBEAT_TIMEOUT + 2.0
        while self.backend.waiting(claim.key) != 1:
            _in_time(time.monotonic(), deadline, "the dead claim still counts")
            self.backend.poll([claim])
            time.sleep(0.1)
        self.backend.release(holder)
        self.turn(claim)
        place = self.backend.poll([silent]).get(silent.owner) or self.in_line(
            silent, number
        )
        self.assertEqual(place.ahead, 0)
        last = self.claim()
        self.in_line(last)
        self.backend.release(claim)
        self.turn(silent)
        self.backend.release(silent)
        self.turn(last)

    def test_a_silent_holder_s_key_goes_to_the_line(self) -> None:
        self.needs("supports_queue")
        holder, claim = self.claim(ttl=self.ttl), self.claim()
        before = time.monotonic()
        token = self.granted(holder).token
        self.in_line(claim)
        self.assertGreater(self.turn(claim).token, token)
        self.assertGreaterEqual(time.monotonic() - before, self.ttl - 0.002)
        self.assertFalse(self.backend.release(holder))

    def test_a_key_that_is_kept_goes_to_the_line_when_that_ends(self) -> None:
        self.needs("supports_queue")
        holder, claim = self.claim(), self.claim()
        self.granted(holder)
        self.in_line(claim)
        before = time.monotonic()
        self.backend.release(holder, keep=0.3)
        self.assertTrue(self.turn(claim))
        self.assertGreaterEqual(time.monotonic() - before, 0.3 - 0.002)

    # Shared holds.

    def shared(self, **options: Any) -> Claim:
        return self.claim(shared=True, **options)

    def test_a_key_is_shared_by_as_many_as_permitted(self) -> None:
        claims = [self.accepted(shared=True, permits=3) for _ in range(3)]
        tokens = [self.granted(claim).token for claim in claims]
        self.assertEqual(tokens, sorted(set(tokens)))
        self.assertIsNone(self.backend.acquire(self.shared(permits=3)))
        self.assertTrue(self.backend.release(claims[1]))
        self.assertGreater(self.granted(self.shared(permits=3)).token, tokens[-1])

    def test_who_shares_and_who_has_it_alone_exclude_each_other(self) -> None:
        self.needs("supports_sharing")
        alone, share = self.claim(), self.shared()
        self.granted(share)
        self.assertIsNone(self.backend.acquire(alone))
        self.assertTrue(self.backend.release(share))
        self.granted(alone)
        self.assertIsNone(self.backend.acquire(share))
        self.assertTrue(self.backend.release(alone))
        self.granted(share)

    def test_a_share_is_held_as_anything_is(self) -> None:
        """A shared hold follows the rules of an exclusive one.

        Its claim can be repeated, only its owner changes it, and it ends after its ttl.
        """
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
        self.assertEqual(dict(self.backend.renew([share])), {})
        self.assertFalse(self.backend.verify([share], 1))
        self.assertFalse(self.backend.release(share))
        self.assertTrue(self.backend.release(alone))

    def test_many_shares_are_renewed_together(self) -> None:
        self.needs("supports_sharing")
        claims = [self.shared(key=f"contract:{number}") for number in range(20)]
        for claim in claims:
            self.granted(claim)
        self.backend.release(claims[0])
        self.assertEqual(
            set(self.backend.renew(claims)), {claim.owner for claim in claims[1:]}
        )

    def test_who_comes_to_share_stands_behind_who_waits_to_have_it_alone(self) -> None:
        self.needs("supports_sharing")
        self.needs_positions()
        reading, writing, later = self.shared(), self.claim(), self.shared()
        self.granted(reading)
        self.in_line(writing)
        self.assertIsNone(self.backend.acquire(later))
        self.in_line(later)
        self.backend.release(reading)
        self.turn(writing)
        self.backend.release(writing)
        self.turn(later)

    def test_those_in_line_who_may_share_are_let_in_together(self) -> None:
        self.needs("supports_sharing", "supports_queue")
        alone, *sharing = self.claim(), self.shared(), self.shared(), self.shared()
        self.granted(alone)
        for claim in sharing:
            self.in_line(claim)
        last = self.claim()
        self.in_line(last)
        self.backend.release(alone)
        tokens = [self.turn(claim).token for claim in sharing]
        self.assertEqual(tokens, sorted(set(tokens)))
        for claim in sharing:
            self.assertIsNone(self.backend.poll([last])[last.owner].grant)
            self.assertTrue(self.backend.release(claim))
        self.assertGreater(self.turn(last).token, tokens[-1])

    # Transactions.

    def in_transaction(
        self, work: Callable[[], Any], *, roll_back: bool = False
    ) -> Any:
        with (
            suppress(_RolledBackError),
            transaction.atomic(using=self.backend.database),
        ):
            result = work()
            if roll_back:
                raise _RolledBackError
            return result

    def test_a_claim_in_a_transaction_is_free_after_its_end(self) -> None:
        self.needs("supports_transactions")
        tokens = []
        for roll_back in (False, True, False):
            self.in_transaction(
                lambda: tokens.append(
                    self.granted(self.claim(scope="transaction")).token
                ),
                roll_back=roll_back,
            )
        claim = self.claim()
        self.granted(claim)
        self.backend.release(claim)
        self.assertLess(tokens[0], tokens[2])

    def test_a_transaction_keeps_everybody_out_and_nobody_waits_for_it(self) -> None:
        self.needs("supports_transactions")
        taken, done = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def hold() -> None:
            self.granted(self.claim(scope="transaction"))
            taken.set()
            done.wait(30)

        def run() -> None:
            try:
                self.in_transaction(hold)
            except BaseException as error:  # noqa: BLE001 (raised below)
                errors.append(error)
            finally:
                taken.set()
                connections.close_all()

        thread = threading.Thread(target=run)
        thread.start()
        self.assertTrue(taken.wait(30))
        if errors:
            raise errors[0]
        try:
            started = time.monotonic()
            self.assertIsNone(self.backend.acquire(self.claim()))
            _in_time(time.monotonic() - started, 2.0, "acquire() waited")
        finally:
            done.set()
            thread.join(60)
        if errors:
            raise errors[0]
        self.granted_in_time(self.claim())


class _RolledBackError(Exception):
    """The exception that rolls back a transaction of the suite."""


def _in_time(now: float, limit: float, late: str) -> None:
    """Raise TimeoutError if ``now`` has reached ``limit``.

    It is not an AssertionError, because a paused machine looks the same as a wrong
    backend.
    """
    if now >= limit:
        raise TimeoutError(f"{late}: {now - limit:.3f} s over the limit")
