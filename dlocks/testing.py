"""The rules of ``dlocks.backends.base`` as a suite, for every backend: ours and third parties'."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar
from unittest import SkipTest, TestCase

from django.db import connections, transaction

from dlocks.backends.base import BaseBackend, Claim, Grant


class BackendContract(TestCase):
    """
    Inherit from this beside a test case class, and say how to make the backend:

    .. code-block:: python

        class TestMyBackend(BackendContract, TransactionTestCase):
            def make_backend(self, **options):
                return MyBackend("default", **options)

    Where a rule is about a lease that runs out, real time passes: ``ttl`` and ``grace`` are fractions of a second.
    """

    __test__ = False

    ttl: ClassVar[float] = 0.4

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = "make_backend" in dir(cls) and cls.make_backend is not BackendContract.make_backend

    def make_backend(self, **options: Any) -> BaseBackend:
        """Return a backend whose keys nobody else uses now."""
        raise NotImplementedError

    def setUp(self) -> None:
        super().setUp()
        self.backend = self.make_backend(grace=0.0)

    def claim(self, key: str = "contract:1", **options: Any) -> Claim:
        return Claim(key=key, **{"ttl": 30.0, "holder": "contract", "owner_ip": "192.0.2.1", **options})

    def granted(self, claim: Claim, backend: BaseBackend | None = None) -> Grant:
        grant = (backend or self.backend).acquire(claim)
        self.assertIsNotNone(grant)
        assert grant is not None
        return grant

    def granted_in_time(self, claim: Claim, seconds: float = 10.0) -> float:
        """Try until the claim is granted; return when that was."""
        deadline = time.monotonic() + seconds
        while self.backend.acquire(claim) is None:
            self.assertLess(time.monotonic(), deadline, "the key did not become free")
            time.sleep(0.01)
        return time.monotonic()

    def needs(self, capability: str) -> None:
        if not getattr(self.backend, capability):
            raise SkipTest(f"{type(self.backend).__name__} does not have {capability}")

    # Rules 1 and 2.

    def test_a_free_key_is_granted(self) -> None:
        self.granted(self.claim())

    def test_a_held_key_is_not_granted_and_nobody_waits(self) -> None:
        self.needs("exclusive")
        self.granted(self.claim())
        started = time.monotonic()
        self.assertIsNone(self.backend.acquire(self.claim()))
        self.assertLess(time.monotonic() - started, 2.0)

    def test_keys_are_independent(self) -> None:
        self.granted(self.claim("contract:1"))
        self.granted(self.claim("contract:2"))

    def test_one_of_many_is_granted_a_new_key(self) -> None:
        self.needs("exclusive")
        self.assertEqual(len(self.race(lambda: self.backend.acquire(self.claim("contract:new")))), 1)

    def test_one_of_many_takes_over_a_stale_key(self) -> None:
        self.needs("exclusive")
        first = self.claim("contract:stale", ttl=0.05)
        self.granted(first)
        while self.backend.renew([first]):
            time.sleep(0.1)
        self.assertEqual(len(self.race(lambda: self.backend.acquire(self.claim("contract:stale")))), 1)

    def race(self, acquire: Callable[[], Grant | None], runners: int = 8) -> list[Grant]:
        """Return the grants of so many threads that start together and each go on until somebody was granted."""
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
        self.assertFalse(self.backend.recount(stranger, 2))

    def test_a_released_claim_is_not_renewed(self) -> None:
        self.needs("exclusive")
        claim = self.claim()
        self.granted(claim)
        self.backend.release(claim)
        self.assertEqual(dict(self.backend.renew([claim])), {})
        self.assertFalse(self.backend.recount(claim, 2))

    def test_a_taken_over_claim_changes_nothing_more(self) -> None:
        self.needs("exclusive")
        late = self.claim(ttl=self.ttl)
        self.granted(late)
        successor = self.claim()
        self.granted_in_time(successor)
        self.assertEqual(dict(self.backend.renew([late])), {})
        self.assertFalse(self.backend.recount(late, 1))
        self.assertFalse(self.backend.release(late))
        self.assertIn(successor.owner, self.backend.renew([successor]))

    def test_many_claims_are_renewed_together(self) -> None:
        claims = [self.claim(f"contract:{number}") for number in range(20)]
        for claim in claims:
            self.granted(claim)
        self.backend.release(claims[0])
        left = self.backend.renew(claims)
        self.assertEqual(set(left) - {claims[0].owner}, {claim.owner for claim in claims[1:]})
        self.assertTrue(all(0 < seconds <= 30 for seconds in left.values()))

    # Rule 7.

    def test_a_silent_holder_keeps_the_key_for_its_ttl_and_no_longer(self) -> None:
        self.needs("exclusive")
        before = time.monotonic()
        self.granted(self.claim(ttl=self.ttl))
        after = time.monotonic()
        taken = self.granted_in_time(self.claim())
        self.assertGreaterEqual(taken - before, self.ttl - 0.002)
        self.assertLess(taken - after, self.ttl + 2.0)

    def test_the_grace_is_waited_for_besides(self) -> None:
        self.needs("exclusive")
        self.backend = self.make_backend(grace=0.4)
        before = time.monotonic()
        self.granted(self.claim(ttl=0.2))
        self.assertGreaterEqual(self.granted_in_time(self.claim()) - before, 0.6 - 0.002)

    def test_a_renewed_lease_outlives_its_ttl(self) -> None:
        self.needs("exclusive")
        claim = self.claim(ttl=self.ttl)
        before = time.monotonic()
        self.granted(claim)
        while time.monotonic() - before < 3 * self.ttl:
            self.assertIn(claim.owner, self.backend.renew([claim]))
            self.assertIsNone(self.backend.acquire(self.claim()))
            time.sleep(0.02)
        self.assertTrue(self.backend.release(claim))

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
        self.assertGreaterEqual(self.granted_in_time(self.claim()) - before, 0.3 - 0.002)

    # Rule 8.

    def test_tokens_strictly_increase(self) -> None:
        tokens = []
        for number in range(10):
            claim = self.claim(ttl=0.001 if number % 3 == 0 else 30.0)
            self.granted_in_time(claim)
            tokens.append(self.granted(claim).token if number % 2 else 0)
            self.backend.release(claim)
        tokens = [token for token in tokens if token]
        self.assertEqual(tokens, sorted(set(tokens)))

    # Seeing.

    def test_the_holder_is_told(self) -> None:
        self.needs("exclusive")
        self.assertIsNone(self.backend.holder("contract:1"))
        claim = self.claim()
        grant = self.granted(claim)
        self.backend.recount(claim, 2)
        holder = self.backend.holder("contract:1")
        assert holder is not None
        self.assertEqual((holder.key, holder.holder, holder.token), ("contract:1", "contract", grant.token))
        self.assertEqual((holder.owner_ip, holder.count, holder.stale), ("192.0.2.1", 2, False))
        self.assertTrue(29 < holder.remaining < 30.001)
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

    # Transactions.

    def in_transaction(self, work: Callable[[], Any], *, roll_back: bool = False) -> Any:
        with suppress(_RolledBackError), transaction.atomic(using=self.backend.database):  # type: ignore[attr-defined]
            result = work()
            if roll_back:
                raise _RolledBackError
            return result

    def test_a_claim_in_a_transaction_is_free_after_its_end(self) -> None:
        self.needs("supports_transactions")
        tokens = []
        for roll_back in (False, True, False):
            self.in_transaction(
                lambda: tokens.append(self.granted(self.claim(scope="transaction")).token), roll_back=roll_back
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
            self.assertLess(time.monotonic() - started, 2.0)
        finally:
            done.set()
            thread.join(60)
        if errors:
            raise errors[0]
        self.granted_in_time(self.claim())


class _RolledBackError(Exception):
    """Ends a transaction of the suite."""
