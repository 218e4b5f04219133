"""The admin of locks: list them, clear stale ones, and force releases."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import path
from django.utils.translation import gettext_lazy

from dlocks.admin import control_room
from dlocks.admin.actions import LockActions
from dlocks.admin.base import ReadOnlyAdmin
from dlocks.admin.links import url
from dlocks.admin.target import Target
from dlocks.models import ControlRoom, LockQuerySet, LockState, ResourceLock
from dlocks.operations import LockRow, claims, in_row, name_of, with_positions
from dlocks.text import shown_duration, shows_holder
from dlocks.values import Kept

# Shared holds, and queued claims, on the page of a lock.
SHOWN = 100


class StateFilter(admin.SimpleListFilter):
    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return LockState.choices

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() in LockState.values:
            return queryset.filter(state=self.value())
        return queryset


@admin.register(ResourceLock)
class ResourceLockAdmin(LockActions):
    """A read-only admin.

    A row changes only when the lock is used, or by one of the actions.
    """

    list_display = ("key", "state", "waiting", "who", "begin", "left")
    list_filter = (StateFilter,)
    search_fields = ("key_resource", "holder", "owner_ip")
    ordering = ("key_resource",)
    # The owner is a secret that controls the hold, so no page shows it.
    fields = (
        "key",
        "state",
        "waiting",
        "holder_name",
        "begin",
        "left",
        "end",
        "hold_count",
        "token",
    )
    free_fields = (
        "key",
        "state",
        "waiting",
        "last_holder",
        "last_outcome",
        "begin",
        "end",
        "token",
    )
    readonly_fields = (*fields, "last_holder", "last_outcome")

    def has_clear_permission(self, request: HttpRequest) -> bool:
        return self._may("clear", request)

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        return self._may("force_release", request)

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return self._may("purge", request)

    def _may(self, act: str, request: HttpRequest) -> bool:
        may = request.user.has_perm(f"dlocks.{act}_resourcelock")
        return may and self.backend() is not None

    def get_urls(self) -> list[Any]:
        live = self.admin_site.admin_view(
            lambda request: control_room.view(self.chosen(request, live=True), request)
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

    def _find_kept(self, request: HttpRequest) -> None:
        if (backend := self.backend()) is not None and self.has_view_permission(
            request
        ):
            request.dlocks_kept = backend.kept()  # type: ignore[attr-defined]

    def get_queryset(self, request: HttpRequest) -> LockQuerySet:
        return self.locks(request, getattr(request, "dlocks_kept", Kept()))

    def locks(self, request: HttpRequest, kept: Kept) -> LockQuerySet:
        locks = self.rows_of_alias(super().get_queryset(request))
        return locks.by_clock(kept).with_queue(kept).defer("owner")  # type: ignore[no-any-return]

    # The page of a lock.

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if obj is not None and not in_row(obj):
            # The row of a shared key describes only its last exclusive holder.
            return ("key", "state", "waiting", "token")
        is_free = obj is not None and obj.state == LockState.FREE
        return self.free_fields if is_free else self.fields

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        lock, backend = context.get("original"), self.backend()
        if lock is not None and backend is not None:
            of_key = claims(backend, [lock.pk])
            sharing = of_key.filter(version__isnull=False)
            queued = of_key.filter(version__isnull=True)
            may_force = self.has_force_release_permission(request)
            context |= {
                "shares": [self._row(share, may_force) for share in sharing[:SHOWN]],
                "more_shares": max(0, sharing.count() - SHOWN),
                "queue": [
                    {
                        **self._row(claim, may_force and position is None),
                        "position": position,
                    }
                    for position, claim in with_positions(queued[:SHOWN])
                ],
                "more_waiters": max(0, queued.count() - SHOWN),
                "waits": [
                    {
                        "holder": name_of(claim),
                        "key": self.link(claim.key),
                        "waited": shown_duration(claim.waited),
                    }
                    for claim in backend.inspector.waits_of([lock])[lock.pk]
                ],
                **self.form_of(Target.of(lock)),
                "live": url(self, key=lock.pk),
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

    def _stale_fields(self, lock: LockRow, of_key: Any) -> list[str]:
        """Return the form fields of everything stale on this page."""
        stale = [lock] if lock.state == LockState.STALE and in_row(lock) else []
        return [
            Target.of(one).field
            for one in [*stale, *self._stale_claims(of_key)[:SHOWN]]
        ]


@admin.register(ControlRoom)
class ControlRoomAdmin(ReadOnlyAdmin):
    """The entry of the live page in the index and the sidebar. It has no other URL."""

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return request.user.has_perm("dlocks.view_resourcelock")

    def get_urls(self) -> list[Any]:
        live = self.admin_site.admin_view(
            lambda request: HttpResponseRedirect(url(self))
        )
        return [path("", live, name="dlocks_controlroom_changelist")]
