"""The values that backends take and return, and the check of durations."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import TIMEOUT_MAX
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from dlocks.text import duration, shown_address, shown_holder

Scope = Literal["lease", "transaction"]

# A number of seconds, or a timedelta. ``seconds()`` checks and converts it.
Duration = float | timedelta

KEY_LENGTH = 255

# Ten years in seconds. A longer lease is a mistake, and this one is within the time
# arithmetic of every engine.
LONGEST = 10 * 365 * 86400.0
# Seconds of the longest wait. Code for ``threading.Lock`` may pass this maximum.
LONGEST_WAIT = max(LONGEST, TIMEOUT_MAX)

# The permits of a shared claim without a limit.
UNLIMITED = 2**31 - 1


def new_owner() -> str:
    """Return 128 random bits in hexadecimal, the secret identity of a claim.

    Never show it in full.
    """
    return os.urandom(16).hex()


class HeldKey(NamedTuple):
    """A key that a waiting caller holds, and the owner of that hold.

    ``kept`` is true if an open transaction keeps the key. The owner may then be empty.
    """

    key: str
    owner: str
    kept: bool = False

    def __repr__(self) -> str:
        return f"HeldKey(key={self.key!r}, kept={self.kept!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One attempt to acquire a key; after the grant, the proof of the hold.

    ``key`` includes the prefix. A claim is exclusive or ``shared``. Up to ``permits``
    shared claims, including this one, may hold the key at a time, as long as no
    exclusive claim holds it. ``ttl`` is in seconds.
    """

    key: str
    ttl: float
    scope: Scope = "lease"
    takeover: bool = True
    # Whether it queues behind earlier waiters.
    fair: bool = True
    # Whether other claims may share the key, and the number of permits.
    shared: bool = False
    permits: int = UNLIMITED
    # Whether it is renewed after its lease has expired, if no other caller has acquired
    # the key since.
    late: bool = False
    # The owner of the same caller's exclusive hold. A shared claim is granted in
    # addition to that hold.
    beside: str = field(default="", repr=False)
    holder: str = ""
    owner_ip: str | None = None
    owner: str = field(default_factory=new_owner, repr=False)
    # Whether it may have a place in the queue, which has to end with its grant.
    queued: bool = False
    # What its caller holds while it waits, to detect deadlocks.
    holding: tuple[HeldKey, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingClaim:
    """A queued claim of a caller that holds other keys, as other processes see it.

    ``waited`` is in seconds, and ``silent`` is the number of seconds since its last
    heartbeat.
    """

    position: int
    owner: str = field(repr=False)
    holder: str
    owner_ip: str | None
    key: str
    waited: float
    silent: float
    holding: tuple[HeldKey, ...]
    permits: int
    # Whether all holds of the key have to end before the claim is granted.
    needs_all: bool
    # The owners of the live exclusive hold and of the live shared holds of the key.
    held_by: str | None = field(repr=False)
    shared_by: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """The result of a claim that was granted.

    ``token`` is larger than the token of every earlier grant of the key. ``lease`` is
    in seconds from when the request was sent; ``None`` stands for the claim's ttl.
    ``takeover`` is true if the previous holder never released the key. It may be false
    all the same if another process has granted the key to a queued claim.
    """

    token: int
    lease: float | None = None
    takeover: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The ticket of a claim in the queue.

    Either the claim has a ``grant``, or it has to be acquired again (``must_retry``),
    or ``ahead`` other claims come first. ``next_check`` is the number of seconds after
    which the passing of time alone may change the result. With its ``position``, a
    claim that was skipped can rejoin the queue. It is 0 if its turn has come.
    """

    grant: Grant | None = None
    must_retry: bool = False
    ahead: int = 0
    next_check: float = math.inf
    position: int | None = None
    # Whether the key may become free without a notification.
    unnotified: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A snapshot of the holder of a key, for people to read.

    ``remaining`` is in seconds, and negative for a stale hold. The text of a holder
    respects the setting ``DLOCKS_SHOW_HOLDER``, so it may be shown to any user. The
    attributes contain everything.

    A value that the backend does not know is ``None`` for ``since``, infinite for
    ``remaining``, and 0 for ``token``. While a writer also reads, a database shows both
    of its holds with the token of the read lock. ``in_transaction`` is true if an open
    transaction keeps the key, without a lease or after it has expired. Without a lease,
    ``holder`` names the database session, or is empty if it is not known.
    """

    key: str
    holder: str
    owner_ip: str | None
    since: datetime | None = None
    remaining: float = math.inf
    token: int = 0
    count: int = 1
    stale: bool = False
    in_transaction: bool = False

    def __str__(self) -> str:
        who = _shown(self)
        if self.in_transaction and not self.holder:
            return "an open transaction"
        if self.since is not None:
            held = datetime.now(self.since.tzinfo) - self.since
            who += f" for {duration(max(0.0, held.total_seconds()))}"
        if self.in_transaction:
            return f"{who}, in a transaction"
        if self.remaining == math.inf:
            return who
        if self.stale:
            return f"{who}, its lease expired {duration(-self.remaining)} ago"
        return f"{who}, {duration(self.remaining)} left on its lease"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiter:
    """A snapshot of a caller that waits for a key, for people to read.

    ``waits_for`` is the key. ``holds`` are keys that the caller holds meanwhile, as far
    as the backend knows. Both are without the prefix. ``waited`` is in seconds. The
    text respects the setting ``DLOCKS_SHOW_HOLDER``.
    """

    holder: str
    owner_ip: str | None
    holds: tuple[str, ...] = ()
    waits_for: str
    waited: float
    shared: bool = False

    def __str__(self) -> str:
        who = _shown(self)
        if self.holds:
            who += f" holds {' and '.join(map(repr, self.holds))} and"
        return f"{who} has waited for {self.waits_for!r} for {duration(self.waited)}"


def _shown(caller: Holder | Waiter) -> str:
    who = shown_holder(caller.holder) or "an unknown holder"
    ip = shown_address(caller.owner_ip)
    return f"{who} ({ip})" if ip else who


class Kept(NamedTuple):
    """What open transactions keep.

    Exclusive expired leases are given by key, shared ones by the id of the claim. Keys
    without a lease have the session that keeps them.
    """

    keys: frozenset[str] = frozenset()
    shares: frozenset[int] = frozenset()
    transactions: Mapping[str, Holder] = MappingProxyType({})


def seconds(
    name: str, value: Any, *, above_zero: bool = False, longest: float = LONGEST
) -> float:
    """Return a number or ``timedelta`` as seconds, or raise an error with ``name``."""
    value = in_seconds(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(
            f"{name} must be a number of seconds or a timedelta, not"
            f" {type(value).__name__}"
        )
    if not 0 <= value <= longest or (above_zero and value == 0):
        bound = "above 0" if above_zero else "0 or more"
        raise ValueError(
            f"{name} must be {bound} and at most {longest:.0f} seconds, not {value!r}"
        )
    return float(value)


def check_prefix(prefix: object) -> None:
    """Raise ValueError if keys cannot start with this prefix."""
    if not isinstance(prefix, str) or "\0" in prefix or len(prefix) >= KEY_LENGTH:
        raise ValueError(
            f"prefix must be a string of fewer than {KEY_LENGTH} characters without NUL"
        )


def check_count(name: str, value: object, kind: str = "an int") -> None:
    """Raise TypeError or ValueError unless a value is an int of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {kind}, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, not {value}")


def in_seconds(duration: Any) -> Any:
    """Return the seconds of a ``timedelta``, and any other value unchanged."""
    return duration.total_seconds() if isinstance(duration, timedelta) else duration
