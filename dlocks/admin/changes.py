"""What the actions and the buttons of the admin end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self, cast
from urllib.parse import unquote

from django.contrib import messages
from django.contrib.admin import helpers
from django.db.models import Q
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from dlocks import audit, operations
from dlocks.admin.base import Source
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.exceptions import LockBackendError
from dlocks.models import ClaimState, LockState, ResourceLock
from dlocks.operations import (
    Kind,
    LockRow,
    NotCleared,
    claims,
    describe,
    is_column,
    is_exclusive,
    is_key,
    locks_of,
    shares,
)
from dlocks.text import NAMED, printable

# Locks that one action accepts. The form has a field for each, and their number must
# stay below DATA_UPLOAD_MAX_NUMBER_FIELDS.
MOST = 400

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
# The messages of Django's log, by act and by kind of target.
LOGGED: dict[tuple[audit.What, Kind], Any] = {
    ("clear", "lock"): gettext_lazy("Cleared the stale lock held by %(holder)s."),
    ("clear", "share"): gettext_lazy(
        "Cleared the stale shared lock held by %(holder)s."
    ),
    ("force_release", "lock"): gettext_lazy(
        "Forced the release of the lock held by %(holder)s."
    ),
    ("force_release", "share"): gettext_lazy(
        "Forced the release of the shared lock held by %(holder)s."
    ),
    ("take_out", "claim"): gettext_lazy(
        "Removed a dead claim from the queue: %(holder)s."
    ),
}


@dataclass(frozen=True)
class Target:
    """What an operator ends.

    It is a lock with its version, a shared hold with its token, or a claim with its id.
    """

    key: str
    kind: Kind
    number: int

    @classmethod
    def parse(cls, field: str) -> Self:
        """Return the target from a field of a form, or raise ValueError."""
        kind, number, key = field.split(" ", 2)
        if kind not in {"lock", "share", "claim"} or not is_column(int(number)):
            raise ValueError(field)
        return cls(unquote(key), cast("Kind", kind), int(number))

    @classmethod
    def of(cls, shown: LockRow) -> Self:
        if isinstance(shown, ResourceLock):
            return cls(shown.pk, "lock", shown.version)
        if shown.version is not None:
            return cls(shown.key_resource, "share", shown.version)
        return cls(shown.key_resource, "claim", shown.pk)

    @property
    def field(self) -> str:
        return f"{self.kind} {self.number} {to_form(self.key)}"


def to_form(key: str) -> str:
    # Browsers send every line break in a form as CR LF.
    return key.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def stale_of(admin: Any, request: HttpRequest, found: Any) -> list[Target] | None:
    """Return everything stale on the selected keys, or None if it is too much.

    A selected lock that is not stale is included, so that it is reported, unless its
    key has a stale claim.
    """
    selected = _selected(request, found.filter(state=LockState.STALE))
    of_keys = claims(Source.of(request).database, selected)
    targets = [Target.of(claim) for claim in of_keys.filter(STALE)]
    claimed = {target.key for target in targets}
    targets += [
        Target(key, "lock", 0 if lock is None else lock.version)
        for key, lock in selected.items()
        if lock is None
        or (lock.state == LockState.STALE and is_exclusive(lock))
        or key not in claimed
    ]
    return targets if _is_accepted(admin, request, len(targets)) else None


def held_of(
    admin: Any, request: HttpRequest, found: Any
) -> tuple[list[Target], int] | None:
    """Return the holds on the selected keys, and the number of keys without one.

    Return None if there are none, or too many.
    """
    selected = _selected(request, found.exclude(state=LockState.FREE))
    holds = [
        *shares(Source.of(request).database, selected),
        *(
            lock
            for lock in selected.values()
            if lock is not None and is_exclusive(lock)
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
    backend: DatabaseBackend, targets: list[Target]
) -> list[tuple[Target, LockRow | None]]:
    """Return each target with its present row, or with None if it has changed."""
    keys = [one.key for one in targets if is_key(backend, one.key)]
    numbers = [one.number for one in targets]
    found = [
        *locks_of(backend, keys).filter(pk__in=keys, version__in=numbers),
        *claims(backend, keys).filter(version__in=numbers),
    ]
    now = {Target.of(one): one for one in found}
    return [(target, now.get(target)) for target in targets]


def _selected(request: HttpRequest, across: Any) -> dict[str, LockRow | None]:
    """Return the selected locks by key, with None for each that is gone."""
    if request.POST.get("select_across") == "1":
        return {lock.pk: lock for lock in across[: MOST + 1]}
    # The page's queryset would drop a lock that no longer matches its filter. Such a
    # lock must be reported.
    backend = Source.of(request).database
    fields = request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
    chosen = list(map(unquote, fields))
    keys = [key for key in chosen if is_key(backend, key)]
    found = locks_of(backend, keys).in_bulk(keys)
    return {key: found.get(key) for key in chosen}


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


def end(
    admin: Any, request: HttpRequest, targets: Iterable[Target], reason: str | None
) -> None:
    """End each target that has not changed since it was shown.

    If the reason is None, clear the stale ones. Otherwise end the holds, or raise
    ValueError if the reason is invalid. Write each change to the logs, and report the
    result to the user.
    """
    if reason is not None:
        reason = audit.reason_of(reason)
        targets = [target for target in targets if target.kind != "claim"]
    backend = Source.of(request).database
    ends: audit.What = "clear" if reason is None else "force_release"
    done: dict[audit.What, list[str]] = {}
    refused: dict[str, list[str]] = {}
    trouble = None
    for target in targets:
        what: audit.What = "take_out" if target.kind == "claim" else ends
        try:
            lost = operations.end(
                backend,
                target.kind,
                target.key,
                target.number,
                reason=reason,
                by=request.user.get_username(),
                via="admin",
                what=what,
            )
        except NotCleared as refusal:
            refused.setdefault(str(refusal), []).append(target.key)
        except LockBackendError as error:
            trouble = str(error)
            break
        else:
            done.setdefault(what, []).append(target.key)
            change = LOGGED[what, target.kind]
            change %= {"holder": describe(lost, on_page=True)}
            why = _("Reason: %(reason)s") % {"reason": printable(reason or audit.STALE)}
            entry = ResourceLock(pk=target.key)
            admin.log_change(request, entry, f"{change} {why}")
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


def _named(keys: list[str]) -> str:
    named = ", ".join(map(printable, keys[:NAMED]))
    if (number := len(keys) - NAMED) <= 0:
        return named
    return _("%(named)s and %(number)d more") % {"named": named, "number": number}
