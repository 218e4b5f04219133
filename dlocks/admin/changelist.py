"""The list of locks, whose rows and totals come from one reading."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Case, Count, F, Q, Sum, Value, When, Window
from django.db.models.functions import RowNumber
from django.http import HttpRequest
from django.utils.translation import gettext_lazy

from dlocks.admin.base import AliasChangeList, Source
from dlocks.admin.past import Past
from dlocks.models import ClaimState, LockClaim, LockState
from dlocks.operations import IN_USE, LockRow, maybe_in_use
from dlocks.values import Kept

# Claims shown for each lock and each of their states.
CLAIMS = 3
# Locks in use that are read at once, so that their totals are those of the rows.
MOST = 5000
# The label of each filter, the states that it shows, and whether it shows locks with
# waiters in any state.
FILTERS: dict[str, tuple[Any, list[LockState], bool]] = {
    "": (
        gettext_lazy("in use"),
        [LockState.HELD, LockState.SHARED, LockState.STALE],
        True,
    ),
    "held": (gettext_lazy("held"), [LockState.HELD], False),
    "shared": (gettext_lazy("shared"), [LockState.SHARED], False),
    "stale": (gettext_lazy("stale"), [LockState.STALE], False),
    "waiting": (gettext_lazy("waiting"), [], True),
}


def condition(chosen: str) -> Q:
    _label, states, with_waiters = FILTERS[chosen]
    found = Q(state__in=states)
    return found | Q(waiting__gt=0) if with_waiters else found


def is_shown(lock: LockRow, chosen: str) -> bool:
    """Return whether a lock meets the condition of a filter."""
    _label, states, with_waiters = FILTERS[chosen]
    return lock.state in states or (with_waiters and lock.waiting > 0)


def chosen_state(value: str | None) -> str:
    """Return the filter that an address chooses. An unknown one is ignored."""
    return value if value in {*FILTERS, LockState.FREE} else ""


class StateFilter(admin.SimpleListFilter):
    """The filter by state. Free keys are shown only under their own."""

    title = gettext_lazy("state")
    parameter_name = "state"
    template = "admin/dlocks/resourcelock/states.html"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        labels = [(name, label) for name, (label, *_rest) in FILTERS.items()]
        return [*labels, ("free", gettext_lazy("free"))]

    def choices(self, changelist: Any) -> Any:
        for value, text in self.lookup_choices:
            total = "waiters" if value == "waiting" else value
            yield {
                "name": value or "all",
                "selected": value == changelist.chosen,
                "query_string": changelist.get_query_string(
                    {self.parameter_name: value or None}
                ),
                "display": text,
                "total": changelist.totals.get(total),
            }

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        kept, chosen = Source.of(request).kept, chosen_state(self.value())
        if chosen == LockState.FREE:
            # No claims have to be counted.
            return queryset.filter(~IN_USE).exclude(pk__in=kept.transactions)
        return maybe_in_use(queryset, kept).filter(condition(chosen))


class LockList(AliasChangeList):
    """The list of locks in use, or of free keys.

    The longest queue comes first, because callers are blocked. Then come stale locks,
    because their holders have failed, and then the oldest holds.
    """

    ordering = (
        "-waiting",
        Case(When(state=LockState.STALE, then=Value(0)), default=Value(1)),
        "begin_time",
        "pk",
    )
    totals: dict[str, int]

    def get_results(self, request: HttpRequest) -> None:
        self.chosen = chosen_state(request.GET.get(StateFilter.parameter_name))
        locks = self._locks(request)
        if self._find_kept(request):
            locks = self._locks(request)
        self.paginator = Paginator(locks, self.list_per_page)
        page = self.paginator.get_page(max(1, self.page_num))
        self.page_num, self.result_list = page.number, list(page.object_list)
        self.result_count = self.full_result_count = self.paginator.count
        self.show_full_result_count = self.show_admin_actions = True
        self.show_all = self.can_show_all = False
        self.multi_page = self.paginator.num_pages > 1
        self._add_claims(request)

    def _locks(self, request: HttpRequest) -> Any:
        """Return the locks of the filter. Count those of the search in each state.

        The locks in use and their totals come from one statement.
        """
        found, _duplicates = self.model_admin.get_search_results(
            request, self.root_queryset, self.query
        )
        maybe = maybe_in_use(found, Source.of(request).kept).order_by()
        mine = list(maybe.values_list("pk", flat=True)[: MOST + 1])
        if len(mine) > MOST:
            self.totals = self._count(maybe)
            return self.queryset
        ordering = self.get_ordering(request, found)
        locks = list(found.filter(pk__in=mine).order_by(*ordering))
        locks = [lock for lock in locks if is_shown(lock, "")]
        self.totals = {
            name: sum(is_shown(lock, name) for lock in locks) for name in FILTERS
        }
        self.totals["waiters"] = sum(lock.waiting for lock in locks)
        if self.chosen == LockState.FREE:
            return self.queryset
        return [lock for lock in locks if is_shown(lock, self.chosen)]

    def _count(self, found: Any) -> dict[str, int]:
        totals: dict[str, Any] = {
            # A name must not be that of a column.
            f"total_{name}": Count("pk", filter=condition(name))
            for name in FILTERS
        }
        totals["total_waiters"] = Sum("waiting")
        return {
            name.removeprefix("total_"): int(total or 0)
            for name, total in found.aggregate(**totals).items()
        }

    def _find_kept(self, request: HttpRequest) -> bool:
        """Look for keys that transactions keep, if there may be any.

        Return whether there are any. Then the rows have to be read again.
        """
        source = Source.of(request)
        if source.rows is None:
            return False
        known = self.totals["held"] + self.totals["shared"]
        # The others are stale, or free with waiters.
        if self.totals[""] == known and not source.rows.keepers.finds_all:
            return False
        source.kept = source.rows.keepers.kept()
        if source.kept == Kept():
            return False
        self.root_queryset = self.model_admin.get_queryset(request)
        self.queryset = self.get_queryset(request)
        return True

    def _add_claims(self, request: HttpRequest) -> None:
        """Add its waiters, shared holds and last hour to each lock, as far as shown."""
        admin: Any = self.model_admin
        cells = admin.cells(request)
        bars = Past(admin, request).bars_of([lock.pk for lock in self.result_list])
        for lock in self.result_list:
            lock.cells, lock.bars = cells, bars.get(lock.pk, ())
            lock.queue, lock.held_shares = [], []
        found = {
            lock.pk: lock for lock in self.result_list if lock.waiting or lock.shares
        }
        if not found:
            return
        position = Window(
            RowNumber(),
            partition_by=[F("key_resource"), F("state")],
            order_by=F("id").asc(),
        )
        claims = (
            LockClaim.objects.using(self.root_queryset.db)
            .by_clock(Source.of(request).kept)
            .defer("owner", "channel")
            .filter(key_resource__in=found)
            .exclude(state=ClaimState.DEAD)
            .annotate(position=position)
        )
        for claim in claims.filter(position__lte=CLAIMS).order_by("key_resource", "id"):
            lock = found[claim.key_resource]
            if claim.version is not None:
                lock.held_shares.append(claim)
            elif len(lock.queue) < lock.waiting:
                # The claims are read after the locks, whose numbers count.
                lock.queue.append(claim)

    def url_for_result(self, result: Any) -> str:
        return str(result.cells.url(result.pk))
