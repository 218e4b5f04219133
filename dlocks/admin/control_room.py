"""The live page of the admin: current locks, and the holds of the last hour.

The page refreshes itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Protocol

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

from dlocks.backends.database.backend import DatabaseBackend
from dlocks.models import ClaimState, HoldRecord, LockClaim, LockState, under
from dlocks.operations import LockRow, address_of, in_row, name_of, state_of, time_left
from dlocks.text import duration, moment, printable
from dlocks.values import KEY_LENGTH, Kept

# Locks per page, and waiters shown for each lock.
LOCKS, IN_QUEUE = 50, 3
# Minutes of history, and the number of longest holds shown.
MINUTES, LONGEST = 60, 6
# Holds in the timeline of a key, and rows in which overlapping holds are drawn.
HOLDS, LANES = 60, 6
# Seconds between two refreshes of each part of the page.
EVERY = {"now": 2, "past": 15}
# Sizes of the charts, in units of their view boxes.
WIDTH, HEIGHT, LANE = 1000, 100, 14


class LockAdmin(Protocol):
    """The part of the admin of locks that the page uses."""

    admin_site: Any
    opts: Any

    @property
    def media(self) -> Any: ...
    def has_view_permission(self, request: HttpRequest) -> bool: ...
    def has_force_release_permission(self, request: HttpRequest) -> bool: ...
    def backend(self) -> DatabaseBackend | None: ...
    def locks(self, request: HttpRequest, kept: Kept) -> Any: ...
    def form_of(self, shown: LockRow) -> dict[str, str]: ...


def view(admin: LockAdmin, request: HttpRequest) -> HttpResponse:
    """Return the page.

    With ``?part=``, return one part of it, for the page's script. With ``?key=``, show
    only that key.
    """
    if not admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = admin.admin_site.name
    room = Room(admin, request)
    part = request.GET.get("part")
    if part in EVERY:
        return TemplateResponse(
            request, f"admin/dlocks/resourcelock/live_{part}.html", {"room": room}
        )
    context = {
        **admin.admin_site.each_context(request),
        "title": _("Control room"),
        "subtitle": printable(room.key) if room.key else None,
        "opts": admin.opts,
        "media": admin.media,
        "room": room,
    }
    return TemplateResponse(request, "admin/dlocks/resourcelock/live.html", context)


def url(admin: LockAdmin, **query: str | int) -> str:
    """Return the address of the live page."""
    address = reverse(
        "admin:dlocks_resourcelock_live", current_app=admin.admin_site.name
    )
    return f"{address}?{urlencode(query)}" if query else address


def back_to(admin: LockAdmin, query: str) -> str:
    """Return the address of the page that had this ``Room.query``."""
    return url(
        admin,
        **{
            name: str(value)
            for name, value in QueryDict(query).items()
            if name in {"key", "page"}
        },
    )


class Room:
    """The context of the templates.

    Each part runs only its own queries, whose number does not depend on that of locks.
    """

    def __init__(self, admin: LockAdmin, request: HttpRequest) -> None:
        self.admin = admin
        self.request = request
        key = request.GET.get("key", "")
        # PostgreSQL raises an error for a NUL in a query's parameter.
        self.key = key if "\0" not in key and len(key) <= KEY_LENGTH else ""
        self.every = EVERY
        # Loaded only if a lease looks stale.
        self._kept = Kept()

    # The part "now": current locks.

    @cached_property
    def as_of(self) -> str:
        return moment(datetime.now(UTC)).rpartition(" ")[2]

    @cached_property
    def query(self) -> str:
        """Return the query string that leads back to this page."""
        return urlencode(self._of_page(self.page.number))

    @property
    def _busy(self) -> Any:
        locks = self.admin.locks(self.request, self._kept).filter(
            ~Q(state=LockState.FREE) | Q(waiting__gt=0)
        )
        return locks.filter(pk=self.key) if self.key else locks

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of locks in each state, and the number of waiters."""
        counts = self._count()
        return self._count() if counts["stale"] and self._find_kept() else counts

    def _find_kept(self) -> bool:
        """Load expired leases that transactions keep; return whether there are any."""
        if (backend := self.admin.backend()) is not None:
            self._kept = backend.kept([self.key] if self.key else None)
        return self._kept != Kept()

    def _count(self) -> dict[str, int]:
        by_state = {
            str(state): Count("pk", filter=Q(state=state))
            for state in (LockState.HELD, LockState.SHARED, LockState.STALE)
        }
        counts = self._busy.aggregate(
            total=Count("pk"), line=Sum("waiting", default=0), **by_state
        )
        return {name: int(number) for name, number in counts.items()}

    @cached_property
    def page(self) -> Any:
        total = self.counts["total"]
        # The longest queue comes first, then the oldest hold.
        paginator = Paginator(
            self._busy.order_by("-waiting", "begin_time", "pk"), LOCKS
        )
        # The number is known, so the paginator need not query it again.
        paginator.count = total
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
        """Return the rows of the table."""
        locks = list(self.page.object_list)
        lines = self._lines([lock.pk for lock in locks if lock.waiting])
        may_force = self.admin.has_force_release_permission(self.request)
        return [self._row(lock, lines.get(lock.pk, []), may_force) for lock in locks]

    def _lines(self, keys: Sequence[str]) -> dict[str, list[LockRow]]:
        """Return the first waiters of each of the keys."""
        lines: dict[str, list[LockRow]] = {}
        if keys:
            place = Window(
                RowNumber(), partition_by=F("key_resource"), order_by=F("id").asc()
            )
            waiting = (
                LockClaim.objects.using(self._busy.db)
                .by_clock()
                .defer("owner", "channel")
            )
            waiting = waiting.filter(
                key_resource__in=keys, state=ClaimState.WAITING
            ).annotate(place=place)
            for claim in waiting.filter(place__lte=IN_QUEUE).order_by(
                "key_resource", "id"
            ):
                lines.setdefault(claim.key_resource, []).append(claim)
        return lines

    def _row(
        self, lock: LockRow, line: Sequence[LockRow], may_force: bool
    ) -> dict[str, Any]:
        alone = in_row(lock) and lock.state != LockState.FREE
        known = {
            "holder": name_of(lock) or _("unknown"),
            "owner_ip": address_of(lock),
            "held_for": "" if lock.begin_time is None else duration(lock.seconds_held),
            "since": None if lock.begin_time is None else moment(lock.begin_time),
            "left": (
                duration(lock.seconds_left)
                if lock.seconds_left > 0
                else time_left(lock)
            ),
            # The percentage of the backend's ttl that is left.
            "share_left": self._share(lock.seconds_left),
        }
        return {
            # The script finds the row again by this id.
            "id": (
                "lock-"
                + hashlib.blake2s(
                    lock.pk.encode("utf-8", "surrogatepass"), digest_size=8
                ).hexdigest()
            ),
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
            "line": [
                {"holder": name_of(claim), "waited": duration(claim.seconds_held)}
                for claim in line
            ],
            "more_in_line": max(0, lock.waiting - len(line)),
            **(self.admin.form_of(lock) if may_force and alone else {}),
        }

    def _share(self, seconds_left: float) -> int:
        backend = self.admin.backend()
        ttl = max(seconds_left, 1.0 if backend is None else backend.ttl)
        return round(100 * max(0.0, seconds_left) / ttl)

    # The part "past": ended holds.

    @cached_property
    def has_history(self) -> bool:
        backend = self.admin.backend()
        return backend is not None and backend.history

    @cached_property
    def _ended(self) -> Any:
        backend = self.admin.backend()
        ended = HoldRecord.objects.using(self._busy.db).filter(
            under("" if backend is None else backend.prefix)
        )
        return ended.filter(key_resource=self.key) if self.key else ended.all()

    @cached_property
    def contention(self) -> dict[str, Any]:
        """Return the holds per minute of the last hour.

        For each minute, count the holds, and those that came after a wait.
        """
        by_minute = (
            self._ended.since(MINUTES * 60)
            .with_times()
            .annotate(minute=Floor(F("seconds_ago") / 60.0))
            .values("minute")
            .annotate(
                holds=Count("pk"),
                waits=Count("pk", filter=Q(waited__gt=0)),
                longest=Max("waited"),
            )
            .order_by("minute")
        )
        found = {min(MINUTES - 1, max(0, int(row["minute"]))): row for row in by_minute}
        holds, waits = (
            sum(row[name] for row in found.values()) for name in ("holds", "waits")
        )
        most = max((row["holds"] for row in found.values()), default=0)
        step = WIDTH / MINUTES
        bars = []
        for minute, row in found.items():
            total, waited = (
                _part(row[name], most, HEIGHT) for name in ("holds", "waits")
            )
            bars.append(
                {
                    "x": _unit((MINUTES - 1 - minute) * step + step * 0.1),
                    "width": _unit(step * 0.8),
                    "total": {"y": _unit(HEIGHT - total), "height": _unit(total)},
                    "waited": {"y": _unit(HEIGHT - waited), "height": _unit(waited)},
                    "title": (
                        _("%(minute)d min ago: %(holds)d holds, %(waits)d after a wait")
                        % {
                            "minute": minute,
                            "holds": row["holds"],
                            "waits": row["waits"],
                        }
                    ),
                }
            )
        return {
            "bars": bars,
            "most": most,
            "holds": holds,
            "waits": waits,
            "percent": round(100 * waits / holds) if holds else 0,
            "longest": duration(
                max((row["longest"] for row in found.values()), default=0.0)
            ),
        }

    @cached_property
    def longest(self) -> list[dict[str, Any]]:
        """Return the longest holds of the last hour."""
        found = list(
            self._ended.since(MINUTES * 60)
            .with_times()
            .order_by("-held", "-id")[:LONGEST]
        )
        longest = max((_seconds(record) for record in found), default=0.0)
        return [
            {**self._record(record), "share": _part(_seconds(record), longest, 100)}
            for record in found
        ]

    @cached_property
    def timeline(self) -> dict[str, Any] | None:
        """Return the key's last holds on a time axis that ends now.

        Without a key, return None.
        """
        if not self.key:
            return None
        found = list(self._ended.with_times().order_by("-token")[:HOLDS])
        holds = [
            (
                record.seconds_ago + _seconds(record),
                record.seconds_ago,
                self._record(record),
            )
            for record in found
        ]
        lock = self._busy.first()
        if lock is not None and lock.state == LockState.STALE and self._find_kept():
            lock = self._busy.first()
        if (
            lock is not None
            and in_row(lock)
            and lock.begin_time is not None
            and lock.state != LockState.FREE
        ):
            current = {
                "ending": "now",
                "label": state_of(lock),
                "holder": name_of(lock),
            }
            holds.insert(
                0,
                (
                    lock.seconds_held,
                    0.0,
                    {**current, "held": duration(lock.seconds_held)},
                ),
            )
        holds.sort(key=lambda hold: -hold[0])
        span = max((began for began, _ended, _record in holds), default=0.0) or 1.0
        lanes: list[float] = []
        bars = []
        for began, ended, record in holds:
            # Use the first row that is free at that time. Holds of a shared key
            # overlap, so they need several rows.
            lane = next(
                (number for number, free in enumerate(lanes) if free >= began),
                min(len(lanes), LANES - 1),
            )
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
            "holds": [
                record
                for _began, _ended, record in reversed(holds)
                if record["ending"] != "now"
            ],
        }

    def _record(self, record: Any) -> dict[str, Any]:
        return {
            "key": printable(record.key_resource),
            "url": url(self.admin, key=record.key_resource),
            "holder": name_of(record),
            "begin": moment(record.begin_time),
            "age": duration(max(0.0, record.seconds_ago) + _seconds(record)),
            "held": duration(_seconds(record)),
            "waited": duration(record.waited) if record.waited else "",
            "token": str(record.token),
            "ending": str(record.ending),
            "label": record.get_ending_display(),
        }


def _seconds(record: Any) -> float:
    return max(0.0, float(record.held.total_seconds()))


def _part(value: float, whole: float, of: int) -> int:
    """Return ``value`` as a part of ``whole``, scaled to ``of``.

    A value above 0 yields at least 1, so that it stays visible.
    """
    return 0 if value <= 0 else max(1, round(of * value / whole))


def _unit(value: float) -> str:
    # A string, since templates may localize a number with a decimal comma.
    return f"{value:.2f}"
