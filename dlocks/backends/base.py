"""
The narrow waist: what the front asks of a backend, and the values that cross.

A backend is where the truth about locks lives. These rules bind every one of them; ``dlocks.testing.BackendContract``
has them as tests:

1. ``acquire()`` never waits for another holder.
2. At most one live hold per key.
3. Acquiring again with the same claim says yes, so a lost reply is harmless. So is releasing twice.
4. ``None`` means that somebody else has it. Every other trouble raises.
5. ``renew()``, ``recount()``, ``release()`` and ``exchange()`` act only for the owner they name; otherwise they
   change nothing and say so.
6. The front announces every claim that it gives up without knowing what became of it, by ``release()``.
7. A claim not renewed for its ttl, by the backend's own clock, is free; never sooner. Every change is committed when
   the caller learns of it (in transaction scope: with the caller's transaction).
8. Tokens of one key strictly increase for ever.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Literal, TypeVar

from django.utils import timezone

from dlocks import privacy

T = TypeVar("T")

Scope = Literal["lease", "transaction"]

KEY_LENGTH = 255

# More than anybody shares a key with.
UNLIMITED = 2**31 - 1

# For so many seconds a claim in line counts without being heard from, ...
HEARD_FOR = 2.0
# ... and for so many a key is kept for the claim whose turn it is.
KEPT_FOR = 1.5


def new_owner() -> str:
    """Return 128 random bits in hexadecimal: the capability of one claim, never to be shown whole."""
    return os.urandom(16).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """
    One attempt to hold a key, and its place in line; after the grant, the proof of holding it.

    ``key`` has the prefix already. A claim is exclusive, or it is ``shared``: then up to ``permits`` may hold the key
    at a time, this one counted, as long as nobody holds it exclusively.
    """

    key: str
    ttl: float
    scope: Scope = "lease"
    takeover: bool = True
    # Whether it goes behind those that wait already.
    fair: bool = True
    # Whether others may share the key, and how many altogether.
    shared: bool = False
    permits: int = UNLIMITED
    # The owner of the same caller's exclusive hold, beside which a shared claim is granted.
    beside: str = field(default="", repr=False)
    holder: str = ""
    owner_ip: str | None = None
    owner: str = field(default_factory=new_owner, repr=False)


@dataclass(frozen=True, slots=True)
class Grant:
    """
    A claim was granted: ``token`` is larger than that of every earlier grant of the key.

    ``lease`` is for how many seconds from when the question was sent, where it is not for the claim's ttl.
    ``takeover`` says that the last holder never came back.
    """

    token: int
    lease: float | None = None
    takeover: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """
    How a claim in line stands: granted; or it should ask again by itself; or so many are ``ahead`` of it.

    ``soon`` is in how many seconds something may change by the clock alone. ``clock`` is the backend's own, in
    seconds, when it answered, and ``number`` what gives the place back to a claim that was passed over: 0 where its
    turn has come.
    """

    grant: Grant | None = None
    ask: bool = False
    ahead: int = 0
    soon: float = math.inf
    clock: float = 0.0
    number: int | None = None
    # Whether the key may become free without anybody being told.
    silent: bool = False
    # Whether the caller's own thread can wait for the turn, by ``wait()``, and nobody else needs to look.
    here: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """
    What a listening process is told: a claim was granted until a moment on the backend's clock; or a key is free.

    Without a token the claim has to ask.
    """

    owner: str = ""
    token: int | None = None
    ends: float = 0.0
    free: str = ""


class Listener:
    """
    A connection on which a process is told what becomes of its claims in line.

    One that ``asks`` the server hears only while it waits, and only what becomes of the claims that it waits for. Its
    connection is for nothing else then.
    """

    asks: ClassVar[bool] = False
    # The name under which it is told, where that is not the one it was to listen on.
    channel: str = ""
    # Whether every grant is told here; otherwise one has to look all the same.
    hears_all: bool = True
    # Another one, with which a thread of its own waits meanwhile; or this one itself, with which no other does.
    beside: Listener | None = None
    # To be had by the thread that waits with it, or asks on its connection; None where only one thread ever does.
    ears: threading.RLock | None = None

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        """Wait up to so many seconds for messages and return them; raise LockBackendError when it is broken."""
        raise NotImplementedError

    def calm(self, claims: Sequence[Claim]) -> Place | None:
        """
        Say that the claims are still wanted, and return the ``soon`` and ``clock`` of all of them.

        None where there may be more to do, so that one has to look. Only of one that ``asks``.
        """
        return None

    def close(self) -> None:
        """Listen no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """
    A snapshot of who has a key, for people to read; ``remaining`` seconds are below zero when it is stale.

    Its text may be shown to anybody, and is by the setting ``DLOCKS_SHOW_HOLDER``; its attributes have all.

    What a backend does not know is ``None`` for ``since``, infinite for ``remaining``, and 0 for ``token``.
    """

    key: str
    holder: str
    owner_ip: str | None
    since: datetime | None
    remaining: float
    token: int
    count: int
    stale: bool

    def __str__(self) -> str:
        who = privacy.holder(self.holder) or "an unknown holder"
        if ip := privacy.address(self.owner_ip):
            who += f" ({ip})"
        if self.since is not None:
            since = timezone.localtime(self.since) if timezone.is_aware(self.since) else self.since
            who += f" since {since:%H:%M:%S}"
        if self.remaining == math.inf:
            return who
        if self.stale:
            return f"{who}, which ran out {-self.remaining:.1f} s ago"
        return f"{who}, {self.remaining:.1f} s left"


