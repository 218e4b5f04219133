"""
The narrow waist: what the front asks of a backend, and the values that cross.

A backend is where the truth about locks lives. These rules bind every one of them; ``dlocks.testing.BackendContract``
has them as tests:

1. ``acquire()`` never waits for another holder.
2. At most one live hold per key.
3. Acquiring again with the same claim says yes, so a lost reply is harmless. So is releasing twice.
4. ``None`` means that somebody else has it. Every other trouble raises.
5. ``renew()``, ``recount()`` and ``release()`` act only for the owner they name; otherwise they change nothing and
   say so.
6. The front announces every claim that it gives up without knowing what became of it, by ``release()``.
7. A claim not renewed for its ttl, by the backend's own clock, is free; never sooner. Every change is committed when
   the caller learns of it (in transaction scope: with the caller's transaction).
8. Tokens of one key strictly increase for ever.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

T = TypeVar("T")

Scope = Literal["lease", "transaction"]

KEY_LENGTH = 255


def new_owner() -> str:
    """Return 128 random bits in hexadecimal: the capability of one claim, never to be shown whole."""
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One attempt to hold a key; after the grant, the proof of holding it. ``key`` has the prefix already."""

    key: str
    ttl: float
    scope: Scope = "lease"
    takeover: bool = True
    holder: str = ""
    owner_ip: str | None = None
    owner: str = field(default_factory=new_owner, repr=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """A claim was granted: ``token`` is larger than that of every earlier grant of the key."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A snapshot of who has a key, for people to read; ``remaining`` seconds are below zero when it is stale."""

    key: str
    holder: str
    owner_ip: str | None
    since: datetime | None
    remaining: float
    token: int
    count: int
    stale: bool

    def __str__(self) -> str:
        who = self.holder or "an unknown holder"
        if self.owner_ip:
            who += f" ({self.owner_ip})"
        if self.since is not None:
            who += f" since {self.since:%H:%M:%S}"
        if self.stale:
            return f"{who}, which ran out {-self.remaining:.1f} s ago"
        return f"{who}, {self.remaining:.1f} s left"


class BaseBackend:
    """
    Base class of the backends. ``DLOCKS[alias]["OPTIONS"]`` are the keywords of the constructor.

    ``prefix`` stands before every key. ``ttl``, ``timeout`` and ``grace`` are seconds: how long a lease outlives a
    silent holder, how long a caller waits unless it says otherwise (``None``: for ever), and how much longer than its
    ttl a lease that ran out is left alone, for a clock that steps.
    """

    # Whether two claims of one key exclude each other.
    exclusive: ClassVar[bool] = True
    # Whether a hold can belong to the caller's transaction and end with it.
    supports_transactions: ClassVar[bool] = False
    # Whether people can be shown, and can clear, what is held.
    supports_clearing: ClassVar[bool] = False

    def __init__(
        self,
        alias: str,
        *,
        prefix: str = "",
        ttl: float = 30.0,
        timeout: float | None = 10.0,
        grace: float = 0.5,
    ) -> None:
        if not isinstance(prefix, str) or "\0" in prefix or len(prefix) >= KEY_LENGTH:
            raise ValueError(f"prefix must be a string of fewer than {KEY_LENGTH} characters without NUL")
        self.alias = alias
        self.prefix = prefix
        self.ttl = seconds("ttl", ttl, above_zero=True)
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.grace = seconds("grace", grace)

    @property
    def identity(self) -> str:
        """Return what two aliases have in common whose keys are the same keys."""
        return self.alias

    def outside(self, function: Callable[[], T]) -> T:
        """Call a function where no transaction of the caller's is open; the front puts its keeper here."""
        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(function).result()
            finally:
                pool.submit(self.close).result()

    def acquire(self, claim: Claim) -> Grant | None:
        """Grant the claim, or return None when somebody else has its key; never wait."""
        raise NotImplementedError

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        """
        Extend each claim to its ttl from now.

        Return the seconds left, counted from when this was called, by owner. An owner that is missing has lost its
        hold; one that could not be extended just now is there with what it has left.
        """
        raise NotImplementedError

    def recount(self, claim: Claim, count: int) -> bool:
        """Write how often the holder has entered; return whether the claim is still held."""
        raise NotImplementedError

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        """
        Give the key back, or give up a claim that may have been granted.

        ``keep`` seconds from now on the key stays taken. Return False when the claim no longer had the key.
        """
        raise NotImplementedError

    def holder(self, key: str) -> Holder | None:
        """Return who has the key (with its prefix), a stale holder too, or None when it is free."""
        raise NotImplementedError

    def in_transaction(self) -> bool:
        """Return whether a statement of this backend, made here and now, would be part of a caller's transaction."""
        return False

    def transaction_refused(self) -> str | None:
        """Return why a hold cannot belong to the transaction where the caller stands, or None."""
        return None

    def lease_refused(self) -> str | None:
        """Return why a lease cannot be taken from inside the transaction where the caller stands, or None."""
        return None

    def close(self) -> None:
        """Close what this thread holds open for the backend."""

    def check(self) -> list[Any]:
        """Return Django's check messages about this alias."""
        return []


def seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    """Return ``value`` as a float of seconds, or say by name why it cannot be one."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {type(value).__name__}")
    if not 0 <= value <= LONGEST or (above_zero and value == 0):
        bound = "above 0" if above_zero else "0 or more"
        raise ValueError(f"{name} must be {bound} and at most {LONGEST:.0f} seconds, not {value!r}")
    return float(value)


# Ten years. A lease beyond it is a mistake, and every engine's arithmetic of time still holds it.
LONGEST = 10 * 365 * 86400.0
