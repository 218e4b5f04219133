"""The admin of ended holds, which the history records."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dlocks.admin.base import ReadOnlyAdmin, Source
from dlocks.admin.cells import key_html, labelled, time_html, who_html
from dlocks.models import HoldRecord
from dlocks.text import shown_duration


class EndedFilter(admin.SimpleListFilter):
    """A filter by age, since only the database's clock knows the times."""

    title = gettext_lazy("end of the hold")
    parameter_name = "ended"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return [
            ("3600", gettext_lazy("Last hour")),
            ("86400", gettext_lazy("Last 24 hours")),
            ("604800", gettext_lazy("Last 7 days")),
            ("2592000", gettext_lazy("Last 30 days")),
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        seconds = self.value()
        if seconds in dict(self.lookup_choices):
            return queryset.since(int(seconds))
        return queryset


@admin.register(HoldRecord)
class HoldRecordAdmin(ReadOnlyAdmin):
    """A read-only admin of the history."""

    list_display = ("key", "outcome", "who", "ended", "held", "wait")
    list_filter = ("ending", EndedFilter)
    lookups = frozenset({"ending__exact", EndedFilter.parameter_name})
    search_fields = ("key_resource", "holder")
    ordering = ("-end_time",)
    show_full_result_count = False
    fields = readonly_fields = (
        "key",
        "outcome",
        "who",
        "began",
        "ended",
        "held",
        "wait",
        "scope",
        "shared",
        "number",
    )

    def get_queryset(self, request: HttpRequest) -> Any:
        return Source.of(request).select(HoldRecord.objects.all()).with_times()

    @admin.display(description=gettext_lazy("key"), ordering="key_resource")
    def key(self, record: Any) -> str:
        return key_html(record.key_resource)

    @admin.display(description=gettext_lazy("outcome"), ordering="ending")
    def outcome(self, record: Any) -> str:
        return format_html(
            '<span class="dlocks-state dlocks-ended-{}">{}</span>',
            record.ending,
            record.get_ending_display(),
        )

    @admin.display(description=gettext_lazy("holder"))
    def who(self, record: Any) -> Any:
        return labelled(_("holder"), who_html(record))

    @admin.display(description=gettext_lazy("acquired"))
    def began(self, record: Any) -> str:
        ago = record.seconds_ago + record.held.total_seconds()
        return time_html(record.begin_time, ago)

    @admin.display(description=gettext_lazy("ended"), ordering="end_time")
    def ended(self, record: Any) -> Any:
        return labelled(_("ended"), time_html(record.end_time, record.seconds_ago))

    @admin.display(description=gettext_lazy("held for"), ordering="held")
    def held(self, record: Any) -> Any:
        held = shown_duration(max(0.0, record.held.total_seconds()))
        return labelled(_("held for"), held)

    @admin.display(description=gettext_lazy("waited"), ordering="waited")
    def wait(self, record: Any) -> Any:
        waited = shown_duration(record.waited) if record.waited else ""
        return labelled(_("waited"), waited)

    @admin.display(description=gettext_lazy("token"))
    def number(self, record: Any) -> str:
        # No thousands separators: users compare the token with their logs.
        return str(record.token)
