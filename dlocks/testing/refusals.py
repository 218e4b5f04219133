"""The rules of ``refusal()``, as a part of the contract of backends."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import SkipTest, TestCase

from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from dlocks.backends.base import BaseBackend
from dlocks.values import Claim


class RefusalContract(TestCase):
    """The rules of ``refusal()``. ``BackendContract`` includes them."""

    backend: BaseBackend

    def claim(self, key: str = "contract:1", **options: Any) -> Claim:
        raise NotImplementedError

    def accepted(self, **options: Any) -> Claim:
        """Return a claim with these options, or skip the test if it is refused."""
        claim = self.claim(**options)
        if (why := self.backend.refusal(claim)) is not None:
            raise SkipTest(why)
        return claim

    def test_an_ordinary_claim_is_not_refused(self) -> None:
        self.assertIsNone(self.backend.refusal(self.claim()))

    def test_a_refusal_is_a_sentence_and_sends_no_query(self) -> None:
        database = self.backend.database
        # The first access may look up what kind of server this is.
        self.backend.refusal(self.claim())
        with (
            CaptureQueriesContext(connections[database])
            if database
            else nullcontext(())
        ) as queries:
            for options in UNUSUAL:
                why = self.backend.refusal(self.claim(**options))
                if why is not None:
                    self.assertRegex(why, r"(?s)^[A-Za-z].* .*\.$")
        self.assertEqual(len(queries), 0)

    def test_a_claim_is_granted_unless_it_is_refused(self) -> None:
        for number, options in enumerate(UNUSUAL):
            claim = self.claim(f"contract:{number}", **options)
            if self.backend.refusal(claim) is None:
                self.assertIsNotNone(self.backend.acquire(claim), options)
                self.assertTrue(self.backend.release(claim), options)

    def test_a_claim_in_a_transaction_is_refused_without_a_transaction(self) -> None:
        claim = self.claim(scope="transaction")
        self.assertIsNotNone(self.backend.refusal(claim))
        if self.backend.supports_transactions:
            with transaction.atomic(using=self.backend.database):
                self.assertIsNone(self.backend.refusal(claim))


# The options of claims that some backends refuse.
UNUSUAL: list[dict[str, Any]] = [
    {"shared": True},
    {"shared": True, "permits": 3},
    {"takeover": False},
    {"scope": "transaction"},
    {"scope": "transaction", "shared": True},
]
