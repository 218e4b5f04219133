"""What the actions and the buttons of the admin change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import messages
from django.contrib.admin import helpers
from django.db.models import Q
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import ngettext_lazy

from dlocks import audit
from dlocks.admin.base import Source
from dlocks.admin.targets import Kind, Target, from_form
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.exceptions import LockBackendError
from dlocks.models import ClaimState, LockState, ResourceLock
from dlocks.operations import (
    LockRow,
    NotCleared,
    claims,
    clear,
    describe,
    end_share,
    in_row,
    is_key,
    locks_of,
    shares,
    take_out,
)
from dlocks.text import printable

# Locks that one action accepts. The form has a field for each, and their number must
# stay below DATA_UPLOAD_MAX_NUMBER_FIELDS.
MOST = 400
# Locks that one message names.
NAMED = 10

STALE = Q(state__in=[ClaimState.STALE, ClaimState.DEAD])

# What the user reads about the keys of an action.
DONE: dict[audit.What, Any] = {
    "clear": ngettext_lazy(
        "%(count)d stale lock was cleared: %(keys)s",
        "%(count)d stale locks were cleared: %(keys)s",
        "count",
    ),
    "force_release": ngettext_lazy(
        "The release of %(count)d lock was forced: %(keys)s",
        "The release of %(count)d locks was forced: %(keys)s",
        "count",
    ),
    "take_out": ngettext_lazy(
        "%(count)d dead claim was removed from the queue: %(keys)s",
        "%(count)d dead claims were removed from the queue: %(keys)s",
        "count",
    ),
}
UNCHANGED: Any = ngettext_lazy(
    "%(count)d lock was left unchanged (%(reason)s): %(keys)s",
    "%(count)d locks were left unchanged (%(reason)s): %(keys)s",
    "count",
)


def stale_of(admin: Any, request: HttpRequest, found: Any) -> list[Target] | None:
    """Return everything stale on the selected keys, or None if it is too much.

    A selected lock that is not stale is included, so that it is reported, unless its
    key has a stale claim.
    """
    selected = _selected(admin, request, found.filter(state=LockState.STALE))
    if selected is None:
        return None
    of_keys = claims(Source.of(request).database, selected)
    targets = [Target.of(claim) for claim in of_keys.filter(STALE)]
    claimed = {target.key for target in targets}
    targets += [
        Target(key, "lock", 0 if lock is None else lock.version)
        for key, lock in selected.items()
        if lock is None
        or (lock.state == LockState.STALE and in_row(lock))
        or key not in claimed
    ]
    return targets if _is_accepted(admin, request, len(targets)) else None


def held_of(
    admin: Any, request: HttpRequest, found: Any
) -> tuple[list[Target], int] | None:
    """Return the holds on the selected keys, and the number of keys without one.

    Return None if there are none, or too many.
    """
    selected = _selected(admin, request, found.exclude(state=LockState.FREE))
    if selected is None:
        return None
    holds = [
        *shares(Source.of(request).database, selected),
        *(
            lock
            for lock in selected.values()
            if lock is not None and lock.state != LockState.FREE and in_row(lock)
        ),
    ]
    targets = sorted((Target.of(hold) for hold in holds), key=lambda one: one.key)
    if not targets:
        text = _("None of the selected locks is still held.")
        admin.message_user(request, text, messages.WARNING)
        return None
    if not _is_accepted(admin, request, len(targets)):
        return None
    return targets, len(selected.keys() - {target.key for target in targets})


def rows_of(
    backend: DatabaseBackend, targets: Iterable[Target]
) -> list[tuple[Target, LockRow | None]]:
    """Return each target with its present row, or with None if it has changed."""
    targets = list(targets)
    keys = [one.key for one in targets if is_key(backend, one.key)]
    numbers: dict[Kind, list[int]] = {"lock": [], "share": [], "claim": []}
    for target in targets:
        numbers[target.kind].append(target.number)
    found = [
        *locks_of(backend, keys).filter(pk__in=keys, version__in=numbers["lock"]),
        *claims(backend, keys).filter(version__in=numbers["share"]),
    ]
    now = {Target.of(one): one for one in found}
    return [(target, now.get(target)) for target in targets]


def clear_stale(admin: Any, request: HttpRequest, targets: Iterable[Target]) -> None:
    """Clear the targets that are stale."""
    _end(admin, request, targets, audit.STALE, stale_only=True)


def force(
    admin: Any, request: HttpRequest, targets: Iterable[Target], reason: str
) -> None:
    """End the holds. Raise ValueError if the reason is invalid."""
    reason = audit.reason_of(reason)
    holds = [target for target in targets if target.kind != "claim"]
    _end(admin, request, holds, reason, stale_only=False)


def _selected(
    admin: Any, request: HttpRequest, across: Any
) -> dict[str, LockRow | None] | None:
    """Return the selected locks by key, with None for each that is gone.

    Return None instead if there are too many.
    """
    backend = Source.of(request).database
    if request.POST.get("select_across") == "1":
        selected = {lock.pk: lock for lock in across[: MOST + 1]}
    else:
        # The page's queryset would drop a lock that no longer matches its filter.
        # Such a lock must be reported.
        fields = request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
        chosen = list(map(from_form, fields))
        keys = [key for key in chosen if is_key(backend, key)]
        found = locks_of(backend, keys).in_bulk(keys)
        selected = {key: found.get(key) for key in chosen}
    return selected if _is_accepted(admin, request, len(selected)) else None


def _is_accepted(admin: Any, request: HttpRequest, number: int) -> bool:
    """Return whether one action accepts this number of locks, or show an error."""
    if number <= MOST:
        return True
    text = _(
        "At most %(number)d locks can be selected. Nothing was changed. 'manage.py"
        " reap_locks' clears all stale locks."
    )
    admin.message_user(request, text % {"number": MOST}, messages.ERROR)
    return False


def _end(
    admin: Any,
    request: HttpRequest,
    targets: Iterable[Target],
    reason: str,
    *,
    stale_only: bool,
) -> None:
    """End each target that has not changed since it was shown.

    Write each change to the logs, and report the result to the user.
    """
    backend = Source.of(request).database
    done: dict[audit.What, list[str]] = {}
    refused: dict[str, list[str]] = {}
    trouble = None
    for target in targets:
        try:
            what, lost, change = _end_one(backend, target, stale_only)
        except NotCleared as refusal:
            refused.setdefault(str(refusal), []).append(target.key)
        except LockBackendError as error:
            trouble = str(error)
            break
        else:
            done.setdefault(what, []).append(target.key)
            change %= {"holder": describe(lost, on_page=True)}
            why = _("Reason: %(reason)s") % {"reason": printable(reason)}
            entry = ResourceLock(pk=target.key)
            admin.log_change(request, entry, f"{change} {why}")
            audit.taken(
                what,
                kind=target.kind,
                key=target.key,
                number=target.number,
                lost=lost,
                reason=reason,
                by=request.user.get_username(),
                via="admin",
                database=backend.database,
            )
    for each, keys in done.items():
        text = DONE[each] % {"count": len(keys), "keys": _named(keys)}
        admin.message_user(request, text, messages.SUCCESS)
    for why, keys in refused.items():
        text = UNCHANGED % {"count": len(keys), "reason": why, "keys": _named(keys)}
        admin.message_user(request, text, messages.WARNING)
    if trouble:
        admin.message_user(request, trouble, messages.ERROR)
    elif not done and not refused:
        text = _("None of the selected locks is stale.")
        admin.message_user(request, text, messages.WARNING)


def _end_one(
    backend: DatabaseBackend, target: Target, stale_only: bool
) -> tuple[audit.What, LockRow, str]:
    """End a target that has not changed, or raise NotCleared.

    Return the action, the row before it, and the entry for Django's log.
    """
    if target.kind == "claim":
        claim = take_out(backend, target.key, target.number)
        return "take_out", claim, _("Removed a dead claim from the queue: %(holder)s.")
    if target.kind == "share":
        end: Callable[..., LockRow] = end_share
        cleared = _("Cleared the stale shared lock held by %(holder)s.")
        forced = _("Forced the release of the shared lock held by %(holder)s.")
    else:
        end = clear
        cleared = _("Cleared the stale lock held by %(holder)s.")
        forced = _("Forced the release of the lock held by %(holder)s.")
    lost = end(backend, target.key, target.number, stale_only=stale_only)
    if stale_only:
        return "clear", lost, cleared
    return "force_release", lost, forced


def _named(keys: list[str]) -> str:
    named = ", ".join(map(printable, keys[:NAMED]))
    if (number := len(keys) - NAMED) <= 0:
        return named
    return _("%(named)s and %(number)d more") % {"named": named, "number": number}
