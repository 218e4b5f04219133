"""The live page of the admin: current locks, and the holds of the last hour.

The page refreshes itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Count, F, Q, Sum, Window
from django.db.models.functions import RowNumber
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from dlocks.admin.columns import is_long, key_html, label, short_time_left
from dlocks.admin.links import LockAdmin, lock_url, url
from dlocks.admin.live_history import LiveHistory
from dlocks.models import ClaimState, LockClaim, LockState
from dlocks.operations import LockRow, address_of, in_row, name_of
from dlocks.text import moment, printable, shown_duration
from dlocks.values import KEY_LENGTH, Kept

# Locks per page, and waiters shown for each lock.
LOCKS, IN_QUEUE = 50, 3
# Seconds between two refreshes of each part of the page.
EVERY = {"now": 2, "past": 15}


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


class Room(LiveHistory):
    """The context of the templates: current locks, and ended holds.

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
            total=Count("pk"), waiters=Sum("waiting", default=0), **by_state
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
        queues = self._queues([lock.pk for lock in locks if lock.waiting])
        may_force = self.admin.has_force_release_permission(self.request)
        return [self._row(lock, queues.get(lock.pk, []), may_force) for lock in locks]

    def _queues(self, keys: Sequence[str]) -> dict[str, list[LockRow]]:
        """Return the first waiters of each of the keys."""
        queues: dict[str, list[LockRow]] = {}
        if keys:
            position = Window(
                RowNumber(), partition_by=F("key_resource"), order_by=F("id").asc()
            )
            waiting = (
                LockClaim.objects.using(self._busy.db)
                .by_clock()
                .defer("owner", "channel")
            )
            waiting = waiting.filter(
                key_resource__in=keys, state=ClaimState.WAITING
            ).annotate(position=position)
            for claim in waiting.filter(position__lte=IN_QUEUE).order_by(
                "key_resource", "id"
            ):
                queues.setdefault(claim.key_resource, []).append(claim)
        return queues

    def _row(
        self, lock: LockRow, queue: Sequence[LockRow], may_force: bool
    ) -> dict[str, Any]:
        alone = in_row(lock) and lock.state != LockState.FREE
        held_long = is_long(lock, self.admin.backend())
        known = {
            "holder": name_of(lock) or _("unknown"),
            "owner_ip": address_of(lock),
            "held_for": lock.begin_time and shown_duration(lock.seconds_held),
            "since": lock.begin_time and moment(lock.begin_time),
            "left": short_time_left(lock),
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
            "url": lock_url(self.admin, lock.pk),
            "state": lock.state,
            "label": label(lock, is_long=held_long),
            "style": "long" if held_long else lock.state,
            **(known if alone else {}),
            "waiting": lock.waiting,
            "queue": [
                {
                    "holder": name_of(claim),
                    "waited": shown_duration(claim.seconds_held),
                    "holds": [key_html(key) for key in claim.held_keys],
                }
                for claim in queue
            ],
            "more_waiters": max(0, lock.waiting - len(queue)),
            **(self.admin.form_of(lock) if may_force and alone else {}),
        }

    def _share(self, seconds_left: float) -> int:
        backend = self.admin.backend()
        ttl = max(seconds_left, 1.0 if backend is None else backend.ttl)
        return round(100 * max(0.0, seconds_left) / ttl)
