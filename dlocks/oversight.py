"""What the commands and the admin share: locks shown to people, and cleared as they were shown."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from django.db import transaction
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext as _

from dlocks import privacy
from dlocks.backends.base import HEARD_FOR, UNLIMITED
from dlocks.backends.database import DatabaseBackend
from dlocks.models import ClaimState, LockClaim, LockState, ResourceLock

# A ResourceLock with what by_clock() and with_line() add to it, or a LockClaim with what by_clock() does; without
# its owner.
Shown = Any

# Rows that are in memory at one time.
PAGE = 500

# Seconds for which a key has to be free before a person may delete its row.
IDLE_FOR = 86400.0

# Characters of a reason: one line of a log.
REASON_LENGTH = 200


class NotCleared(Exception):  # noqa: N818 (not an error: the answer no, and why)
    """The lock is not cleared, for the reason given; ``lock`` is what it is now."""

    def __init__(self, reason: str, lock: Shown | None) -> None:
        super().__init__(reason)
        self.lock = lock


def reason_of(text: str) -> str:
    """Return the reason that a person gave, without the blanks around it; raise ValueError where it is none."""
    reason = text.strip()
    if not any(character.isprintable() and not character.isspace() for character in reason):
        raise ValueError(_("Say why: the reason is kept in the log."))
    if len(reason) > REASON_LENGTH:
        raise ValueError(
            _("A reason has at most %(most)d characters, not %(number)d.")
            % {"most": REASON_LENGTH, "number": len(reason)}
        )
    if any(unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"} for character in reason):
        raise ValueError(_("A reason is one line, without control characters."))
    return reason


def shown(backend: DatabaseBackend, key: str) -> Shown | None:
    """Return a lock by its key, with the prefix."""
    if "\0" in key or not key.startswith(backend.prefix):
        return None
    return _locks(backend).filter(pk=key).first()


def pages(backend: DatabaseBackend, states: Sequence[str], *, waited_for: bool = False) -> Iterator[list[Shown]]:
    """Yield the locks under the backend's prefix by key, a page at a time; those that are waited for, too."""
    # By ranges of the key: not every engine's driver leaves on the server what is not fetched yet.
    wanted = Q(state__in=states)
    if waited_for:
        wanted |= Q(waiters__gt=0) | Q(waiting__gt=0)
    locks = _locks(backend).order_by("pk").filter(wanted)
    following = locks.filter(pk__gte=backend.prefix)
    while page := list(following[:PAGE]):
        # Keys are ordered byte for byte, so those with the prefix follow each other.
        if mine := [lock for lock in page if lock.pk.startswith(backend.prefix)]:
            yield mine
        if len(mine) < len(page):
            return
        following = locks.filter(pk__gt=page[-1].pk)


def _locks(backend: DatabaseBackend) -> Any:
    return ResourceLock.objects.using(backend.database).by_clock().with_line().defer("owner")


def claims(backend: DatabaseBackend, keys: Sequence[str]) -> Any:
    """Return the claims on these keys, with the prefix, that share them or stand in line: by key, then in order."""
    found = LockClaim.objects.using(backend.database).by_clock().defer("owner", "channel")
    mine = [key for key in keys if key.startswith(backend.prefix)]
    return found.filter(key_resource__in=mine).order_by("key_resource", "id")


def shares(backend: DatabaseBackend, keys: Sequence[str]) -> Any:
    return claims(backend, keys).filter(version__isnull=False)


def with_claims(backend: DatabaseBackend, locks: Sequence[Shown]) -> Iterator[tuple[Shown, list[Shown]]]:
    """Yield each of the locks, which are in the order of their keys, with the claims on it; read by pages."""
    found = _by_pages(claims(backend, [lock.pk for lock in locks]))
    claim = next(found, None)
    for lock in locks:
        mine = []
        while claim is not None and claim.key_resource == lock.pk:
            mine.append(claim)
            claim = next(found, None)
        yield lock, mine


def _by_pages(found: Any) -> Iterator[Shown]:
    following = found
    while page := list(following[:PAGE]):
        yield from page
        last = page[-1]
        following = found.filter(
            Q(key_resource__gt=last.key_resource) | Q(key_resource=last.key_resource, id__gt=last.pk)
        )


def in_row(lock: Shown) -> bool:
    """Tell whether the row is of somebody who has the key alone, or was the last to have it; not of its sharers."""
    return lock.state in {LockState.HELD, LockState.FREE} or lock.status == ResourceLock.Status.PROCESSING


def state_of(lock: Shown) -> str:
    """Return the state of a lock or a claim as a word, with the number of those who share the key."""
    if _is_claim(lock):
        return str(ClaimState(lock.state).label)
    label = str(LockState(lock.state).label)
    return f"{label} ({lock.sharing})" if lock.state == LockState.SHARED else label


def _is_claim(lock: Shown) -> bool:
    return isinstance(lock, LockClaim)


def clear(backend: DatabaseBackend, key: str, version: int, *, stale_only: bool = False) -> Shown:
    """Clear the lock that a person was shown with this version, and return it as it was, or raise NotCleared."""
    lock = _unchanged(backend, key, version, stale_only)
    # A savepoint, so that a refusal of the database leaves a request's transaction usable.
    with transaction.atomic(using=backend.database) if backend.in_transaction() else nullcontext():
        cleared = backend.clear(key, version, stale_only=stale_only)
    if not cleared:
        lock = _unchanged(backend, key, version, stale_only)
        if stale_only and backend.observations is not None:
            why = _("stale by the clock only, which is not trusted here: force its release, with a reason")
            raise NotCleared(why, lock)
        raise NotCleared(_("in a transaction at this moment: try again when that has ended"), lock)
    return lock


