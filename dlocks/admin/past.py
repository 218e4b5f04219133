"""The past on the pages of locks: ended holds, their waits, and a time axis."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from django.db.models import Count, F, Max, Q
from django.db.models.functions import Floor
from django.http import HttpRequest
from django.utils.translation import gettext as _

from dlocks.admin.base import Source
from dlocks.models import HoldRecord
from dlocks.operations import LockRow, is_exclusive, name_of, state_of
from dlocks.text import moment, printable, shown_duration

# Minutes of history, and the number of longest holds shown.
MINUTES, LONGEST = 60, 6
# Holds in the timeline of a key, and rows in which overlapping holds are drawn.
HOLDS, LANES = 60, 6
# The width of the timeline and the height of its rows, in units of its view box.
WIDTH, LANE = 1000, 14


class Past:
    """The context for ended holds: those of a key, or of all keys."""

    def __init__(
        self, admin: Any, request: HttpRequest, lock: LockRow | None = None
    ) -> None:
        self.admin = admin
        self.request = request
        self.lock = lock
        source = Source.of(request)
        self.has_history = source.rows is not None and source.rows.history
        # Users may see ended holds here as in their own list.
        may_view = request.user.has_perm("dlocks.view_holdrecord")
        self.is_shown = self.has_history and may_view
        # Without a history, the page says how to switch it on.
        self.has_part = may_view or not self.has_history
        self._ended: Any = source.select(HoldRecord.objects.all())
        if lock is not None:
            self._ended = self._ended.filter(key_resource=lock.pk)

    @cached_property
    def contention(self) -> dict[str, Any]:
        """Return the holds per minute of the last hour.

        For each minute, count the holds, and those that came after a wait.
        """
        found = list(self._by_minute(self._ended))
        holds, waits = (sum(row[name] for row in found) for name in ("holds", "waits"))
        return {
            "bars": _bars(found),
            "most": max((row["holds"] for row in found), default=0),
            "holds": holds,
            "waits": waits,
            "percent": round(100 * waits / holds) if holds else 0,
            "longest": shown_duration(
                max((row["longest"] for row in found), default=0.0)
            ),
        }

    def bars_of(self, keys: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the same of some keys, as far as they were released."""
        found: dict[str, list[Any]] = {}
        if self.is_shown and keys:
            ended = self._ended.filter(key_resource__in=keys)
            for row in self._by_minute(ended, "key_resource"):
                found.setdefault(row["key_resource"], []).append(row)
        return {key: _bars(rows) for key, rows in found.items()}

    def _by_minute(self, ended: Any, *also: str) -> Any:
        return (
            ended.since(MINUTES * 60)
            .with_times()
            .annotate(minute=Floor(F("seconds_ago") / 60.0))
            .values("minute", *also)
            .annotate(
                holds=Count("pk"),
                waits=Count("pk", filter=Q(waited__gt=0)),
                longest=Max("waited"),
            )
            .order_by("minute")
        )

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
        if self.lock is None:
            return None
        ended = self._ended.with_times().order_by("-token")[:HOLDS]
        holds = [
            (one.seconds_ago + _seconds(one), one.seconds_ago, self._record(one))
            for one in ended
        ]
        if (now := self._current()) is not None:
            holds.insert(0, now)
        holds.sort(key=lambda hold: -hold[0])
        span = max((began for began, _ended, _record in holds), default=0.0) or 1.0
        lanes: list[float] = []
        bars = []
        for number, (began, ended, record) in enumerate(holds):
            lane = 0
            if record["shared"]:
                # Shared holds overlap. Use the first row that is free at that time.
                free = (lane for lane, end in enumerate(lanes) if end >= began)
                lane = next(free, min(len(lanes), LANES - 1))
            elif following := [
                one for one in holds[number + 1 :] if not one[2]["shared"]
            ]:
                # Exclusive holds do not overlap. Their ends were measured by the clocks
                # of their processes.
                ended = max(ended, following[0][0])
            lanes[lane : lane + 1] = [ended]
            width = max(3.0, (began - ended) / span * WIDTH)
            # The present hold is as long as its key is old, and half as high.
            height = LANE - 4.0
            top = lane * LANE + 2.0
            if record["ending"] == "now":
                top, height = top + height / 4, height / 2
            bars.append(
                {
                    "x": _unit(min(WIDTH - width, (1 - began / span) * WIDTH)),
                    "y": _unit(top),
                    "width": _unit(width),
                    "height": _unit(height),
                    "ending": record["ending"],
                    "title": f"{record['holder']}, {record['held']}, {record['label']}",
                }
            )
        endings = [*HoldRecord.Ending.choices, ("now", _("held now"))]
        drawn = {bar["ending"] for bar in bars}
        return {
            "bars": bars,
            "legend": [(name, text) for name, text in endings if name in drawn],
            "height": str(max(1, len(lanes)) * LANE),
            "span": shown_duration(span),
            "holds": [
                record
                for _began, _ended, record in reversed(holds)
                if record["ending"] != "now"
            ],
        }

    def _current(self) -> tuple[float, float, dict[str, Any]] | None:
        """Return the present exclusive hold of the key."""
        lock = self.lock
        if lock is None or lock.begin_time is None or not is_exclusive(lock):
            return None
        record = {
            "ending": "now",
            "shared": False,
            "label": state_of(lock),
            "holder": name_of(lock),
            "held": shown_duration(lock.seconds_held),
        }
        return lock.seconds_held, 0.0, record

    def _record(self, record: Any) -> dict[str, Any]:
        return {
            "key": printable(record.key_resource),
            "url": self.admin.cells(self.request).url(record.key_resource),
            "holder": name_of(record),
            "begin": moment(record.begin_time),
            "ended": moment(record.end_time).rpartition(" ")[2],
            "age": shown_duration(max(0.0, record.seconds_ago) + _seconds(record)),
            "held": shown_duration(_seconds(record)),
            "waited": shown_duration(record.waited) if record.waited else "",
            "token": str(record.token),
            "shared": record.shared,
            "ending": str(record.ending),
            "label": record.get_ending_display(),
        }


def _bars(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars of a chart of holds per minute, from those of each minute."""
    most = max((row["holds"] for row in rows), default=0)
    bars = []
    for row in rows:
        minute = min(MINUTES - 1, max(0, int(row["minute"])))
        bars.append(
            {
                "x": MINUTES - 1 - minute,
                "holds": _part(row["holds"], most, 100),
                "waits": _part(row["waits"], most, 100),
                "title": _("%(minute)d min ago: %(holds)d (%(waits)d had waited)")
                % {"minute": minute, "holds": row["holds"], "waits": row["waits"]},
            }
        )
    return bars


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
