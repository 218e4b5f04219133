"""The page that confirms a forced release, and the choice of locks before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from django.contrib import messages
from django.contrib.admin import helpers
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from dlocks.admin.columns import LockColumns, key_html
from dlocks.admin.links import back_to
from dlocks.admin.target import Target, from_form
from dlocks.audit import REASON_LENGTH
from dlocks.models import ClaimState, LockState
from dlocks.operations import LockRow, claims, is_column, locks_of

# Locks that one action accepts. The form has two fields for each, and their number must
# stay below DATA_UPLOAD_MAX_NUMBER_FIELDS.
ROWS_PER_STATEMENT = 400


class Confirmation(LockColumns):
    """The targets of an action, and the page that confirms a forced release."""

    def _confirmed(self, request: HttpRequest) -> list[Target] | None:
        """Return the targets of a confirmation, or None if it is incomplete."""
        keys = request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
        versions = request.POST.getlist("version")
        try:
            return [
                Target.parse(key, version)
                for key, version in zip(keys, versions, strict=True)
            ]
        except ValueError:
            self.message_user(
                request,
                _("The confirmation is incomplete. Nothing was changed."),
                messages.ERROR,
            )
            return None

    def _as_posted(
        self, targets: Iterable[Target]
    ) -> list[tuple[Target, LockRow | None]]:
        """Return each target with its present row, or with None if it has changed."""
        backend = self._own_backend()
        targets = list(targets)
        keys = [
            target.key
            for target in targets
            if "\0" not in target.key and target.key.startswith(backend.prefix)
        ]
        numbers: dict[str, list[int]] = {"lock": [], "share": [], "claim": []}
        for target in targets:
            if is_column(target.number):
                numbers[target.kind].append(target.number)
        which = Q(version__in=numbers["share"]) | Q(
            version__isnull=True, pk__in=numbers["claim"]
        )
        found = [
            *locks_of(backend, keys).filter(pk__in=keys, version__in=numbers["lock"]),
            *claims(backend, keys).filter(which),
        ]
        now = {Target.of(one): one for one in found}
        return [(target, now.get(target)) for target in targets]

    def _back(self, request: HttpRequest) -> HttpResponse | None:
        """Return a redirect to the live page if the request came from there.

        Otherwise return None, and the admin goes back to the list.
        """
        if "live" not in request.POST:
            return None
        return HttpResponseRedirect(back_to(self, request.POST["live"]))

    def _claims(
        self, request: HttpRequest, keys: Iterable[str], wanted: Callable[[Any], Any]
    ) -> list[LockRow] | None:
        """Return the claims on the keys that ``wanted`` keeps.

        Return None if there are too many.
        """
        backend = self._own_backend()
        found = list(
            wanted(claims(backend, [key for key in keys if "\0" not in key]))[
                : ROWS_PER_STATEMENT + 1
            ]
        )
        return found if self._can_select(request, len(found)) else None

    def _confirmation(
        self,
        request: HttpRequest,
        shown: list[tuple[Target, LockRow | None]],
        left_out: int = 0,
        error: str = "",
    ) -> HttpResponse:
        kinds = {target.kind for target, _now in shown}
        any_hold, live = bool(kinds - {"claim"}), request.POST.get("live")
        return self.page(
            request,
            "force_release_confirmation",
            title=_("Force release") if any_hold else _("Remove from the queue"),
            action_checkbox_name=helpers.ACTION_CHECKBOX_NAME,
            left_out=left_out,
            any_held=any(
                now is not None and now.state in {LockState.HELD, ClaimState.HELD}
                for _target, now in shown
            ),
            any_hold=any_hold,
            any_share="share" in kinds,
            any_claim="claim" in kinds,
            locks=[
                self._changed(target) if now is None else self._row(now)
                for target, now in shown
            ],
            reason=request.POST.get("reason", ""),
            reason_length=REASON_LENGTH,
            error=error,
            live=live,
            back=None if live is None else back_to(self, live),
        )

    def _changed(self, target: Target) -> dict[str, Any]:
        """Return the table row of a target that has changed since it was shown."""
        return {
            **self.form_of(target),
            "key": key_html(target.key),
            "state": _("changed in the meantime"),
            "token": "" if target.kind == "claim" else str(target.number),
        }

    def _selected(
        self, request: HttpRequest, across: Any
    ) -> dict[str, LockRow | None] | None:
        """Return the selected locks by key, with None for each that is gone.

        Return None instead if there are too many.
        """
        if request.POST.get("select_across") == "1":
            selected = {lock.pk: lock for lock in across[: ROWS_PER_STATEMENT + 1]}
        else:
            # The page's queryset would drop a lock that no longer matches its filter.
            # Such a lock must be reported.
            keys = [
                from_form(key)
                for key in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
            ]
            found: Any = self.get_queryset(request).in_bulk(
                [key for key in keys if "\0" not in key]
            )
            selected = {key: found.get(key) for key in keys}
        return selected if self._can_select(request, len(selected)) else None

    def _can_select(self, request: HttpRequest, number: int) -> bool:
        """Return whether one action accepts this number of locks, or show an error."""
        if number <= ROWS_PER_STATEMENT:
            return True
        text = _(
            "At most %(number)d locks can be selected. Nothing was changed. 'manage.py"
            " reap_locks' clears all stale locks."
        )
        self.message_user(
            request, text % {"number": ROWS_PER_STATEMENT}, messages.ERROR
        )
        return False
