"""The state of one key as a value, and the functions that change it.

These are the rules of leases, shared holds and the queue, without any I/O. The memory
backend keeps such values in a dict. The database backends read them from rows and save
the difference. Their fast paths follow the same rules in SQL, and tests compare them
with these functions.

Each function takes a state and a moment, and returns the new state and a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from dlocks.backends.base import HANDOVER_LEASE, HEARTBEAT_TIMEOUT
from dlocks.exceptions import LockStale
from dlocks.values import Claim, Grant, Holder, Ticket


@dataclass(frozen=True, slots=True)
class Moment:
    """A reading of the clocks.

    ``now`` and ``grace`` are seconds on the clock of the leases, and ``ticks`` are
    microseconds since 1970, for tokens.
    """

    now: float
    grace: float
    ticks: int
    date: datetime


@dataclass(frozen=True, slots=True)
class Held:
    """A claim that holds the key, or the last one that did."""

    claim: Claim
    token: int
    since: datetime
    end: float
    # It is 0 for a share kept after its release.
    count: int = 1
    # Whether the previous holder never released the key.
    takeover: bool = False

    def grant(self, at: Moment) -> Grant:
        return Grant(self.token, self.end - at.now, self.takeover)

    def expires_in(self, at: Moment) -> float:
        """Return the seconds until a share has ended, without grace if released."""
        return self.end - at.now + (at.grace if self.count else 0.0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A queued claim. Without a heartbeat, it is skipped from ``end`` on."""

    claim: Claim
    position: int
    end: float
    # When it joined the queue.
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class KeyState:
    """The holders of a key, and its queue in the order of the positions.

    ``held`` is the last exclusive hold. If it ``is_released``, the key is free from its
    end on.
    """

    version: int = 0
    held: Held | None = None
    is_released: bool = True
    shares: tuple[Held, ...] = ()
    queue: tuple[Waiting, ...] = ()

    @property
    def is_held(self) -> bool:
        """Return whether the exclusive hold was not released. It may be stale."""
        return self.held is not None and not self.is_released

    def expires_in(self, at: Moment) -> float:
        """Return the seconds until the key is free of exclusive holds."""
        if self.held is None:
            return 0.0
        return self.held.end - at.now + (0.0 if self.is_released else at.grace)

    def live(self, at: Moment) -> list[Waiting]:
        """Return the waiters with a recent heartbeat."""
        return [waiting for waiting in self.queue if waiting.end > at.now]

    def hold_of(self, claim: Claim) -> Held | None:
        """Return the hold of a claim, which may have expired."""
        held = (self.held,) if self.held and not self.is_released else ()
        mine = (one for one in (*held, *self.shares) if one.claim.owner == claim.owner)
        return next(mine, None)

    def with_hold(self, old: Held, new: Held) -> KeyState:
        if old is self.held:
            return replace(self, held=new)
        return replace(
            self, shares=tuple(new if one is old else one for one in self.shares)
        )


def acquire(state: KeyState, claim: Claim, at: Moment) -> tuple[KeyState, Grant | None]:
    """Grant a claim if the key permits it and no waiter is ahead.

    Raise LockStale if the claim must not take over the stale key.
    """
    if (mine := state.hold_of(claim)) is not None:
        if mine is state.held:
            return _granted(state, claim, at, claim.ttl)
        return state.with_hold(mine, replace(mine, end=at.now + claim.ttl)), Grant(
            mine.token
        )
    held = state.held
    if claim.beside and state.is_held and held and held.claim.owner == claim.beside:
        # The caller itself holds the key exclusively, and will share it later.
        state = _without_ended_shares(state, at)
        if len(state.shares) >= claim.permits:
            return state, None
        return _granted(state, claim, at, claim.ttl)
    if state.expires_in(at) > 0:
        return state, None
    if state.is_held and not claim.takeover:
        raise LockStale(key=claim.key, holder=holder(state, claim.key, at))
    if claim.fair and state.live(at):
        state = admit(state, at)
        if (mine := state.hold_of(claim)) is not None:
            return state, mine.grant(at)
        if state.live(at):
            return state, None
    state = _without_ended_shares(state, at)
    if not _has_room(state, claim, at):
        return state, None
    return _granted(state, claim, at, claim.ttl)


