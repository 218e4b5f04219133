"""Operations of the commands and the admin: show and clear locks.

A change applies only to the version of a lock that the user was shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

from django.db import transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from dlocks import audit
from dlocks.backends.base import HEARTBEAT_TIMEOUT, Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.listing import listed
from dlocks.models import ClaimState, LockClaim, LockState, ResourceLock
from dlocks.sql.clock import After
from dlocks.text import printable, shown_address, shown_duration, shown_holder
from dlocks.values import UNLIMITED, Kept

# A ResourceLock with the annotations of ``by_clock()`` and ``with_queue()``, or a
# LockClaim with those of ``by_clock()``. The owner is deferred. Without rows, both are
# made of a ``Holder``.
LockRow = Any

Kind = Literal["lock", "share", "claim"]

# Maximum number of rows in memory.
PAGE = 500


class NotCleared(Exception):  # noqa: N818 (a refusal, not an error)
    """The error for a lock that was not cleared.

    The message is the reason. ``lock`` is the lock's present state, or None.
    """

    def __init__(self, reason: str, lock: LockRow | None) -> None:
        super().__init__(reason)
        self.lock = lock


def is_key(backend: Backend, key: str) -> bool:
    """Return whether rows of the backend can have this full key.

    PostgreSQL raises an error for a NUL in a query's parameter.
    """
    return "\0" not in key and key.startswith(backend.prefix)


def shown(backend: Backend, key: str) -> LockRow | None:
    """Return a lock by its full key, which includes the prefix."""
    if not is_key(backend, key):
        return None
    if not isinstance(backend, DatabaseBackend):
        return next(listed(backend, [key]), None)
    return locks_of(backend, [key]).filter(pk=key).first()


def pages(
    backend: Backend, states: Sequence[str], *, waited_for: bool = False
) -> Iterator[list[LockRow]]:
    """Yield pages of the locks under the backend's prefix, ordered by key.

    With ``waited_for``, include locks in other states that have waiters.
    """
    if not isinstance(backend, DatabaseBackend):
        if found := [lock for lock in listed(backend) if lock.state in states]:
            yield found
        return
    # Page by ranges of the key. Some database drivers fetch all rows of a result at
    # once.
    wanted = Q(state__in=states)
    if waited_for:
        wanted |= Q(waiters__gt=0) | Q(waiting__gt=0)
    locks = locks_of(backend, in_use=LockState.FREE not in states)
    locks = locks.order_by("pk").filter(wanted)
    following = locks.filter(pk__gte=backend.prefix)
    while page := list(following[:PAGE]):
        # Keys are ordered by bytes, so the keys with the prefix are adjacent.
        if mine := [lock for lock in page if lock.pk.startswith(backend.prefix)]:
            yield mine
        if len(mine) < len(page):
            return
        following = locks.filter(pk__gt=page[-1].pk)


def locks_of(
    backend: DatabaseBackend, keys: Sequence[str] | None = None, *, in_use: bool = False
) -> Any:
    """Return the locks, or those that may be in use.

    Look for kept leases only of ``keys``, if these are given.
    """
    kept = backend.keepers.kept(keys)
    locks = ResourceLock.objects.using(backend.database)
    if in_use:
        locks = maybe_in_use(locks, kept)
    return locks.by_clock(kept).with_queue(kept).defer("owner")


# What a row alone says of a lock in use.
IN_USE = Q(end_time__gt=After(0)) | ResourceLock.LEFT | Q(shares__gt=0)


def maybe_in_use(locks: Any, kept: Kept) -> Any:
    """Keep the locks that may be in use, which a row alone or the claims can say.

    Most rows of a large table are free. For each other row, further subqueries count
    its claims. PostgreSQL compiles them all if it expects many rows, which can take
    seconds.
    """
    claimed = LockClaim.objects.using(locks.db).values("key_resource")
    return locks.filter(IN_USE | Q(pk__in=claimed) | Q(pk__in=kept.transactions))


def claims(backend: DatabaseBackend, keys: Iterable[str]) -> Any:
    """Return the claims on these full keys: shared holds and queued claims.

    They are ordered by key, then by position.
    """
    mine = [key for key in keys if is_key(backend, key)]
    found = (
        LockClaim.objects.using(backend.database)
        .by_clock(backend.keepers.kept(mine))
        .defer("owner", "channel")
    )
    return found.filter(key_resource__in=mine).order_by("key_resource", "id")


def shares(backend: Backend, keys: Iterable[str], token: int | None = None) -> Any:
    """Return the shared holds of these full keys, or only that with a token."""
    if not isinstance(backend, DatabaseBackend):
        found = [share for lock in listed(backend, keys) for share in lock.sharers]
        return [share for share in found if token in {None, share.version}]
    rows = claims(backend, keys).filter(version__isnull=False)
    if token is not None:
        return rows.filter(version=token) if is_column(token) else rows.none()
    return rows


def with_claims(
    backend: Backend, locks: Sequence[LockRow]
) -> Iterator[tuple[LockRow, list[LockRow]]]:
    """Yield each lock with the claims on it, read in pages.

    The locks must be in the order of their keys.
    """
    if not isinstance(backend, DatabaseBackend):
        yield from ((lock, lock.sharers) for lock in locks)
        return
    found = _by_pages(claims(backend, [lock.pk for lock in locks]))
    claim = next(found, None)
    for lock in locks:
        mine = []
        while claim is not None and claim.key_resource == lock.pk:
            mine.append(claim)
            claim = next(found, None)
        yield lock, mine


def _by_pages(found: Any) -> Iterator[LockRow]:
    following = found
    while page := list(following[:PAGE]):
        yield from page
        last = page[-1]
        following = found.filter(
            Q(key_resource__gt=last.key_resource)
            | Q(key_resource=last.key_resource, id__gt=last.pk)
        )


def with_positions(claims: Iterable[LockRow]) -> Iterator[tuple[int | None, LockRow]]:
    """Yield queued claims with their positions, or None without a heartbeat."""
    position = 0
    for claim in claims:
        if claim.version is None:
            position += claim.state == ClaimState.WAITING
            yield position if claim.state == ClaimState.WAITING else None, claim


def in_row(lock: LockRow) -> bool:
    """Return whether the row describes an exclusive hold, present or past.

    The row of a key with shared holds does not describe them.
    """
    return (
        lock.state in {LockState.HELD, LockState.FREE}
        or lock.status == ResourceLock.Status.PROCESSING
    )


def is_exclusive(lock: LockRow) -> bool:
    """Return whether the row describes a present exclusive hold."""
    return lock.state != LockState.FREE and in_row(lock)


def state_of(lock: LockRow) -> str:
    """Return the label of the state of a lock or a claim.

    For a shared key, add the number of shared holds.
    """
    states = ClaimState if isinstance(lock, LockClaim) else LockState
    label = str(states(lock.state).label)
    if is_kept(lock):
        return _("%(state)s, in a transaction") % {"state": label}
    return f"{label} ({lock.sharing})" if lock.state == LockState.SHARED else label


def is_resting(lock: LockRow) -> bool:
    """Return whether a hold was released, but is kept for its ``min_hold``."""
    is_held = lock.state == LockState.HELD and lock.seconds_left > 0
    return is_held and not lock.hold_count


def is_kept(lock: LockRow) -> bool:
    """Return whether a transaction keeps this expired lease, or key without a lease.

    This applies to exclusive and shared holds.
    """
    return bool(lock.state == LockState.HELD and lock.seconds_left <= 0)


def is_session(lock: LockRow) -> bool:
    """Return whether the holder is a session whose transaction keeps the key."""
    return bool(getattr(lock, "keeper", ""))


def end(
    backend: Backend,
    kind: Kind,
    key: str,
    number: int,
    *,
    reason: str | None,
    by: str,
    via: str,
    what: audit.What | None = None,
    stale_only: bool = False,
) -> LockRow:
    """End a lock, a shared hold or a dead claim as a user was shown it.

    ``number`` is its version, its token or its id. Without a reason, end only what is
    stale. The audit log names the act ``what``, by default after the state. Return the
    row as it was before, or raise NotCleared.
    """
    stale_only = stale_only or reason is None
    before = _read_endable(backend, kind, key, number, stale_only=stale_only)
    act: Callable[[str, int], bool] = partial(backend.clear, stale_only=stale_only)
    if isinstance(backend, DatabaseBackend):
        if kind == "claim":
            act = backend.maintenance.take_out
        elif kind == "share":
            act = partial(backend.maintenance.end_share, stale_only=stale_only)
    # A savepoint keeps the transaction of a request usable if the database refuses.
    inside = backend.in_transaction()
    with transaction.atomic(using=backend.database) if inside else nullcontext():
        done = act(key, number)
    if not done:
        why = kept_by_transaction()
        if not isinstance(backend, DatabaseBackend):
            why = _("acquired by another holder in the meantime")
        elif stale_only and kind != "claim" and backend.store.observed:
            why = _(
                "expired by the database's clock, but not observed for long enough:"
                " force its release, with a reason"
            )
        now = _read_endable(backend, kind, key, number, stale_only=stale_only)
        raise NotCleared(why, now)
    what = what or ("clear" if before.state == LockState.STALE else "force_release")
    reason = reason or audit.STALE
    noun = "number" if kind == "claim" else "token"
    audit.write(
        backend.database,
        # With %r a text can neither end the line nor imitate another field.
        f"{what} {kind} %r, {noun} %d, of %r (%s), by %r via %s: %r",
        (key, number, before.holder, before.owner_ip or "-", by, via, reason),
        {
            "audit_action": what,
            "audit_kind": kind,
            "audit_by": by,
            "audit_via": via,
            "audit_reason": reason,
            "lock_key": key,
            "lock_token": number,
            "lock_holder": before.holder,
            "lock_owner_ip": before.owner_ip,
        },
    )
    return before


def _read_endable(
    backend: Backend, kind: Kind, key: str, number: int, *, stale_only: bool
) -> LockRow:
    """Read the row again, and raise NotCleared if it must not be ended."""
    if kind == "claim" and isinstance(backend, DatabaseBackend):
        queued = claims(backend, [key]).filter(version__isnull=True)
        found = queued.filter(pk=number).first() if is_column(number) else None
        if found is None:
            raise NotCleared(_("no longer in the queue"), None)
        if found.state != ClaimState.DEAD:
            raise NotCleared(_("its heartbeat has resumed"), found)
        return found
    if kind == "share":
        found = next(iter(shares(backend, [key], number)), None)
        if found is None:
            raise NotCleared(_("the shared hold with this token has ended"), None)
    else:
        found = shown(backend, key)
        if found is None and isinstance(backend, DatabaseBackend):
            raise NotCleared(_("the row no longer exists"), None)
        if found is None or found.state == LockState.FREE:
            raise NotCleared(_("already free"), found)
        if not in_row(found):
            raise NotCleared(_("shared in the meantime"), found)
        if found.version != number:
            raise NotCleared(_("acquired by another holder in the meantime"), found)
    if is_kept(found):
        raise NotCleared(kept_by_transaction(), found)
    if stale_only and found.state != LockState.STALE:
        raise NotCleared(_("not stale"), found)
    if stale_only and found.seconds_left > -backend.grace:
        # A small step of the database's clock may have ended its lease early.
        why = _("expired a moment ago: its holder may still renew it")
        raise NotCleared(why, found)
    return found


def kept_by_transaction() -> str:
    return _("held by an open transaction: try again when it has ended")


def is_column(number: int) -> bool:
    # Some engines raise an error for a number outside of the column's range.
    return -(2**63) <= number < 2**63


def name_of(lock: LockRow) -> str:
    """Return the holder as it may be shown on a page."""
    return shown_holder(lock.holder)


def address_of(lock: LockRow) -> str:
    return shown_address(lock.owner_ip) or ""


def describe(lock: LockRow, *, on_page: bool = False) -> str:
    """Return a text about a waiter, or the holder of a lock or a shared hold.

    It says for how long it has waited or held the key, and how much time is left.
    """
    who = (name_of(lock) if on_page else printable(lock.holder)) or _(
        "an unknown holder"
    )
    if ip := address_of(lock) if on_page else lock.owner_ip:
        who += f" ({ip})"
    is_waiter = isinstance(lock, LockClaim) and lock.version is None
    if lock.begin_time is not None:
        text = (
            _("%(who)s, waiting for %(age)s") if is_waiter else _("%(who)s for %(age)s")
        )
        who = text % {"who": who, "age": shown_duration(lock.seconds_held)}
    if is_waiter:
        return who if lock.seconds_left > 0 else f"{who}, {last_seen_of(lock)}"
    return f"{who}, {left}" if (left := time_left(lock)) else who


def last_seen_of(claim: LockRow) -> str:
    """Return for how long a queued claim has had no heartbeat."""
    return _("no heartbeat for %(duration)s") % {
        "duration": shown_duration(max(0.0, HEARTBEAT_TIMEOUT - claim.seconds_left))
    }


def mode(claim: LockRow) -> str:
    """Return whether a claim is exclusive or shared, and among how many."""
    if not claim.shared:
        return _("exclusive")
    if claim.permits == UNLIMITED:
        return _("shared")
    return _("shared by up to %(permits)d") % {"permits": claim.permits}


def time_left(lock: LockRow) -> str:
    if is_kept(lock):
        return _("in a transaction")
    if lock.seconds_left == math.inf:
        return ""
    if lock.seconds_left > 0:
        return _("%(duration)s left") % {"duration": shown_duration(lock.seconds_left)}
    return _("expired %(duration)s ago") % {
        "duration": shown_duration(-lock.seconds_left)
    }
