"""The admin of locks: the control room, and a live page of each key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dlocks.admin import cells, changes
from dlocks.admin.base import ReadOnlyAdmin, Source
from dlocks.admin.cells import Cells
from dlocks.admin.changelist import LockList, StateFilter
from dlocks.admin.changes import Target, to_form
from dlocks.admin.past import Past
from dlocks.audit import REASON_LENGTH
from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.listing import listed
from dlocks.exceptions import LockBackendError
from dlocks.models import LockClaim, LockQuerySet, LockState, ResourceLock
from dlocks.operations import (
    LockRow,
    claims,
    in_row,
    is_exclusive,
    is_key,
    mode,
    name_of,
    shown,
    time_left,
    with_positions,
)
from dlocks.text import moment, printable, shown_duration, shows_holder
from dlocks.values import KEY_LENGTH

# Shared holds, and queued claims, on the page of a key.
SHOWN = 100
# Seconds between two refreshes of the parts of a page.
NOW, PAST = 2, 15
PARTS = ("now", "hour", "past")


@admin.register(ResourceLock)
class ResourceLockAdmin(ReadOnlyAdmin):
    """A read-only admin.

    A row changes only when the lock is used, or by one of the actions.
    """

    list_display = ("key", "state", "who", "since", "waiting", "act")
    list_filter = (StateFilter,)
    lookups = frozenset({StateFilter.parameter_name})
    list_per_page = 50
    search_fields = ("key_resource", "holder", "owner_ip")
    actions = ("clear_stale_locks", "force_release")
    preserve_filters = False

    class Media:
        css = {"all": ["dlocks/live.css"]}

    # Permissions.

    def has_clear_permission(self, request: HttpRequest) -> bool:
        return self._may("clear", request)

    def has_force_release_permission(self, request: HttpRequest) -> bool:
        return self._may("force_release", request)

    def _may(self, act: str, request: HttpRequest) -> bool:
        may = request.user.has_perm(f"dlocks.{act}_resourcelock")
        return may and Source.of(request).rows is not None

    # The list.

    def get_urls(self) -> list[Any]:
        end = self.admin_site.admin_view(self.end_view)
        return [path("end/", end, name="dlocks_resourcelock_end"), *super().get_urls()]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return LockList

    def get_ordering(self, request: HttpRequest) -> Any:
        is_free = request.GET.get("state") == LockState.FREE
        return ("key_resource",) if is_free else LockList.ordering

    def get_list_display(self, request: HttpRequest) -> Any:
        # The order of the rows must not reveal a hidden holder.
        hidden = {} if shows_holder() else {"who": "who_unsorted"}
        return [hidden.get(column, column) for column in self.list_display]

    def get_queryset(self, request: HttpRequest) -> LockQuerySet:
        source = Source.of(request)
        locks = source.select(ResourceLock.objects.all()).by_clock(source.kept)
        return locks.with_queue(source.kept).defer("owner")  # type: ignore[no-any-return]

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        """Return a lock. A key without a row is free."""
        backend = Source.of(request).rows
        if backend is None or len(object_id) > KEY_LENGTH:
            return None
        if not is_key(backend, object_id):
            return None
        lock = shown(backend, object_id)
        if lock is None:
            lock = ResourceLock(pk=object_id)
            lock.state = LockState.FREE  # type: ignore[attr-defined]
        return lock

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        source = Source.of(request)
        if not self.has_view_permission(request):
            raise PermissionDenied
        if source.backend is not None and source.rows is None:
            return self._listed(request, source.backend, extra_context or {})
        context = self._live(request, Past(self, request), request.path)
        context["title"] = capfirst(self.opts.verbose_name_plural)
        context |= extra_context or {}
        if context["part"] in {"hour", "past"}:
            return self._page(request, "live", **context)
        return self._part_of(super().changelist_view(request, context))

    def _live(
        self, request: HttpRequest, past: Past | None, address: str
    ) -> dict[str, Any]:
        """Return the context of a page that refreshes its parts."""
        query = request.GET.copy()
        part = query.pop("part", [""])[-1]
        query.pop("e", None)
        # No link of the page leads to a part of it.
        request.GET = query  # type: ignore[assignment]
        return {
            "past": past,
            "part": part if part in PARTS else "",
            "query": query.urlencode(),
            "address": f"{address}?{query.urlencode()}" if query else address,
            "every": NOW if request.GET.get("state") != LockState.FREE else PAST,
            "every_past": PAST,
            "as_of": moment(datetime.now(UTC)).rpartition(" ")[2],
        }

    def _part_of(self, response: HttpResponse) -> HttpResponse:
        """Let a response be the part of its page that the request names."""
        context = getattr(response, "context_data", None) or {}
        if (part := context.get("part")) and isinstance(response, TemplateResponse):
            page = context.get("page", "list") if part == "now" else part
            response.template_name = f"admin/dlocks/resourcelock/{page}.html"
        return response

    def _page(self, request: HttpRequest, name: str, **context: Any) -> HttpResponse:
        """Return a page from the template with this name."""
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            **Source.of(request).context,
            **context,
        }
        template = f"admin/dlocks/resourcelock/{name}.html"
        return self._part_of(TemplateResponse(request, template, context))

    def _listed(
        self, request: HttpRequest, backend: Backend, more: dict[str, Any]
    ) -> HttpResponse:
        """Return the page of an alias whose locks are no rows."""
        row, holds, trouble = self.cells(request).row, [], ""
        try:
            for lock in listed(backend):
                waiting = {"waiting": lock.waiting}
                holds += [row(one) | waiting for one in lock.sharers or [lock]]
        except LockBackendError as error:
            trouble = str(error)
        context = self._live(request, None, request.path)
        context |= {
            "title": capfirst(self.opts.verbose_name_plural),
            "every": 10,
            "page": "holds_now",
            "part": context["part"] and "now",
            "holds": holds,
            "trouble": trouble,
            "with_keys": True,
        }
        return self._page(request, "listed", **context | more)

    def cells(self, request: HttpRequest) -> Cells:
        may = {act for act in ("clear", "force_release") if self._may(act, request)}
        return Cells(self.admin_site, Source.of(request), frozenset(may))

    def action_checkbox(self, obj: ResourceLock) -> Any:
        return super().action_checkbox(ResourceLock(pk=to_form(obj.pk)))

    @admin.display(description=gettext_lazy("key"), ordering="key_resource")
    def key(self, lock: LockRow) -> str:
        # The script finds the row again by this id.
        return format_html(
            '<bdi class="dlocks-key" id="{}">{}</bdi>{}',
            cells.identity(lock.pk),
            printable(lock.pk),
            cells.sparkline(lock.bars),
        )

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state(self, lock: LockRow) -> str:
        return cells.badge(lock)

    @admin.display(description=gettext_lazy("holder"), ordering="holder")
    def who(self, lock: LockRow) -> Any:
        if in_row(lock):
            return cells.labelled(_("holder"), cells.holder_of(lock))
        return self._shares(lock)

    @admin.display(description=gettext_lazy("holder"))
    def who_unsorted(self, lock: LockRow) -> Any:
        return self.who(lock)

    @admin.display(description=gettext_lazy("held for"), ordering="begin_time")
    def since(self, lock: LockRow) -> Any:
        if not in_row(lock):
            return None
        if lock.state == LockState.FREE:
            return cells.time_html(lock.end_time, -lock.seconds_left)
        age, left = lock.cells.age(lock), time_left(lock)
        cell = format_html("{} <small>{}</small>", age, left)
        return cells.labelled(_("held for"), cell if age or left else "")

    @admin.display(description=gettext_lazy("waiters"), ordering="waiting")
    def waiting(self, lock: LockRow) -> Any:
        if not lock.waiting:
            return None
        queue = format_html_join(
            "",
            '<li><bdi class="dlocks-holder">{}</bdi> <small>{}{}</small></li>',
            (
                (name_of(claim), shown_duration(claim.seconds_held), self._holds(claim))
                for claim in lock.queue
            ),
        )
        more = _more(lock.waiting - len(lock.queue)) if lock.queue else ""
        cell = format_html(
            '<strong>{}</strong><ol class="dlocks-queue">{}</ol>{}',
            lock.waiting,
            queue,
            more,
        )
        return cells.labelled(_("waiters"), cell)

    @admin.display(description=gettext_lazy("Action"))
    def act(self, lock: LockRow) -> Any:
        if not is_exclusive(lock):
            return None
        return lock.cells.buttons(lock, cells.identity(lock.pk)) or None

    def _holds(self, claim: LockRow) -> SafeString | str:
        holds = ", ".join(map(printable, claim.held_keys))
        return holds and format_html(
            ', {} <bdi class="dlocks-key">{}</bdi>', _("holds"), holds
        )

    def _shares(self, lock: LockRow) -> SafeString:
        """Return the first shared holds of a key, each with its buttons."""
        described_by = cells.identity(lock.pk)
        shares = format_html_join(
            "",
            "<li><span>{} {} <small>{}, {}, {}</small></span> <span>{}</span></li>",
            (
                (
                    cells.who_html(share),
                    cells.badge(share) if share.state == LockState.STALE else "",
                    mode(share),
                    lock.cells.age(share),
                    time_left(share),
                    lock.cells.buttons(share, described_by),
                )
                for share in lock.held_shares
            ),
        )
        more = _more(lock.shares - len(lock.held_shares)) if shares else ""
        return format_html('<ul class="dlocks-shares">{}</ul>{}', shares, more)

    # The page of a key.

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: Any = None,
    ) -> HttpResponse:
        if not self.has_view_permission(request) or request.method == "POST":
            raise PermissionDenied
        key = unquote(object_id)
        lock = self.get_object(request, key)
        if lock is None:
            return HttpResponseRedirect(self._back(request, ""))
        address = self.cells(request).url(key)
        context = self._live(
            request, Past(self, request, lock), address.partition("?")[0]
        )
        if context["part"] not in {"hour", "past"}:
            context |= self._now(request, lock)
        context |= {
            "title": printable(key),
            "key": key,
            "original": lock,
            "page": "key",
            "sql": _sql(Source.of(request).database, key),
        }
        return self._page(request, "change_form", **context | (extra_context or {}))

    def _now(self, request: HttpRequest, lock: ResourceLock) -> dict[str, Any]:
        """Return the holds and the queue of a key."""
        backend, row = Source.of(request).database, self.cells(request).row
        of_key = claims(backend, [lock.pk])
        holds, more_shares = _first(of_key.filter(version__isnull=False))
        queued, more_waiters = _first(of_key.filter(version__isnull=True))
        if is_exclusive(lock):
            holds = [lock, *holds]
        waits = backend.inspector.waits_of([lock])[lock.pk] if holds else []
        return {
            "holds": [row(hold) for hold in holds],
            "is_free": backend.keepers.finds_all,
            "more_shares": more_shares,
            "queue": [
                {**row(claim), "position": position}
                for position, claim in with_positions(queued)
            ],
            "more_waiters": more_waiters,
            "waits": [
                {
                    "holder": name_of(claim),
                    "key": self.cells(request).link(claim.key),
                    "waited": shown_duration(claim.waited),
                }
                for claim in waits
            ],
            "last": (
                {
                    "holder": cells.last_holder(lock),
                    "outcome": lock.get_status_display(),
                    "ended": cells.time_html(lock.end_time, -lock.seconds_left),  # type: ignore[attr-defined]
                    "token": str(lock.version),
                }
                if lock.holder and not holds
                else None
            ),
        }

    # Changes.

    @admin.action(description=gettext_lazy("Clear stale locks"), permissions=["clear"])
    def clear_stale_locks(self, request: HttpRequest, queryset: Any) -> None:
        targets = changes.stale_of(self, request, queryset)
        if targets is not None:
            changes.end(self, request, targets, None)

    @admin.action(
        description=gettext_lazy("Force release"), permissions=["force_release"]
    )
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        selected = changes.held_of(self, request, queryset)
        if selected is None:
            return None
        return self._confirmation(request, *selected, back=request.get_full_path())

    def end_view(self, request: HttpRequest) -> HttpResponse:
        """End the holds that a form names.

        A hold that is not stale needs a confirmation with a reason.
        """
        back = self._back(request, request.POST.get("back", ""))
        if not self.has_view_permission(request) or request.method != "POST":
            raise PermissionDenied
        act = "clear" if "clear" in request.POST else "force_release"
        if not self._may(act, request):
            raise PermissionDenied
        try:
            targets = [Target.parse(field) for field in request.POST.getlist(act)]
        except ValueError:
            targets = []
        if not targets:
            text = _("The confirmation is incomplete. Nothing was changed.")
            self.message_user(request, text, messages.ERROR)
        elif act == "clear":
            changes.end(self, request, targets, None)
        elif "reason" not in request.POST:
            return self._confirmation(request, targets, back=back)
        else:
            try:
                changes.end(self, request, targets, request.POST["reason"])
            except ValueError as error:
                return self._confirmation(request, targets, back=back, error=str(error))
        return HttpResponseRedirect(back)

    def _confirmation(
        self,
        request: HttpRequest,
        targets: list[Target],
        left_out: int = 0,
        *,
        back: str,
        error: str = "",
    ) -> HttpResponse:
        """Return the page that asks for the reason of a forced release."""
        present = changes.rows_of(Source.of(request).database, targets)
        row = self.cells(request).row
        title = _("Force release")
        if len(targets) == 1:
            title = f"{title}: {printable(targets[0].key)}"
        return self._page(
            request,
            "force_release_confirmation",
            title=title,
            back=back,
            left_out=left_out,
            any_held=any(
                now is not None and now.state == LockState.HELD
                for _target, now in present
            ),
            any_share=any(target.kind == "share" for target in targets),
            holds=[
                {
                    "key": cells.key_html(target.key),
                    "state": _("changed in the meantime"),
                    "token": str(target.number),
                    "target": target.field,
                }
                if now is None
                else row(now, buttons=False)
                for target, now in present
            ],
            with_keys=True,
            reason=request.POST.get("reason", ""),
            reason_length=REASON_LENGTH,
            error=error,
        )

    def _back(self, request: HttpRequest, address: str) -> str:
        """Return the page from which a form was sent, or the list."""
        start = reverse(
            "admin:dlocks_resourcelock_changelist", current_app=self.admin_site.name
        )
        if address.startswith(start):
            return address
        query = Source.of(request).query
        return f"{start}?{urlencode(query)}" if query else start


def _first(claims: Any) -> tuple[list[Any], int]:
    """Return the first claims, and the number of the others."""
    found = list(claims[: SHOWN + 1])
    more = max(0, claims.count() - SHOWN) if found[SHOWN:] else 0
    return found[:SHOWN], more


def _more(number: int) -> SafeString | str:
    text = _("and %(number)s more") % {"number": number}
    return format_html("<small>{}</small>", text) if number > 0 else ""


def _sql(backend: DatabaseBackend, key: str) -> list[str]:
    """Return statements that show a key and its claims, for a database client.

    They have no owners. A key that cannot be copied from a page has none.
    """
    if printable(key) != key:
        return []
    literal = key.replace("'", "''")
    if backend.connection.vendor == "mysql":
        literal = literal.replace("\\", "\\\\")
    columns = "version, holder, owner_ip, begin_time, end_time"
    return [
        f"SELECT {more}, {columns} FROM {model._meta.db_table} WHERE key_resource ="
        f" '{literal}' ORDER BY begin_time;"
        for more, model in (("status", ResourceLock), ("id", LockClaim))
    ]
