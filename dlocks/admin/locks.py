"""The admin of locks: list them, clear stale ones, and force releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Self
from urllib.parse import unquote

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from dlocks import audit
from dlocks.admin import control_room
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockBackendError
from dlocks.models import ClaimState, LockQuerySet, LockState, ResourceLock, under
from dlocks.operations import (
    REASON_LENGTH,
    LockRow,
    NotCleared,
    address_of,
    claims,
    clear,
    describe,
    end_share,
    in_row,
    is_column,
    is_unused,
    last_seen_of,
    mode,
    name_of,
    purge,
    reason_of,
    state_of,
    take_out,
    time_left,
)
from dlocks.text import duration, moment, printable, shows_holder
from dlocks.values import Kept

# Locks that one action accepts. The form has two fields for each, and their number must
# stay below DATA_UPLOAD_MAX_NUMBER_FIELDS.
ROWS_PER_STATEMENT = 400

# Shared holds, and queued claims, on the page of a lock.
SHOWN = 100

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


@dataclass(frozen=True)
class Target:
    """The target of an action.

    It is a lock with its version, a shared hold with its token, or a claim with its id.
    """

    key: str
    kind: Literal["lock", "share", "claim"]
    number: int

    @classmethod
    def parse(cls, key: str, field: str) -> Self:
        """Return the target from two fields of a form, or raise ValueError."""
        kind, _, number = field.rpartition(":")
        if kind not in {"", "share", "claim"}:
            raise ValueError(kind)
        return cls(_from_form(key), kind or "lock", int(number))  # type: ignore[arg-type]

    @classmethod
    def of(cls, shown: LockRow) -> Self:
        if isinstance(shown, ResourceLock):
            return cls(shown.pk, "lock", shown.version)
        if shown.version is not None:
            return cls(shown.key_resource, "share", shown.version)
        return cls(shown.key_resource, "claim", shown.pk)

    @property
    def field(self) -> str:
        return str(self.number) if self.kind == "lock" else f"{self.kind}:{self.number}"


class StateFilter(admin.SimpleListFilter):
    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return LockState.choices

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return (
            queryset.filter(state=self.value())
            if self.value() in LockState.values
            else queryset
        )


@admin.register(ResourceLock)
class ResourceLockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """A read-only admin.

    A row changes only when the lock is used, or by one of the actions.
    """

    list_display = ("key", "state", "who", "begin", "left", "waiting")
    list_filter = (StateFilter,)
    search_fields = ("key_resource", "holder", "owner_ip")
    ordering = ("key_resource",)
    # The owner is a secret that controls the hold, so no page shows it.
    fields = readonly_fields = (
        "key",
        "state",
        "status",
        "holder_name",
        "address",
        "begin",
        "end",
        "left",
        "hold_count",
        "waiting",
        "token",
    )
    empty_value_display = "-"
    actions = ("clear_stale_locks", "force_release", "delete_unused_rows")

    class Media:
        css = {"all": ["dlocks/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_clear_permission(self, request: HttpRequest) -> bool:
        return self.backend() is not None and request.user.has_perm(
            "dlocks.clear_resourcelock"
        )

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        return self.backend() is not None and request.user.has_perm(
            "dlocks.force_release_resourcelock"
        )

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return self.backend() is not None and request.user.has_perm(
            "dlocks.purge_resourcelock"
        )

    def get_urls(self) -> list[Any]:
        live = self.admin_site.admin_view(
            lambda request: control_room.view(self, request)
        )
        return [
            path("live/", live, name="dlocks_resourcelock_live"),
            *super().get_urls(),
        ]

    def lookup_allowed(
        self, lookup: str, value: Any, request: HttpRequest | None = None
    ) -> bool:
        # ``?owner__startswith=…`` would reveal the owner letter by letter, although no
        # page shows it.
        return lookup == StateFilter.parameter_name

    def get_list_display(self, request: HttpRequest) -> Any:
        # The order of the rows must not reveal a hidden holder.
        shown = shows_holder()
        return [
            column if shown or column != "who" else "who_unsorted"
            for column in self.list_display
        ]

    def get_search_fields(self, request: HttpRequest) -> Any:
        # Neither must the results of a search.
        return self.search_fields if shows_holder() else ("key_resource",)

    def changelist_view(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        self._find_kept(request)
        return super().changelist_view(request, *args, **kwargs)

    def changeform_view(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        self._find_kept(request)
        return super().changeform_view(request, *args, **kwargs)

    def _find_kept(self, request: HttpRequest) -> None:
        """Load the expired leases that transactions keep.

        This happens once per request, for all its querysets.
        """
        if (backend := self.backend()) is not None and self.has_view_permission(
            request
        ):
            request.dlocks_kept = backend.kept()  # type: ignore[attr-defined]

    def get_queryset(self, request: HttpRequest) -> LockQuerySet:
        return self.locks(request, getattr(request, "dlocks_kept", Kept()))

    def locks(self, request: HttpRequest, kept: Kept) -> LockQuerySet:
        locks: Any = super().get_queryset(request)
        backend = self.backend()
        if backend is not None:
            locks = locks.using(backend.database).filter(under(backend.prefix))
        return locks.by_clock(kept).with_queue(kept).defer("owner")  # type: ignore[no-any-return]

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        # PostgreSQL raises an error for a NUL in a query's parameter.
        return (
            None
            if "\0" in object_id
            else super().get_object(request, object_id, from_field)
        )

    def backend(self) -> DatabaseBackend | None:
        backend = backends[DEFAULT_ALIAS]
        return backend if isinstance(backend, DatabaseBackend) else None

    def _own_backend(self) -> DatabaseBackend:
        backend = self.backend()
        assert backend is not None, "an action needs a backend"  # noqa: S101
        return backend

    # Columns.

    @admin.display(description=gettext_lazy("key"), ordering="key_resource")
    def key(self, lock: LockRow) -> str:
        return _key(lock.pk)

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state(self, lock: LockRow) -> str:
        return _badge(lock)

    @admin.display(description=gettext_lazy("holder"), ordering="holder")
    def who(self, lock: LockRow) -> str | None:
        # The row of a shared key describes only its last exclusive holder.
        if not in_row(lock) or not lock.holder:
            return None
        times = (
            ""
            if lock.state == LockState.FREE or lock.hold_count < 2
            else f" ×{lock.hold_count}"
        )
        return format_html(
            '<span class="dlocks-who">{}{} <small>{}</small></span>',
            name_of(lock),
            times,
            address_of(lock),
        )

    @admin.display(description=gettext_lazy("holder"))
    def who_unsorted(self, lock: LockRow) -> str | None:
        return self.who(lock)

    @admin.display(description=gettext_lazy("holder"))
    def holder_name(self, lock: LockRow) -> str:
        return name_of(lock) or self.empty_value_display

    @admin.display(description=gettext_lazy("IP"))
    def address(self, lock: LockRow) -> str:
        return address_of(lock) or self.empty_value_display

    @admin.display(description=gettext_lazy("acquired"), ordering="begin_time")
    def begin(self, lock: LockRow) -> str:
        if lock.begin_time is None or not in_row(lock):
            return self.empty_value_display
        return _time(lock.begin_time, lock.seconds_held)

    @admin.display(description=gettext_lazy("end of the lease"), ordering="end_time")
    def end(self, lock: LockRow) -> str:
        return _time(lock.end_time, -lock.seconds_left)

    @admin.display(description=gettext_lazy("time left"), ordering="seconds_left")
    def left(self, lock: LockRow) -> str:
        if lock.state == LockState.FREE or not in_row(lock):
            return self.empty_value_display
        return duration(lock.seconds_left) if lock.seconds_left > 0 else time_left(lock)

    @admin.display(description=gettext_lazy("waiters"), ordering="waiting")
    def waiting(self, lock: LockRow) -> str:
        return str(lock.waiting) if lock.waiting else self.empty_value_display

    @admin.display(description=gettext_lazy("token"), ordering="version")
    def token(self, lock: LockRow) -> str:
        # No thousands separators: users compare the token with their logs.
        return str(lock.version)

    def action_checkbox(self, obj: ResourceLock) -> Any:
        return super().action_checkbox(ResourceLock(pk=_to_form(obj.pk)))

    # The page of a lock.

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        # The row of a shared key describes only its last exclusive holder.
        return (
            self.fields
            if obj is None or in_row(obj)
            else ("key", "state", "waiting", "token")
        )

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        lock, backend = context.get("original"), self.backend()
        if lock is not None and backend is not None:
            of_key = claims(backend, [lock.pk])
            sharing, in_line = (
                of_key.filter(version__isnull=False),
                of_key.filter(version__isnull=True),
            )
            may_force = self.has_force_release_permission(request)
            context |= {
                "shares": [self._row(share, may_force) for share in sharing[:SHOWN]],
                "more_shares": max(0, sharing.count() - SHOWN),
                "line": self._places(in_line[:SHOWN], may_force),
                "more_in_line": max(0, in_line.count() - SHOWN),
                **self.form_of(lock),
                "live": control_room.url(self, key=lock.pk),
                "force_lock": (
                    may_force and in_row(lock) and lock.state != LockState.FREE
                ),
                "clear_stale": (
                    self._stale_fields(lock, of_key)
                    if self.has_clear_permission(request)
                    else []
                ),
            }
        return super().render_change_form(request, context, *args, **kwargs)

    def form_of(self, shown: LockRow) -> dict[str, str]:
        """Return the form fields that identify a lock, a shared hold or a claim."""
        target = Target.of(shown)
        return {
            "field": _to_form(target.key),
            "version": target.field,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        }

    def _places(self, in_line: Any, may_force: bool) -> list[dict[str, Any]]:
        place, places = 0, []
        for claim in in_line:
            waits = claim.state == ClaimState.WAITING
            place += waits
            places.append(
                {
                    **self._row(claim, may_force and not waits),
                    "place": place if waits else None,
                }
            )
        return places

    def _row(self, shown: LockRow, may_force: bool = False) -> dict[str, Any]:
        """Return the table row of a lock, a shared hold or a queued claim."""
        target = Target.of(shown)
        if target.kind == "claim":
            left = "" if shown.state == ClaimState.WAITING else last_seen_of(shown)
        else:
            left = (
                duration(shown.seconds_left)
                if shown.seconds_left > 0
                else time_left(shown)
            )
        return {
            **self.form_of(shown),
            "key": _key(target.key),
            "state": _badge(shown),
            "holder": name_of(shown),
            "owner_ip": address_of(shown),
            "begin": (
                None
                if shown.begin_time is None
                else _time(shown.begin_time, shown.seconds_held)
            ),
            "left": left,
            "mode": _("exclusive") if target.kind == "lock" else mode(shown),
            "token": "" if target.kind == "claim" else str(target.number),
            "may_force": may_force,
        }

    def _stale_claims(self, found: Any) -> Any:
        return found.filter(state__in=[ClaimState.STALE, ClaimState.DEAD])

    def _stale_fields(self, lock: LockRow, of_key: Any) -> list[str]:
        """Return the form fields of everything stale on this page."""
        stale = [lock] if lock.state == LockState.STALE and in_row(lock) else []
        return [
            Target.of(one).field
            for one in [*stale, *self._stale_claims(of_key)[:SHOWN]]
        ]

    # Actions.

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
                reason = reason_of(request.POST.get("reason", ""))
            except ValueError as error:
                return self._confirmation(
                    request, self._as_posted(targets), error=str(error)
                )
            self._clear(request, targets, reason)
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
            if lock is not None and lock.state != LockState.FREE
        ]
        shown = sorted(
            [*filter(in_row, locks), *sharing], key=lambda one: Target.of(one).key
        )
        if only:
            shown = [one for one in shown if Target.of(one).field == only]
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
        return self._confirmation(
            request, [(Target.of(one), one) for one in shown], left_out
        )

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
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Delete unused rows"),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "left_out": len(selected) - len(unused),
            "locks": [{**self._row(lock), "end": self.end(lock)} for lock in unused],
        }
        return TemplateResponse(
            request, "admin/dlocks/resourcelock/purge_confirmation.html", context
        )

    def _purge(self, request: HttpRequest, targets: Iterable[Target]) -> None:
        """Delete each row that has not changed since it was shown.

        Write each deletion to the logs, and report the result to the user.
        """
        backend = self._own_backend()
        done: dict[audit.What, list[str]] = {}
        refused: dict[str, list[str]] = {}
        trouble = None
        for target in targets:
            try:
                if target.kind != "lock":
                    raise NotCleared(_("not the row of a key"), None)
                row = purge(backend, target.key, target.number)
            except NotCleared as refusal:
                refused.setdefault(str(refusal), []).append(target.key)
            except LockBackendError as error:
                trouble = str(error)
                break
            else:
                done.setdefault("purge", []).append(target.key)
                self.log_change(
                    request,
                    ResourceLock(pk=target.key),
                    _("Deleted the row of the unused key."),
                )
                self._audit(request, backend, "purge", target, row, audit.UNUSED)
        self._tell(request, done, refused, trouble)

    def _tell(
        self,
        request: HttpRequest,
        done: dict[audit.What, list[str]],
        refused: dict[str, list[str]],
        trouble: str | None,
    ) -> None:
        """Report to the user what happened to the keys, and what was refused."""
        for each, keys in done.items():
            text = DONE[each] % {"count": len(keys), "keys": _named(keys)}
            self.message_user(request, text, messages.SUCCESS)
        for why, keys in refused.items():
            text = UNCHANGED % {
                "count": len(keys),
                "reason": why,
                "keys": _named(keys),
            }
            self.message_user(request, text, messages.WARNING)
        if trouble:
            self.message_user(request, trouble, messages.ERROR)

    def _confirmed(self, request: HttpRequest) -> list[Target] | None:
        """Return the targets of a confirmation, or None if it is incomplete."""
        keys, versions = (
            request.POST.getlist(name)
            for name in (helpers.ACTION_CHECKBOX_NAME, "version")
        )
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
        kept = backend.kept(keys)
        locks = (
            ResourceLock.objects.using(backend.database)
            .by_clock(kept)
            .with_queue(kept)
            .defer("owner")
        )
        which = Q(version__in=numbers["share"]) | Q(
            version__isnull=True, pk__in=numbers["claim"]
        )
        found = [
            *locks.filter(pk__in=keys, version__in=numbers["lock"]),
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
        return HttpResponseRedirect(control_room.back_to(self, request.POST["live"]))

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
        if len(found) <= ROWS_PER_STATEMENT:
            return found
        self._too_many(request)
        return None

    def _confirmation(
        self,
        request: HttpRequest,
        shown: list[tuple[Target, LockRow | None]],
        left_out: int = 0,
        error: str = "",
    ) -> HttpResponse:
        request.current_app = self.admin_site.name
        kinds = {target.kind for target, _now in shown}
        context = {
            **self.admin_site.each_context(request),
            "title": _("Force release"),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "left_out": left_out,
            "any_held": any(
                now is not None and now.state in {LockState.HELD, ClaimState.HELD}
                for _target, now in shown
            ),
            "any_hold": bool(kinds - {"claim"}),
            "any_share": "share" in kinds,
            "any_claim": "claim" in kinds,
            "locks": [
                self._changed(target) if now is None else self._row(now)
                for target, now in shown
            ],
            "reason": request.POST.get("reason", ""),
            "reason_length": REASON_LENGTH,
            "error": error,
            "live": request.POST.get("live"),
            "back": (
                control_room.back_to(self, request.POST["live"])
                if "live" in request.POST
                else None
            ),
        }
        return TemplateResponse(
            request,
            "admin/dlocks/resourcelock/force_release_confirmation.html",
            context,
        )

    def _changed(self, target: Target) -> dict[str, Any]:
        """Return the table row of a target that has changed since it was shown."""
        return {
            "field": _to_form(target.key),
            "version": target.field,
            "key": _key(target.key),
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
                _from_form(key)
                for key in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)
            ]
            found: Any = self.get_queryset(request).in_bulk(
                [key for key in keys if "\0" not in key]
            )
            selected = {key: found.get(key) for key in keys}
        if len(selected) <= ROWS_PER_STATEMENT:
            return selected
        self._too_many(request)
        return None

    def _too_many(self, request: HttpRequest) -> None:
        text = _(
            "At most %(number)d locks can be selected. Nothing was changed. 'manage.py"
            " reap_locks' clears all stale locks."
        )
        self.message_user(
            request, text % {"number": ROWS_PER_STATEMENT}, messages.ERROR
        )

    def _clear(
        self,
        request: HttpRequest,
        targets: Iterable[Target],
        reason: str,
        *,
        stale_only: bool = False,
    ) -> None:
        """Clear each target that has not changed since it was shown.

        Write each change to the logs, and report the result to the user.
        """
        backend = self._own_backend()
        done: dict[audit.What, list[str]] = {}
        refused: dict[str, list[str]] = {}
        trouble = None
        for target in targets:
            try:
                what, lost, change = self._clear_one(backend, target, stale_only)
            except NotCleared as refusal:
                refused.setdefault(str(refusal), []).append(target.key)
            except LockBackendError as error:
                trouble = str(error)
                break
            else:
                done.setdefault(what, []).append(target.key)
                change += " " + _("Reason: %(reason)s") % {"reason": printable(reason)}
                self.log_change(request, ResourceLock(pk=target.key), change)
                self._audit(request, backend, what, target, lost, reason)
        self._tell(request, done, refused, trouble)
        if not (done or refused or trouble):
            self.message_user(
                request, _("None of the selected locks is stale."), messages.WARNING
            )

    def _audit(
        self,
        request: HttpRequest,
        backend: DatabaseBackend,
        what: audit.What,
        target: Target,
        lost: LockRow,
        reason: str,
    ) -> None:
        audit.taken(
            what,
            kind=target.kind,
            key=target.key,
            number=target.number,
            holder=lost.holder,
            owner_ip=lost.owner_ip,
            reason=reason,
            by=request.user.get_username(),
            via="admin",
            database=backend.database,
        )

    def _clear_one(
        self, backend: DatabaseBackend, target: Target, stale_only: bool
    ) -> tuple[audit.What, LockRow, str]:
        """Clear a target that has not changed since it was shown, or raise NotCleared.

        Return the kind of the action, the row as it was before, and the text for the
        log.
        """
        if target.kind == "claim":
            claim = take_out(backend, target.key, target.number)
            return (
                "take_out",
                claim,
                _("Removed a dead claim from the queue: %(holder)s.")
                % {"holder": describe(claim, on_page=True)},
            )
        what: audit.What = "clear" if stale_only else "force_release"
        if target.kind == "share":
            share = end_share(backend, target.key, target.number, stale_only=stale_only)
            text = (
                _("Cleared the stale shared lock held by %(holder)s.")
                if stale_only
                else _("Forced the release of the shared lock held by %(holder)s.")
            )
            return what, share, text % {"holder": describe(share, on_page=True)}
        lock = clear(backend, target.key, target.number, stale_only=stale_only)
        text = (
            _("Cleared the stale lock held by %(holder)s.")
            if stale_only
            else _("Forced the release of the lock held by %(holder)s.")
        )
        return what, lock, text % {"holder": describe(lock, on_page=True)}


def _key(key: str) -> str:
    return format_html('<bdi class="dlocks-key">{}</bdi>', printable(key))


def _badge(shown: LockRow) -> str:
    return format_html(
        '<span class="dlocks-state dlocks-{}">{}</span>', shown.state, state_of(shown)
    )


def _time(value: Any, ago: float) -> str:
    """Return an age, or the time left, with the exact time as its title."""
    text = _("%s ago") if ago >= 0 else _("in %s")
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        value.isoformat(),
        moment(value),
        text % duration(abs(ago)),
    )


def _named(keys: list[str]) -> str:
    named = ", ".join(map(printable, keys[:NAMED]))
    return (
        _("%(named)s and %(number)d more")
        % {
            "named": named,
            "number": len(keys) - NAMED,
        }
        if keys[NAMED:]
        else named
    )


def _to_form(key: str) -> str:
    # Browsers send every line break in a form as CR LF.
    return key.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _from_form(field: str) -> str:
    return unquote(field)
