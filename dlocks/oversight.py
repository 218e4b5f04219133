"""What the commands and the admin share: locks shown to people, and cleared as they were shown."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from django.db import transaction
from django.utils import timezone
from django.utils.translation import gettext as _

from dlocks.backends.database import DatabaseBackend
from dlocks.models import LockState, ResourceLock

# A ResourceLock with what by_clock() adds to it, and without its owner.
Shown = Any

# Rows that are in memory at one time.
PAGE = 500


class NotCleared(Exception):  # noqa: N818 (not an error: the answer no, and why)
    """The lock is not cleared, for the reason given; ``lock`` is what it is now."""

    def __init__(self, reason: str, lock: Shown | None) -> None:
        super().__init__(reason)
        self.lock = lock


def shown(backend: DatabaseBackend, key: str) -> Shown | None:
    """Return a lock by its key, with the prefix."""
    if "\0" in key:
        return None
    return ResourceLock.objects.using(backend.database).by_clock().defer("owner").filter(pk=key).first()


def pages(backend: DatabaseBackend, states: Sequence[str]) -> Iterator[list[Shown]]:
    """Yield the locks under the backend's prefix by key, a page at a time."""
    # By ranges of the key: not every engine's driver leaves on the server what is not fetched yet.
    locks: Any = ResourceLock.objects.using(backend.database).by_clock().defer("owner").order_by("pk")
    locks = locks.filter(state__in=states)
    following = locks.filter(pk__gte=backend.prefix)
    while page := list(following[:PAGE]):
        # Keys are ordered byte for byte, so those with the prefix follow each other.
        if mine := [lock for lock in page if lock.pk.startswith(backend.prefix)]:
            yield mine
        if len(mine) < len(page):
            return
        following = locks.filter(pk__gt=page[-1].pk)


def clear(backend: DatabaseBackend, key: str, version: int, *, stale_only: bool = False) -> Shown:
    """Clear the lock that a person was shown with this version, and return it as it was, or raise NotCleared."""
    lock = _unchanged(backend, key, version, stale_only)
    # A savepoint, so that a refusal of the database leaves a request's transaction usable.
    with transaction.atomic(using=backend.database) if backend.in_transaction() else nullcontext():
        cleared = backend.clear(key, version, stale_only=stale_only)
    if not cleared:
        lock = _unchanged(backend, key, version, stale_only)
        raise NotCleared(_("in a transaction at this moment: try again when that has ended"), lock)
    return lock


def _unchanged(backend: DatabaseBackend, key: str, version: int, stale_only: bool) -> Shown:
    lock = shown(backend, key)
    if lock is None:
        raise NotCleared(_("not there any more"), None)
    if lock.state == LockState.FREE:
        raise NotCleared(_("free already"), lock)
    if lock.version != version:
        raise NotCleared(_("taken by another holder meanwhile"), lock)
    if stale_only and lock.state != LockState.STALE:
        raise NotCleared(_("not stale"), lock)
    return lock


def describe(lock: Shown) -> str:
    """Return who has a lock, since when and for how long."""
    who = printable(lock.holder) or _("an unknown holder")
    if lock.owner_ip:
        who += f" ({lock.owner_ip})"
    if lock.begin_time is not None:
        who = _("%(who)s since %(begin)s") % {"who": who, "begin": moment(lock.begin_time)}
    return f"{who}, {time_left(lock)}"


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
