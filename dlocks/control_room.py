"""The control room of the admin: the locks of this moment and of the last hour, on a page that keeps itself current."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.contrib.admin.utils import quote
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Count, F, Max, Q, Sum, Window
from django.db.models.functions import Floor, RowNumber
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from dlocks.backends.base import KEY_LENGTH
from dlocks.models import ClaimState, HoldRecord, LockClaim, LockState, under
from dlocks.oversight import Shown, address_of, duration, in_row, moment, name_of, printable, state_of, time_left

if TYPE_CHECKING:
    from dlocks.admin import ResourceLockAdmin

# Locks on one page, and claims behind each.
LOCKS, IN_LINE = 50, 3
# Minutes of the past, and how many holds of them are shown as the longest.
MINUTES, LONGEST = 60, 6
# Holds in the timeline of a key, and how many beside each other.
HOLDS, LANES = 60, 6
# Seconds after which the page asks for each of its parts again.
EVERY = {"now": 2, "past": 15}

# The drawings: units of their view boxes.
WIDTH, HEIGHT, LANE = 1000, 100, 14


def view(admin: ResourceLockAdmin, request: HttpRequest) -> HttpResponse:
    """Show the page; with ``?part=`` one part of it, for its script. With ``?key=`` it is about that key alone."""
    if not admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = admin.admin_site.name
    room = Room(admin, request)
    part = request.GET.get("part")
    if part in EVERY:
        return TemplateResponse(request, f"admin/dlocks/resourcelock/live_{part}.html", {"room": room})
    context = {
        **admin.admin_site.each_context(request),
        "title": _("Control room"),
        "subtitle": printable(room.key) if room.key else None,
        "opts": admin.opts,
        "media": admin.media,
        "room": room,
    }
    return TemplateResponse(request, "admin/dlocks/resourcelock/live.html", context)


def url(admin: ResourceLockAdmin, **query: str | int) -> str:
    """Return the address of the control room."""
    address = reverse("admin:dlocks_resourcelock_live", current_app=admin.admin_site.name)
    return f"{address}?{urlencode(query)}" if query else address


def back_to(admin: ResourceLockAdmin, query: str) -> str:
    """Return the address of the room as it was, by what ``Room.query`` said then."""
    return url(admin, **{name: str(value) for name, value in QueryDict(query).items() if name in {"key", "page"}})


class Room:
    """What the templates show. Each part asks the database only for what is its own, so many times for any number."""

    def __init__(self, admin: ResourceLockAdmin, request: HttpRequest) -> None:
        self.admin = admin
        self.request = request
        key = request.GET.get("key", "")
        # PostgreSQL would rather fail than look for a NUL.
        self.key = key if "\0" not in key and len(key) <= KEY_LENGTH else ""
        self.every = EVERY

    # Now.

    @cached_property
    def as_of(self) -> str:
        return moment(datetime.now(UTC)).rpartition(" ")[2]

    @cached_property
    def query(self) -> str:
        """What brings this page of the room back."""
        return urlencode(self._of_page(self.page.number))

    @cached_property
    def _busy(self) -> Any:
        locks = self.admin.get_queryset(self.request).filter(~Q(state=LockState.FREE) | Q(waiting__gt=0))
        return locks.filter(pk=self.key) if self.key else locks

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many locks there are in each state, and how many callers wait."""
        by_state = {
            str(state): Count("pk", filter=Q(state=state))
            for state in (LockState.HELD, LockState.SHARED, LockState.STALE)
        }
        counts = self._busy.aggregate(total=Count("pk"), line=Sum("waiting", default=0), **by_state)
        return {name: int(number) for name, number in counts.items()}

    @cached_property
    def page(self) -> Any:
        # The longest line first, and then the oldest hold.
        paginator = Paginator(self._busy.order_by("-waiting", "begin_time", "pk"), LOCKS)
        # Known already.
        paginator.count = self.counts["total"]
        return paginator.get_page(self.request.GET.get("page"))

    @property
    def previous_page(self) -> str:
        return url(self.admin, **self._of_page(self.page.previous_page_number()))

    @property
    def next_page(self) -> str:
        return url(self.admin, **self._of_page(self.page.next_page_number()))

    def _of_page(self, number: int) -> dict[str, str | int]:
        return {**({"key": self.key} if self.key else {}), "page": number}

    @cached_property
    def locks(self) -> list[dict[str, Any]]:
        """The rows of the table."""
        locks = list(self.page.object_list)
        lines = self._lines([lock.pk for lock in locks if lock.waiting])
        may_force = self.admin.has_force_release_permission(self.request)
        return [self._row(lock, lines.get(lock.pk, []), may_force) for lock in locks]

    def _lines(self, keys: Sequence[str]) -> dict[str, list[Shown]]:
        """Return the first of those who wait for each of the keys."""
        lines: dict[str, list[Shown]] = {}
        if keys:
            place = Window(RowNumber(), partition_by=F("key_resource"), order_by=F("id").asc())
            waiting = LockClaim.objects.using(self._busy.db).by_clock().defer("owner", "channel")
            waiting = waiting.filter(key_resource__in=keys, state=ClaimState.WAITING).annotate(place=place)
            for claim in waiting.filter(place__lte=IN_LINE).order_by("key_resource", "id"):
                lines.setdefault(claim.key_resource, []).append(claim)
        return lines

    def _row(self, lock: Shown, line: Sequence[Shown], may_force: bool) -> dict[str, Any]:
        alone = in_row(lock) and lock.state != LockState.FREE
        known = {
            "holder": name_of(lock) or _("unknown"),
            "owner_ip": address_of(lock),
            "held_for": "" if lock.begin_time is None else duration(lock.seconds_held),
            "since": None if lock.begin_time is None else moment(lock.begin_time),
            "left": duration(lock.seconds_left) if lock.seconds_left > 0 else time_left(lock),
            # Of the time that it has when it was renewed, as far as is known.
            "share_left": self._share(lock.seconds_left),
        }
        return {
            # Where the script finds it again.
            "id": "lock-" + hashlib.blake2s(lock.pk.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest(),
            "key": printable(lock.pk),
            "url": reverse(
                "admin:dlocks_resourcelock_change",
                args=[quote(lock.pk)],
                current_app=self.admin.admin_site.name,
            ),
            "state": lock.state,
            "label": state_of(lock),
            **(known if alone else {}),
            "waiting": lock.waiting,
            "line": [{"holder": name_of(claim), "waited": duration(claim.seconds_held)} for claim in line],
            "more_in_line": max(0, lock.waiting - len(line)),
            **(self.admin.form_of(lock) if may_force and alone else {}),
        }

    def _share(self, seconds_left: float) -> int:
        backend = self.admin.backend()
        ttl = max(seconds_left, 1.0 if backend is None else backend.ttl)
        return round(100 * max(0.0, seconds_left) / ttl)

    # The past.

    @cached_property
    def has_history(self) -> bool:
        backend = self.admin.backend()
        return backend is not None and backend.history

    @cached_property
    def _ended(self) -> Any:
        backend = self.admin.backend()
        ended = HoldRecord.objects.using(self._busy.db).filter(under("" if backend is None else backend.prefix))
        return ended.filter(key_resource=self.key) if self.key else ended.all()

    @cached_property
    def contention(self) -> dict[str, Any]:
        """The holds of each minute of the last hour: how many there were, and how many of them had been waited for."""
        by_minute = (
            self._ended.since(MINUTES * 60)
            .with_times()
            .annotate(minute=Floor(F("seconds_ago") / 60.0))
            .values("minute")
            .annotate(holds=Count("pk"), waits=Count("pk", filter=Q(waited__gt=0)), longest=Max("waited"))
            .order_by("minute")
        )
        found = {min(MINUTES - 1, max(0, int(row["minute"]))): row for row in by_minute}
        holds, waits = (sum(row[name] for row in found.values()) for name in ("holds", "waits"))
        most = max((row["holds"] for row in found.values()), default=0)
        step = WIDTH / MINUTES
        bars = []
        for minute, row in found.items():
            total, waited = (_part(row[name], most, HEIGHT) for name in ("holds", "waits"))
            bars.append(
                {
                    "x": _unit((MINUTES - 1 - minute) * step + step * 0.1),
                    "width": _unit(step * 0.8),
                    "total": {"y": _unit(HEIGHT - total), "height": _unit(total)},
                    "waited": {"y": _unit(HEIGHT - waited), "height": _unit(waited)},
                    "title": _("%(minute)d min ago: %(holds)d holds, %(waits)d of them waited for")
                    % {"minute": minute, "holds": row["holds"], "waits": row["waits"]},
                }
            )
        return {
            "bars": bars,
            "most": most,
            "holds": holds,
            "waits": waits,
            "percent": round(100 * waits / holds) if holds else 0,
            "longest": duration(max((row["longest"] for row in found.values()), default=0.0)),
        }

    @cached_property
    def longest(self) -> list[dict[str, Any]]:
        """The longest holds of the last hour."""
        found = list(self._ended.since(MINUTES * 60).with_times().order_by("-held", "-id")[:LONGEST])
        longest = max((_seconds(record) for record in found), default=0.0)
        return [{**self._record(record), "share": _part(_seconds(record), longest, 100)} for record in found]

    @cached_property
    def timeline(self) -> dict[str, Any] | None:
        """The last holds of the key, each where it was in time, from the first of them until now."""
        if not self.key:
            return None
        found = list(self._ended.with_times().order_by("-token")[:HOLDS])
        holds = [(record.seconds_ago + _seconds(record), record.seconds_ago, self._record(record)) for record in found]
        lock = self._busy.first()
        if lock is not None and in_row(lock) and lock.begin_time is not None and lock.state != LockState.FREE:
            current = {"ending": "now", "label": state_of(lock), "holder": name_of(lock)}
            holds.insert(0, (lock.seconds_held, 0.0, {**current, "held": duration(lock.seconds_held)}))
        holds.sort(key=lambda hold: -hold[0])
        span = max((began for began, _ended, _record in holds), default=0.0) or 1.0
        lanes: list[float] = []
        bars = []
        for began, ended, record in holds:
            # The first lane that is free by then; holds are beside each other where the key was shared.
            lane = next((number for number, free in enumerate(lanes) if free >= began), min(len(lanes), LANES - 1))
            lanes[lane : lane + 1] = [ended]
            width = max(3.0, (began - ended) / span * WIDTH)
            bars.append(
                {
                    "x": _unit(min(WIDTH - width, (1 - began / span) * WIDTH)),
                    "y": _unit(lane * LANE + 2),
                    "width": _unit(width),
                    "height": _unit(LANE - 4),
                    "ending": record["ending"],
                    "title": f"{record['holder']}, {record['held']}, {record['label']}",
                }
            )
        return {
            "bars": bars,
            "height": str(max(1, len(lanes)) * LANE),
            "span": duration(span),
            "holds": [record for _began, _ended, record in reversed(holds) if record["ending"] != "now"],
        }

    def _record(self, record: Any) -> dict[str, Any]:
        return {
            "key": printable(record.key_resource),
            "url": url(self.admin, key=record.key_resource),
            "holder": name_of(record),
            "begin": moment(record.begin_time),
            "held": duration(_seconds(record)),
            "waited": duration(record.waited) if record.waited else "",
            "token": str(record.token),
            "ending": str(record.ending),
            "label": record.get_ending_display(),
        }


def _seconds(record: Any) -> float:
    return max(0.0, float(record.held.total_seconds()))


def _part(value: float, whole: float, of: int) -> int:
    """Return the value's share of the whole; what is there at all is to be seen."""
    return 0 if value <= 0 else max(1, round(of * value / whole))


def _unit(value: float) -> str:
    # A text, which no template writes with a comma.
    return f"{value:.2f}"
