"""The actions of the admin: clear stale locks, force a release, delete unused rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from dlocks import audit
from dlocks.admin.confirmation import Confirmation
from dlocks.admin.target import Target
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.exceptions import LockBackendError
from dlocks.models import ClaimState, LockState, ResourceLock
from dlocks.operations import (
    LockRow,
    NotCleared,
    clear,
    describe,
    end_share,
    in_row,
    is_unused,
    purge,
    take_out,
)
from dlocks.text import printable

# The action, the row before it, and the entry for Django's log.
Change = tuple[audit.What, LockRow, str]
# Locks that one message names.
NAMED = 10


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
    "purge": ngettext_lazy(
        "%(count)d row was deleted: %(keys)s",
        "%(count)d rows were deleted: %(keys)s",
        "count",
    ),
}


UNCHANGED: Any = ngettext_lazy(
    "%(count)d lock was left unchanged (%(reason)s): %(keys)s",
    "%(count)d locks were left unchanged (%(reason)s): %(keys)s",
    "count",
)


class LockActions(Confirmation):
    """The actions on the list, the page of a lock and the live page."""

    actions = ("clear_stale_locks", "force_release", "delete_unused_rows")

    def _stale_claims(self, found: Any) -> Any:
        return found.filter(state__in=[ClaimState.STALE, ClaimState.DEAD])

    @admin.action(description=gettext_lazy("Clear stale locks"), permissions=["clear"])
    def clear_stale_locks(self, request: HttpRequest, queryset: Any) -> None:
        seen = self._selected(request, queryset.filter(state=LockState.STALE))
        if seen is None:
            return
        found = self._claims(request, seen, self._stale_claims)
        if found is None:
            return
        targets = [Target.of(claim) for claim in found]
        claimed = {target.key for target in targets}
        for key, lock in seen.items():
            # Report a lock that is not stale, unless its key has a stale claim.
            if (
                lock is None
                or (lock.state == LockState.STALE and in_row(lock))
                or key not in claimed
            ):
                targets.append(Target(key, "lock", 0 if lock is None else lock.version))
        if shown := set(request.POST.getlist("shown")):
            # The request comes from the page of a lock. A hold that is stale now may be
            # another one than the page showed.
            targets = [target for target in targets if target.field in shown]
            if not targets:
                text = _(
                    "Nothing was cleared, because the holds that the page showed are"
                    " no longer stale. Check the current state."
                )
                self.message_user(request, text, messages.WARNING)
                return
        self._clear(request, targets, audit.STALE, stale_only=True)

    @admin.action(
        description=gettext_lazy("Force release"), permissions=["force_release"]
    )
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        if "version" in request.POST:
            targets = self._confirmed(request)
            if targets is None:
                return None
            try:
                reason = audit.reason_of(request.POST.get("reason", ""))
            except ValueError as error:
                return self._confirmation(
                    request, self._as_posted(targets), error=str(error)
                )
            self._clear(request, targets, reason, stale_only=False)
            return self._back(request)
        selected = self._selected(request, queryset.exclude(state=LockState.FREE))
        if selected is None:
            return None
        only = request.POST.get("only")
        sharing = self._claims(
            request,
            selected,
            lambda found: found if only else found.filter(version__isnull=False),
        )
        if sharing is None:
            return None
        shared = {share.key_resource for share in sharing}
        locks = [
            lock
            for lock in selected.values()
            if lock is not None and lock.state != LockState.FREE and in_row(lock)
        ]
        shown = sorted(
            ((Target.of(one), one) for one in [*locks, *sharing]),
            key=lambda one: one[0].key,
        )
        if only:
            shown = [one for one in shown if one[0].field == only]
        if not shown:
            self.message_user(
                request,
                _("None of the selected locks is still held."),
                messages.WARNING,
            )
            return self._back(request)
        left_out = (
            0
            if only
            else sum(
                lock is None or (lock.state == LockState.FREE and key not in shared)
                for key, lock in selected.items()
            )
        )
        return self._confirmation(request, shown, left_out)

    @admin.action(description=gettext_lazy("Delete unused rows"), permissions=["purge"])
    def delete_unused_rows(
        self, request: HttpRequest, queryset: Any
    ) -> HttpResponse | None:
        if "version" in request.POST:
            targets = self._confirmed(request)
            if targets is not None:
                self._purge(request, targets)
            return None
        selected = self._selected(request, queryset.filter(state=LockState.FREE))
        if selected is None:
            return None
        unused = [
            lock for lock in selected.values() if lock is not None and is_unused(lock)
        ]
        if not unused:
            text = _("None of the selected keys has been unused for a day.")
            self.message_user(request, text, messages.WARNING)
            return None
        return self.page(
            request,
            "purge_confirmation",
            title=_("Delete unused rows"),
            action_checkbox_name=helpers.ACTION_CHECKBOX_NAME,
            left_out=len(selected) - len(unused),
            locks=[{**self._row(lock), "end": self.end(lock)} for lock in unused],
        )

    def _purge(self, request: HttpRequest, targets: Iterable[Target]) -> None:
        def delete(backend: DatabaseBackend, target: Target) -> Change:
            if target.kind != "lock":
                raise NotCleared(_("not the row of a key"), None)
            row = purge(backend, target.key, target.number)
            return "purge", row, _("Deleted the row of the unused key.")

        self._change(request, targets, audit.UNUSED, delete)

    def _clear(
        self,
        request: HttpRequest,
        targets: Iterable[Target],
        reason: str,
        *,
        stale_only: bool,
    ) -> None:
        def clear_one(backend: DatabaseBackend, target: Target) -> Change:
            what, lost, change = _clear_one(backend, target, stale_only)
            change %= {"holder": describe(lost, on_page=True)}
            why = _("Reason: %(reason)s") % {"reason": printable(reason)}
            return what, lost, f"{change} {why}"

        if not self._change(request, targets, reason, clear_one):
            self.message_user(
                request, _("None of the selected locks is stale."), messages.WARNING
            )

    def _change(
        self,
        request: HttpRequest,
        targets: Iterable[Target],
        reason: str,
        change: Callable[[DatabaseBackend, Target], Change],
    ) -> bool:
        """Change each target that has not changed since it was shown.

        Write each change to the logs, and report the result to the user. Return whether
        there was anything to report.
        """
        backend = self._own_backend()
        done: dict[audit.What, list[str]] = {}
        refused: dict[str, list[str]] = {}
        trouble = None
        for target in targets:
            try:
                what, lost, text = change(backend, target)
            except NotCleared as refusal:
                refused.setdefault(str(refusal), []).append(target.key)
            except LockBackendError as error:
                trouble = str(error)
                break
            else:
                done.setdefault(what, []).append(target.key)
                self.log_change(request, ResourceLock(pk=target.key), text)
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
            self.message_user(request, text, messages.SUCCESS)
        for why, keys in refused.items():
            text = UNCHANGED % {"count": len(keys), "reason": why, "keys": _named(keys)}
            self.message_user(request, text, messages.WARNING)
        if trouble:
            self.message_user(request, trouble, messages.ERROR)
        return bool(done or refused or trouble)


def _clear_one(backend: DatabaseBackend, target: Target, stale_only: bool) -> Change:
    """Clear a target that has not changed, or raise NotCleared."""
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
