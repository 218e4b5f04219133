"""What all rules of the contract of backends need: claims, grants and time limits."""

from __future__ import annotations

import time
from typing import Any, ClassVar
from unittest import SkipTest, TestCase

from dlocks.backends.base import Backend
from dlocks.values import Claim, Grant


class ContractCase(TestCase):
    """The helpers of the rules."""

    __test__ = False

    ttl: ClassVar[float] = 0.4

    # Whether the queue is the engine's. Then the backend knows no positions, and cannot
    # skip a waiter without a heartbeat.
    engine_queue: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__test__ = (
            "make_backend" in dir(cls)
            and cls.make_backend is not ContractCase.make_backend
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

    def granted(self, claim: Claim) -> Grant:
        grant = self.backend.acquire(claim)
        self.assertIsNotNone(grant)
        assert grant is not None
        return grant

    def refused(self, claim: Claim) -> None:
        self.assertIsNone(self.backend.acquire(claim))

    def released(self, claim: Claim) -> None:
        self.assertTrue(self.backend.release(claim))

    def lost(self, claim: Claim) -> None:
        self.assertEqual(dict(self.backend.renew([claim])), {})
        self.assertFalse(self.backend.verify([claim], 2))

    def held(self, *args: Any, **options: Any) -> Claim:
        """Acquire a key, and return the claim."""
        claim = self.claim(*args, **options)
        self.granted(claim)
        return claim

    def granted_in_time(self, claim: Claim) -> float:
        """Retry until the claim is granted, and return the time of the grant."""
        deadline = time.monotonic() + 10
        while self.backend.acquire(claim) is None:
            in_time(time.monotonic(), deadline, "the key did not become free")
            time.sleep(0.01)
        return time.monotonic()

    def accepted(self, **options: Any) -> Claim:
        """Return a claim with these options, or skip the test if it is refused."""
        claim = self.claim(**options)
        if (why := self.backend.refusal(claim)) is not None:
            raise SkipTest(why)
        return claim

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

    def settle(self, key: str) -> None:
        """Wait until a release is complete on all servers of the backend.

        A backend of several servers overrides this.
        """

    def needs(self, *capabilities: str) -> None:
        for capability in capabilities:
            if not getattr(self.backend, capability):
                name = type(self.backend).__name__
                raise SkipTest(f"{name} does not have {capability}")

    def needs_positions(self) -> None:
        self.needs("supports_queue")
        if self.engine_queue:
            raise SkipTest("the queue is the engine's")


def in_time(now: float, limit: float, late: str) -> None:
    """Raise TimeoutError if ``now`` has reached ``limit``.

    It is not an AssertionError, because a paused machine looks the same as a wrong
    backend.
    """
    if now >= limit:
        raise TimeoutError(f"{late}: {now - limit:.3f} s over the limit")