def admit(state: KeyState, at: Moment) -> KeyState:
    """Grant a free key to the first waiter, or shared holds to the first waiters."""
    if state.expires_in(at) > 0:
        return state
    state = _without_ended_shares(state, at)
    live, stale = state.live(at), state.is_held
    if not live:
        return state
    willing = [one.claim for one in live if one.claim.takeover or not stale]
    if not live[0].claim.shared:
        if willing and not willing[0].shared and not state.shares:
            state, _ = _granted(state, willing[0], at, _handover_lease(willing[0]))
        return state
    for claim in (waiting.claim for waiting in live):
        if not claim.shared or len(state.shares) >= claim.permits:
            break
        if claim.takeover or not stale:
            state, _ = _granted(state, claim, at, _handover_lease(claim))
    return state


def release(
    state: KeyState, claim: Claim, at: Moment, rest_for: float = 0.0
) -> tuple[KeyState, bool]:
    """End a hold, or cancel a queued claim. The queue advances.

    With ``rest_for``, the key stays taken for that many seconds.
    """
    ended = False
    if state.held is not None and state.held.claim.owner == claim.owner:
        # A repeated release succeeds again.
        ended = True
        state = replace(
            state, held=replace(state.held, end=at.now + rest_for), is_released=True
        )
    elif (share := state.hold_of(claim)) is not None:
        ended = share.end > at.now
        if rest_for:
            end = at.now + rest_for
            state = state.with_hold(share, replace(share, end=end, count=0))
        else:
            state = replace(
                state, shares=tuple(one for one in state.shares if one is not share)
            )
    elif _waiting(state, claim) is None:
        return state, False
    return admit(_without_waiting(state, claim), at), ended


def clear(state: KeyState, version: int, at: Moment) -> tuple[KeyState, bool]:
    """Take the key from its exclusive holder, if the version is current.

    A holder that has released the key keeps it only for its ``min_hold``.
    """
    is_free = state.is_released and state.expires_in(at) <= 0
    if is_free or state.version != version:
        return state, False
    version = _next_token(state, at)
    state = replace(state, version=version, held=None, is_released=True)
    return admit(state, at), True


def tidy(state: KeyState, at: Moment) -> tuple[KeyState, int]:
    """End the expired shared holds. The queue advances.

    Return the number of those that were never released.
    """
    tidied = _without_ended_shares(state, at)
    ended = [share for share in state.shares if share not in tidied.shares]
    return admit(tidied, at), sum(share.count > 0 for share in ended)


def renew(state: KeyState, claim: Claim, at: Moment) -> tuple[KeyState, bool]:
    """Extend a live hold to its full ttl."""
    mine = _live_hold(state, claim, at)
    if mine is None:
        return state, False
    return state.with_hold(mine, replace(mine, end=at.now + claim.ttl)), True


def recount(
    state: KeyState, claim: Claim, at: Moment, count: int
) -> tuple[KeyState, bool]:
    """Write the number of entries of a live hold."""
    mine = _live_hold(state, claim, at)
    if mine is None:
        return state, False
    return state.with_hold(mine, replace(mine, count=count)), True


def exchange(
    state: KeyState, claim: Claim, successor: Claim, at: Moment
) -> tuple[KeyState, Grant | None]:
    """Replace the claim of a live exclusive hold. A repeated call succeeds again."""
    mine = _live_hold(state, claim, at) or _live_hold(state, successor, at)
    if mine is None or mine is not state.held:
        return state, None
    return _granted(state, successor, at, successor.ttl)


def enqueue(
    state: KeyState, claim: Claim, position: int, at: Moment
) -> tuple[KeyState, Ticket]:
    """Queue a claim at a position, unless the key is free for it."""
    if (mine := ticket(state, claim, at)) is None:
        state = admit(state, at)
        if not state.live(at) and _has_room(state, claim, at):
            return state, Ticket(must_retry=True)
        waits = Waiting(claim, position, at.now + HEARTBEAT_TIMEOUT, at.now)
        queue = sorted((*state.queue, waits), key=lambda one: one.position)
        state = replace(state, queue=tuple(queue))
    if mine is None or mine.grant is None:
        state = admit(state, at)
    return state, ticket(state, claim, at) or Ticket(must_retry=True)


