"""The rules of the contract of backends about refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from .case import ContractCase

UNUSUAL: list[dict[str, Any]] = [
    {"shared": True},
    {"shared": True, "permits": 3},
    {"takeover": False},
    {"scope": "transaction"},
]


class RefusalRules(ContractCase):
    """The rules of ``refusal()``."""

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
