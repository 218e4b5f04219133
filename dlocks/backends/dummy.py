"""Locks that are always granted, for tests and development."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from django.utils.translation import gettext_lazy

from dlocks.backends.base import Backend
from dlocks.values import Claim, Grant, Holder


class DummyBackend(Backend):
    """A backend that grants every claim at once and excludes no caller."""

    exclusive: ClassVar[bool] = False
    supports_handover: ClassVar[bool] = True
    unlisted = gettext_lazy("It grants every claim, so there are no locks.")

    def __init__(self, alias: str, **options: Any) -> None:
        super().__init__(alias, **options)
        self._tokens = itertools.count(time.time_ns() // 1000)

    def acquire(self, claim: Claim) -> Grant | None:
        return Grant(next(self._tokens))

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        return {claim.owner: claim.ttl for claim in claims}

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        return True

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        return True

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        return Grant(next(self._tokens))

    def holder(self, key: str) -> Holder | None:
        return None