def end_share(backend: DatabaseBackend, key: str, token: int, *, stale_only: bool = False) -> Shown:
    """End the share that a person was shown with this token, and return it as it was, or raise NotCleared."""

    def look() -> Shown:
        share = shares(backend, [key]).filter(version=token).first() if is_column(token) else None
        if share is None:
            raise NotCleared(_("not shared with that token any more"), None)
        if stale_only and share.state != ClaimState.STALE:
            raise NotCleared(_("not stale"), share)
        return share

    return _take_away(backend, look, lambda: backend.end_share(key, token, stale_only=stale_only))


def take_out(backend: DatabaseBackend, key: str, number: int) -> Shown:
    """Take a dead claim out of line, and return it as it was, or raise NotCleared."""

    def look() -> Shown:
        claim = claims(backend, [key]).filter(pk=number, version__isnull=True).first() if is_column(number) else None
        if claim is None:
            raise NotCleared(_("not in line any more"), None)
        if claim.state != ClaimState.DEAD:
            raise NotCleared(_("heard of again"), claim)
        return claim

    return _take_away(backend, look, lambda: backend.take_out(key, number))


def is_unused(lock: Shown) -> bool:
    """Tell whether a row is one that may be deleted; the backend itself looks again."""
    free = lock.state == LockState.FREE and lock.seconds_left <= -IDLE_FOR
    return bool(free and lock.waiters == lock.waiting == lock.shares == 0)


def purge(backend: DatabaseBackend, key: str, version: int) -> Shown:
    """Delete the row of an unused key as a person was shown it, and return it as it was, or raise NotCleared."""
    lock = _unused(backend, key, version)
    with transaction.atomic(using=backend.database) if backend.in_transaction() else nullcontext():
        purged = is_column(version) and backend.purge_one(key, version, IDLE_FOR)
    if not purged:
        raise NotCleared(_("in use at this moment"), _unused(backend, key, version))
    return lock


def _unused(backend: DatabaseBackend, key: str, version: int) -> Shown:
    lock = shown(backend, key)
    if lock is None:
        raise NotCleared(_("not there any more"), None)
    if lock.version != version or not is_unused(lock):
        raise NotCleared(_("used in the last day, or waited for"), lock)
    return lock


def _take_away(backend: DatabaseBackend, look: Callable[[], Shown], act: Callable[[], bool]) -> Shown:
    claim = look()
    with transaction.atomic(using=backend.database) if backend.in_transaction() else nullcontext():
        done = act()
    if not done:
        raise NotCleared(_("in a transaction at this moment: try again when that has ended"), look())
    return claim


def is_column(number: int) -> bool:
    # Not every engine finds nothing where a number is beyond its columns'.
    return -(2**63) <= number < 2**63


def _unchanged(backend: DatabaseBackend, key: str, version: int, stale_only: bool) -> Shown:
    lock = shown(backend, key)
    if lock is None:
        raise NotCleared(_("not there any more"), None)
    if lock.state == LockState.FREE:
        raise NotCleared(_("free already"), lock)
    if not in_row(lock):
        raise NotCleared(_("shared by then"), lock)
    if lock.version != version:
        raise NotCleared(_("taken by another holder meanwhile"), lock)
    if stale_only and lock.state != LockState.STALE:
        raise NotCleared(_("not stale"), lock)
    return lock


def name_of(lock: Shown) -> str:
    """Return the holder as a page may show it."""
    return printable(privacy.holder(lock.holder))


def address_of(lock: Shown) -> str:
    return privacy.address(lock.owner_ip) or ""


def describe(lock: Shown, *, on_page: bool = False) -> str:
    """Return who has a lock or a share, since when and for how long; or who waits, since when."""
    who = (name_of(lock) if on_page else printable(lock.holder)) or _("an unknown holder")
    if ip := address_of(lock) if on_page else lock.owner_ip:
        who += f" ({ip})"
    if lock.begin_time is not None:
        who = _("%(who)s since %(begin)s") % {"who": who, "begin": moment(lock.begin_time)}
    if _is_claim(lock) and lock.version is None:
        return who if lock.seconds_left > 0 else f"{who}, {heard_of(lock)}"
    return f"{who}, {time_left(lock)}"


def heard_of(claim: Shown) -> str:
    """Return how long ago a claim in line ceased to be heard of."""
    return _("not heard of for %(duration)s") % {"duration": duration(max(0.0, HEARD_FOR - claim.seconds_left))}


def mode(claim: Shown) -> str:
    """Return how a claim has the key, or wants it."""
    if not claim.shared:
        return _("exclusive")
    if claim.permits == UNLIMITED:
        return _("shared")
    return _("shared by up to %(permits)d") % {"permits": claim.permits}


def time_left(lock: Shown) -> str:
    if lock.seconds_left > 0:
        return _("%(duration)s left") % {"duration": duration(lock.seconds_left)}
    return _("ran out %(duration)s ago") % {"duration": duration(-lock.seconds_left)}


def moment(value: Any) -> str:
    """Return a moment in the current time zone, to the second."""
    # Not localtime() of the templates, which leaves UTC as it is where USE_TZ is off.
    return timezone.localtime(value).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    if abs(seconds) < 10:
        return f"{seconds:.1f}s"
    sign, whole = "-" if seconds < 0 else "", round(abs(seconds))
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= size:
            return f"{sign}{whole // size}{unit}{whole % size // part:02}{smaller}"
    return f"{sign}{whole}s"


def printable(text: str) -> str:
    """Return the text with what would act on a terminal, or turn the direction of writing, as escapes."""
    return "".join(character.encode("unicode_escape").decode() if _acts(character) else character for character in text)


def _acts(character: str) -> bool:
    return (
        unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}
        or unicodedata.bidirectional(character) in _DIRECTIONS
        or character in "\u061c\u200e\u200f"
    )


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
