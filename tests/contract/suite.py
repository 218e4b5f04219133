"""The rules of ``dlocks.backends.base`` as a test suite for every backend."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import SkipTest

from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from dlocks.values import Claim, Grant

from .case import in_time
from .lease_rules import LeaseRules
from .queue_rules import QueueRules

# Claims that a backend may refuse.
UNUSUAL: list[dict[str, Any]] = [
    {"shared": True},
    {"shared": True, "permits": 3},
    {"takeover": False},
    {"scope": "transaction"},
]


class BackendContract(LeaseRules, QueueRules):
    """A test suite for a backend.

    Inherit from it beside a test case class, and implement ``make_backend``:

    .. code-block:: python

        class TestMyBackend(BackendContract, TransactionTestCase):
            def make_backend(self, **options):
                return MyBackend("default", **options)

    Rules about expiring leases take real time: ``ttl`` and ``grace`` are fractions of a
    second.
    """

    def test_a_free_key_is_granted(self) -> None:
        self.held()

    def refused_without_waiting(self) -> None:
        started = time.monotonic()
        self.refused(self.claim())
        in_time(time.monotonic() - started, 2.0, "acquire() waited")

    def test_a_held_key_is_refused_without_waiting(self) -> None:
        self.needs("exclusive")
        self.held()
        self.refused_without_waiting()

    def test_keys_are_independent(self) -> None:
        self.held("contract:1")
        self.held("contract:2")

    def test_one_of_many_is_granted_a_new_key(self) -> None:
        self.needs("exclusive")
        grants = self.race(lambda: self.backend.acquire(self.claim("contract:new")))
        self.assertEqual(len(grants), 1)

    def test_one_of_many_takes_over_a_stale_key(self) -> None:
        self.needs("exclusive")
        first = self.held("contract:stale", ttl=0.05)
        while self.backend.renew([first]):
            time.sleep(0.1)
        grants = self.race(lambda: self.backend.acquire(self.claim("contract:stale")))
        self.assertEqual(len(grants), 1)

    # Several keys in one step: all or none. A backend may always reply that it cannot
    # do this.

    def several(self, **options: Any) -> list[Claim]:
        return [self.claim(f"contract:{number}", **options) for number in range(3)]

    def granted_together(self, claims: Sequence[Claim]) -> Sequence[Grant]:
        grants = self.backend.acquire_all(claims)
        if grants is None:
            raise SkipTest(f"{type(self.backend).__name__} acquires one key at a time")
        return grants

    def test_several_keys_are_acquired_and_released_together(self) -> None:
        tokens: list[list[int]] = [[], [], []]
        for _ in range(3):
            claims = self.several()
            for number, grant in enumerate(self.granted_together(claims)):
                tokens[number].append(grant.token)
            self.assertTrue(self.backend.verify(claims))
            self.assertEqual(len(self.backend.renew(claims)), 3)
            for claim in claims:
                self.refused(self.claim(claim.key))
            self.assertTrue(self.backend.release_all(claims))
            self.assertFalse(self.backend.verify(claims))
        for of_key in tokens:
            self.assertEqual(of_key, sorted(set(of_key)))

    def test_several_keys_can_be_acquired_again(self) -> None:
        claims = self.several()
        first = self.granted_together(claims)
        again = self.granted_together(claims)
        self.assertTrue(
            all(new.token >= old.token for new, old in zip(again, first, strict=True))
        )

    def test_no_key_is_granted_if_one_of_several_is_busy(self) -> None:
        self.granted_together(self.several(ttl=0.001))
        self.granted_in_time(self.claim("contract:1"))
        time.sleep(0.01)
        self.assertIsNone(self.backend.acquire_all(self.several()))
        for number in (0, 2):
            self.held(f"contract:{number}")

    def test_no_free_key_is_granted_if_one_of_several_is_busy(self) -> None:
        claims = self.several()
        self.granted_together(claims)
        self.assertTrue(self.backend.release_all(claims))
        self.held("contract:1")
        self.assertIsNone(self.backend.acquire_all(self.several()))
        for number in (0, 2):
            self.held(f"contract:{number}")

    def test_no_key_is_released_if_one_of_several_is_lost(self) -> None:
        claims = self.several()
        self.granted_together(claims)
        self.released(claims[1])
        self.held(claims[1].key)
        self.assertFalse(self.backend.verify(claims))
        self.assertFalse(self.backend.release_all(claims))
        for claim in (claims[0], claims[2]):
            self.refused(self.claim(claim.key))
            self.released(claim)

    # Inspection.

    def test_the_holder_is_reported(self) -> None:
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
            self.held(key)
        if self.backend.exclusive:
            for key in keys:
                self.refused(self.claim(key))

    # Transactions.

    def test_a_claim_in_a_transaction_is_free_after_its_end(self) -> None:
        self.needs("supports_transactions")
        tokens = []
        for roll_back in (False, True, False):
            with transaction.atomic(using=self.backend.database):
                tokens.append(self.granted(self.claim(scope="transaction")).token)
                transaction.set_rollback(roll_back, using=self.backend.database)
        self.backend.release(self.held())
        self.assertLess(tokens[0], tokens[2])

    def test_a_transaction_excludes_others_without_waiting(self) -> None:
        self.needs("supports_transactions")
        taken, done = threading.Event(), threading.Event()

        def run() -> None:
            try:
                with transaction.atomic(using=self.backend.database):
                    self.held(scope="transaction")
                    taken.set()
                    done.wait(30)
            finally:
                taken.set()
                connections.close_all()

        with ThreadPoolExecutor() as pool:
            holding = pool.submit(run)
            self.assertTrue(taken.wait(30))
            try:
                self.refused_without_waiting()
            finally:
                done.set()
                holding.result()
        self.granted_in_time(self.claim())

    # Refusals.

    @contextmanager
    def without_a_query(self) -> Iterator[None]:
        if not self.backend.database:
            yield
            return
        with CaptureQueriesContext(connections[self.backend.database]) as queries:
            yield
        self.assertEqual(len(queries), 0)

    def test_a_refusal_is_a_sentence_without_a_query(self) -> None:
        # The first claim may have to find out what kind of server this is.
        self.assertIsNone(self.backend.refusal(self.claim()))
        for number, options in enumerate(UNUSUAL):
            claim = self.claim(f"contract:{number}", **options)
            with self.without_a_query():
                why = self.backend.refusal(claim)
            if why is not None:
                self.assertRegex(why, r"^[A-Za-z].* .*\.$")
                continue
            self.assertIsNotNone(self.backend.acquire(claim), options)
            self.assertTrue(self.backend.release(claim), options)

    def test_transaction_scope_requires_a_transaction(self) -> None:
        claim = self.claim(scope="transaction")
        self.assertIsNotNone(self.backend.refusal(claim))
        if self.backend.supports_transactions:
            with transaction.atomic(using=self.backend.database):
                self.assertIsNone(self.backend.refusal(claim))