def poll(state: KeyState, claim: Claim, at: Moment) -> tuple[KeyState, Ticket | None]:
    """Record the heartbeat of a queued claim, and advance the queue."""
    if (waits := _waiting(state, claim)) is not None:
        heard = replace(waits, end=at.now + HEARTBEAT_TIMEOUT)
        queue = tuple(heard if one is waits else one for one in state.queue)
        state = replace(state, queue=queue)
    state = admit(state, at)
    return state, ticket(state, claim, at)


def ticket(state: KeyState, claim: Claim, at: Moment) -> Ticket | None:
    """Return the ticket of a granted or queued claim."""
    if (mine := state.hold_of(claim)) is not None:
        return Ticket(grant=mine.grant(at))
    if (waits := _waiting(state, claim)) is None:
        return None
    expires_in = state.expires_in(at)
    ends = [expires_in, *(share.expires_in(at) for share in state.shares)]
    return Ticket(
        ahead=sum(one.position < waits.position for one in state.live(at)),
        position=waits.position,
        # A retry raises the error.
        must_retry=state.is_held and expires_in <= 0 and not claim.takeover,
        next_check=min((end for end in ends if end > 0), default=float("inf")),
    )


def holder(state: KeyState, key: str, at: Moment) -> Holder | None:
    """Return the exclusive holder or the first shared one, which may be stale."""
    held = state.held
    if held is None or (state.is_released and held.end <= at.now):
        held = next(iter(sharers(state, at)), None)
    return None if held is None else holder_of(held, key, at)


def sharers(state: KeyState, at: Moment) -> list[Held]:
    """Return the shared holds, which may be stale. Live ones come first.

    One that was released, and has ended after its ``min_hold``, is none any more.
    """
    found = [share for share in state.shares if share.count or share.end > at.now]
    return sorted(found, key=lambda share: share.end <= at.now)


def holder_of(held: Held, key: str, at: Moment) -> Holder:
    remaining = held.end - at.now
    return Holder(
        key=key,
        holder=held.claim.holder,
        owner_ip=held.claim.owner_ip,
        since=held.since,
        remaining=remaining,
        token=held.token,
        count=held.count,
        stale=remaining <= 0,
    )


def _granted(
    state: KeyState, claim: Claim, at: Moment, lease: float
) -> tuple[KeyState, Grant]:
    takeover = (
        state.is_held and state.hold_of(claim) is None and state.expires_in(at) <= 0
    )
    token, end = _next_token(state, at), at.now + lease
    held = Held(claim, token, at.date, end, takeover=takeover)
    # Its lease is the ttl. A queued claim learns of its shorter one by its ticket.
    grant = Grant(token, takeover=takeover)
    state = replace(_without_waiting(state, claim), version=held.token)
    if not claim.shared:
        state = replace(state, held=held, is_released=False)
        return state, grant
    if takeover:
        # The stale holder loses the key.
        state = replace(state, held=None, is_released=True)
    return replace(state, shares=(*state.shares, held)), grant


def _has_room(state: KeyState, claim: Claim, at: Moment) -> bool:
    """Return whether the holders of a key permit another claim."""
    return state.expires_in(at) <= 0 and len(state.shares) < (
        claim.permits if claim.shared else 1
    )


def _next_token(state: KeyState, at: Moment) -> int:
    return max(state.version + 1, at.ticks)


def _handover_lease(claim: Claim) -> float:
    return min(claim.ttl, HANDOVER_LEASE)


def _live_hold(state: KeyState, claim: Claim, at: Moment) -> Held | None:
    mine = state.hold_of(claim)
    return mine if mine and mine.count and mine.end > at.now else None


def _waiting(state: KeyState, claim: Claim) -> Waiting | None:
    mine = (one for one in state.queue if one.claim.owner == claim.owner)
    return next(mine, None)


def _without_waiting(state: KeyState, claim: Claim) -> KeyState:
    waits = _waiting(state, claim)
    if waits is None:
        return state
    return replace(state, queue=tuple(one for one in state.queue if one is not waits))


def _without_ended_shares(state: KeyState, at: Moment) -> KeyState:
    live = (share for share in state.shares if share.expires_in(at) > 0)
    return replace(state, shares=tuple(live))