class BaseBackend:
    """
    Base class of the backends. ``DLOCKS[alias]["OPTIONS"]`` are the keywords of the constructor.

    ``prefix`` stands before every key. ``ttl``, ``timeout`` and ``grace`` are seconds: how long a lease outlives a
    silent holder, how long a caller waits unless it says otherwise (``None``: for ever), and how much longer than its
    ttl a lease that ran out is left alone, for a clock that steps. A wait of ``slow_wait`` seconds or more is logged
    as a warning, and so is a hold of ``slow_hold``.
    """

    # Whether two claims of one key exclude each other.
    exclusive: ClassVar[bool] = True
    # Whether a hold can belong to the caller's transaction and end with it.
    supports_transactions: ClassVar[bool] = False
    # Whether claims can stand in line, and are granted in turn.
    supports_queue: ClassVar[bool] = False
    # Whether the line is the backend's own, and not the engine's: it tells how many are ahead, and passes over those of
    # whom nobody hears.
    keeps_places: ClassVar[bool] = True
    # Whether it knows that the last holder never came back.
    knows_takeovers: ClassVar[bool] = True
    # Whether a thread that waits can do so by itself: one thread less between the turn and its caller.
    tells_here: ClassVar[bool] = False
    # Whether a grant in line can be relied on for as long as it says; otherwise it is asked for again.
    tells_leases: ClassVar[bool] = True
    # Whether several claims can share a key.
    supports_sharing: ClassVar[bool] = False
    # Whether it can be bounded how many share a key.
    supports_permits: ClassVar[bool] = True
    # Whether tokens grow whatever the backend's clock does.
    supports_fencing: ClassVar[bool] = True
    # Whether people can be shown, and can clear, what is held.
    supports_clearing: ClassVar[bool] = False
    # Whether pin() can keep a key for a hold until a transaction in ``database`` has ended.
    supports_guard: ClassVar[bool] = False
    # The alias of the database that the locks are in, where they are in one.
    database: str = ""
    # Whether exchange() can put another claim in the place of one that is held.
    supports_handover: ClassVar[bool] = False
    # Where the callers of this process wait for it, once there are any.
    room: Any = None
    # After how many seconds at most a hold is renewed, where that is sooner than a third of its ttl.
    renew_every: float = math.inf

    def __init__(
        self,
        alias: str,
        *,
        prefix: str = "",
        ttl: float = 30.0,
        timeout: float | None = 10.0,
        grace: float = 0.5,
        slow_wait: float | None = None,
        slow_hold: float | None = None,
    ) -> None:
        if not isinstance(prefix, str) or "\0" in prefix or len(prefix) >= KEY_LENGTH:
            raise ValueError(f"prefix must be a string of fewer than {KEY_LENGTH} characters without NUL")
        self.alias = alias
        self.prefix = prefix
        self.ttl = seconds("ttl", ttl, above_zero=True)
        self.timeout = None if timeout is None else seconds("timeout", timeout)
        self.grace = seconds("grace", grace)
        self.slow_wait = None if slow_wait is None else seconds("slow_wait", slow_wait)
        self.slow_hold = None if slow_hold is None else seconds("slow_hold", slow_hold)

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

    def tell_lost(self, owners: Collection[str], why: str) -> None:
        """Tell those who have these holds that they are lost, before they ask; the front puts its keeper here."""

    def ttl_refused(self, ttl: float) -> str | None:
        """Return why nobody can have a lease so long, or None."""
        return None

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
        Give the key back, or give up a claim that may have been granted or stands in line.

        ``keep`` seconds from now on the key stays taken. Return False when the claim no longer had the key.
        """
        raise NotImplementedError

    def pin(self, claim: Claim, database: str) -> bool:
        """
        Renew a lease within the open transaction of ``database``, so that it is this claim's until that has ended.

        Return False when the claim no longer has the key.
        """
        raise NotImplementedError

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        """
        Put ``successor`` in the place of ``claim`` in one step, for its ttl from now and with a larger token.

        Return None, and change nothing, when the claim no longer has the key. To ask again says yes again.
        """
        raise NotImplementedError

    # Several keys in one step, where that can be. "No" means that nothing was done: then each is seen to by itself.

    def acquire_all(self, claims: Sequence[Claim]) -> Sequence[Grant] | None:
        """
        Grant all of the claims in one step, or return None and grant none; never wait.

        They are alike but for key and owner, and in the order of their keys.
        """
        return None

    def check_all(self, claims: Sequence[Claim]) -> bool:
        """Return whether all of the claims are certain to be held, as seen in one step."""
        return False

    def release_all(self, claims: Sequence[Claim], *, failed: bool = False) -> bool:
        """Give back the keys of all claims in one step, or return False and give back none."""
        return False

    def holder(self, key: str) -> Holder | None:
        """Return who has the key (with its prefix), a stale holder too, or None when it is free."""
        raise NotImplementedError

    def crowded(self, key: str) -> bool:
        """Return whether, for all that is known without asking, others wait for the key already."""
        return False

    def queue(self, claim: Claim, channel: str = "", number: int | None = None) -> Place | None:
        """
        Stand in line with the claim; return its place, or None where there is no standing in line just now.

        A place where to ask that has no number is none: the key is free. Where the key is kept for the claim, and yet
        may not be had when it asks, as while others have a row, the number is 0.

        ``number`` is that of the place it had before, to have it again. It is told on ``channel`` when it is granted;
        without one, of a backend that ``tells_here``, it asks for a place that is ``here``.
        """
        raise NotImplementedError

    def look(self, claims: Sequence[Claim], *, heard: bool = True) -> Mapping[str, Place]:
        """
        Return the places of claims in line by owner, and see to it that the line moves on where it can.

        ``heard`` says that they still want it: a claim of which nobody hears is passed over. One that is missing has
        no place any more.
        """
        raise NotImplementedError

    def wait(self, claim: Claim, timeout: float | None) -> bool:
        """
        Wait in this thread, so many seconds at most, until something may have become of a claim whose place is here.

        Return False, at once, when it has no such place any more.
        """
        raise NotImplementedError

    def move_on(self, key: str) -> bool:
        """Grant the key to the first in line, if it is free; return whether nobody stands in its way any more."""
        raise NotImplementedError

    def waiting(self, key: str) -> int:
        """Return how many claims stand in line for the key."""
        return 0

    def listen(self, channel: str) -> Listener | None:
        """Listen on a channel, on this thread's connection; return None where one has to look instead."""
        return None

    def in_transaction(self) -> bool:
        """Return whether a statement of this backend, made here and now, would be part of a caller's transaction."""
        return False

    def transaction_refused(self) -> str | None:
        """Return why a hold cannot belong to the transaction where the caller stands, or None."""
        return None

    def keeps_shares(self) -> bool:
        """Return whether a share can belong to the transaction where the caller stands, since nobody is beside it."""
        return False

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
