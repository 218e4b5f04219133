"""Locks in Django's admin: to look at, to clear when stale, and to force free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from dlocks.backends.database import DatabaseBackend
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.exceptions import LockBackendError
from dlocks.models import LockQuerySet, LockState, ResourceLock
from dlocks.oversight import NotCleared, Shown, clear, describe, duration, moment, printable, time_left

# Locks that one action takes on: two fields of the form for each must stay below DATA_UPLOAD_MAX_NUMBER_FIELDS.
AT_ONCE = 400

# Locks that one message names.
NAMED = 10


class StateFilter(admin.SimpleListFilter):
    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return LockState.choices

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        return queryset.filter(state=self.value()) if self.value() in LockState.values else queryset


@admin.register(ResourceLock)
class ResourceLockAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Read-only: a row is changed by holding the lock, and otherwise only by the actions."""

    list_display = ("key", "state", "holder", "owner_ip", "begin", "age", "left", "hold_count", "token")
    list_filter = (StateFilter,)
    search_fields = ("key_resource", "holder", "owner_ip")
    ordering = ("key_resource",)
    # The owner is the capability of the hold, so it is on no page.
    fields = readonly_fields = (
        "key",
        "state",
        "status",
        "holder",
        "owner_ip",
        "begin",
        "end",
        "age",
        "left",
        "hold_count",
        "token",
    )
    actions = ("clear_stale_locks", "force_release")

    class Media:
        css = {"all": ["dlocks/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_clear_permission(self, request: HttpRequest) -> bool:
        return self._backend() is not None and request.user.has_perm("dlocks.clear_resourcelock")

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        return self._backend() is not None and request.user.has_perm("dlocks.force_release_resourcelock")

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest | None = None) -> bool:
        # ?owner__startswith=… would tell the owner letter by letter, though no page shows it.
        return lookup == StateFilter.parameter_name

    def get_queryset(self, request: HttpRequest) -> LockQuerySet:
        locks: Any = super().get_queryset(request)
        backend = self._backend()
        if backend is not None:
            locks = locks.using(backend.database)
        return locks.by_clock().defer("owner")  # type: ignore[no-any-return]

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        # PostgreSQL would rather fail than look for it.
        return None if "\0" in object_id else super().get_object(request, object_id, from_field)

    def _backend(self) -> DatabaseBackend | None:
        backend = backends[DEFAULT_ALIAS]
        return backend if isinstance(backend, DatabaseBackend) else None

    # The columns.

    @admin.display(description=gettext_lazy("key"), ordering="key_resource")
    def key(self, lock: Shown) -> str:
        return format_html('<bdi class="dlocks-key">{}</bdi>', printable(lock.pk))

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state(self, lock: Shown) -> str:
        return format_html('<span class="dlocks-state dlocks-{}">{}</span>', lock.state, LockState(lock.state).label)

    @admin.display(description=gettext_lazy("begin"), ordering="begin_time")
    def begin(self, lock: Shown) -> str | None:
        return None if lock.begin_time is None else _time(lock.begin_time)

    @admin.display(description=gettext_lazy("end"), ordering="end_time")
    def end(self, lock: Shown) -> str:
        return _time(lock.end_time)

    @admin.display(description=gettext_lazy("age"), ordering="seconds_held")
    def age(self, lock: Shown) -> str | None:
        if lock.state == LockState.FREE or lock.seconds_held is None:
            return None
        return duration(lock.seconds_held)

    @admin.display(description=gettext_lazy("time left"), ordering="seconds_left")
    def left(self, lock: Shown) -> str | None:
        if lock.state == LockState.FREE:
            return None
        return duration(lock.seconds_left) if lock.state == LockState.HELD else time_left(lock)

    @admin.display(description=gettext_lazy("version"), ordering="version")
    def token(self, lock: Shown) -> str:
        # People compare it with their logs, where it has no thousands separators.
        return str(lock.version)

    def action_checkbox(self, obj: ResourceLock) -> Any:
        return super().action_checkbox(ResourceLock(pk=_to_form(obj.pk)))

    # The actions.

    @admin.action(description=gettext_lazy("Clear stale locks"), permissions=["clear"])
    def clear_stale_locks(self, request: HttpRequest, queryset: Any) -> None:
        seen = self._selected(request, queryset.filter(state=LockState.STALE))
        if seen is not None:
            versions = [(key, 0 if lock is None else lock.version) for key, lock in seen.items()]
            self._clear(request, versions, _("Cleared the stale lock of %(holder)s."), stale_only=True)

    @admin.action(description=gettext_lazy("Force release"), permissions=["force_release"])
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        if "version" in request.POST:
            keys, versions = request.POST.getlist(helpers.ACTION_CHECKBOX_NAME), request.POST.getlist("version")
            try:
                seen = [(_from_form(key), int(version)) for key, version in zip(keys, versions, strict=True)]
            except ValueError:
                self.message_user(request, _("The confirmation was incomplete: nothing is changed."), messages.ERROR)
                return None
            self._clear(request, seen, _("Forced the release of the lock of %(holder)s."))
            return None
        selected = self._selected(request, queryset.exclude(state=LockState.FREE))
        if selected is None:
            return None
        locks = [lock for lock in selected.values() if lock is not None and lock.state != LockState.FREE]
        if not locks:
            self.message_user(request, _("None of the selected locks is held any more."), messages.WARNING)
            return None
        return self._confirmation(request, locks, left_out=len(selected) - len(locks))

    def _confirmation(self, request: HttpRequest, locks: list[Shown], left_out: int) -> HttpResponse:
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "title": _("Force release"),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
            "left_out": left_out,
            "any_held": any(lock.state == LockState.HELD for lock in locks),
            "locks": [
                {
                    "field": _to_form(lock.pk),
                    "key": self.key(lock),
                    "state": self.state(lock),
                    "holder": printable(lock.holder),
                    "owner_ip": lock.owner_ip,
                    "begin": self.begin(lock),
                    "left": self.left(lock),
                    "version": str(lock.version),
                }
                for lock in locks
            ],
        }
        return TemplateResponse(request, "admin/dlocks/resourcelock/force_release_confirmation.html", context)

    def _selected(self, request: HttpRequest, across: Any) -> dict[str, Shown | None] | None:
        """Return the selected locks by key, None for one that is gone, or None when there are too many."""
        if request.POST.get("select_across") == "1":
            selected = {lock.pk: lock for lock in across[: AT_ONCE + 1]}
        else:
            # Not by the queryset of the page: a lock that has left its filter meanwhile must be told of.
            keys = [_from_form(key) for key in request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)]
            found: Any = self.get_queryset(request).in_bulk([key for key in keys if "\0" not in key])
            selected = {key: found.get(key) for key in keys}
        if len(selected) <= AT_ONCE:
            return selected
        text = _(
            "At most %(number)d locks can be selected: nothing is changed. 'manage.py reap_locks' frees all stale ones."
        )
        self.message_user(request, text % {"number": AT_ONCE}, messages.ERROR)
        return None

    def _clear(
        self, request: HttpRequest, seen: Iterable[tuple[str, int]], change: str, *, stale_only: bool = False
    ) -> None:
        """Clear each key whose version is still the one that was seen, write it to the log, and tell."""
        backend = self._backend()
        assert backend is not None, "there is no action without"  # noqa: S101
        cleared: list[str] = []
        refused: dict[str, list[str]] = {}
        trouble = None
        for key, version in seen:
            try:
                lock = clear(backend, key, version, stale_only=stale_only)
            except NotCleared as reason:
                refused.setdefault(str(reason), []).append(key)
            except LockBackendError as error:
                trouble = str(error)
                break
            else:
                cleared.append(key)
                self.log_change(request, lock, change % {"holder": describe(lock)})
        if cleared:
            text = ngettext(
                "%(count)d lock was cleared: %(keys)s", "%(count)d locks were cleared: %(keys)s", len(cleared)
            )
            self.message_user(request, text % {"count": len(cleared), "keys": _named(cleared)}, messages.SUCCESS)
        for why, keys in refused.items():
            text = ngettext(
                "%(count)d lock was not cleared (%(reason)s): %(keys)s",
                "%(count)d locks were not cleared (%(reason)s): %(keys)s",
                len(keys),
            )
            text %= {"count": len(keys), "reason": why, "keys": _named(keys)}
            self.message_user(request, text, messages.WARNING)
        if trouble:
            self.message_user(request, trouble, messages.ERROR)
        if not (cleared or refused or trouble):
            self.message_user(request, _("None of the selected locks is stale."), messages.WARNING)


def _time(value: Any) -> str:
    return format_html('<time datetime="{}">{}</time>', value.isoformat(), moment(value))


def _named(keys: list[str]) -> str:
    named = ", ".join(map(printable, keys[:NAMED]))
    return _("%(named)s and %(number)d more") % {"named": named, "number": len(keys) - NAMED} if keys[NAMED:] else named


def _to_form(key: str) -> str:
    # A browser sends every line break in a form as CR LF.
    return key.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _from_form(field: str) -> str:
    return unquote(field)
