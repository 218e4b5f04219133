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
from django.db.models import Case, Count, F, Q, Sum, Value, When, Window
from django.db.models.functions import RowNumber
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from dlocks.admin.columns import badge, is_long, key_html, label
from dlocks.admin.links import lock_url, url
from dlocks.admin.live_history import LiveHistory
from dlocks.admin.target import Target
from dlocks.backends.base import Backend
from dlocks.backends.listing import listed
from dlocks.conf import backends
from dlocks.exceptions import LockBackendError
from dlocks.models import ClaimState, LockClaim, LockState
from dlocks.operations import LockRow, address_of, in_row, mode, name_of, time_left
from dlocks.text import moment, printable, shown_duration
from dlocks.values import KEY_LENGTH, Kept

# Locks per page, and claims shown for each lock and each of their states.
LOCKS, CLAIMS = 50, 3
# Seconds between two refreshes of each part of the page.
EVERY = {"hour": 15, "now": 2, "past": 15}
# The filters of the table, by the value of ``?only=``.
ONLY = {"waiting": Q(waiting__gt=0), "stale": Q(state=LockState.STALE)}


def view(admin: Any, request: HttpRequest) -> HttpResponse:
    """Return the page.

    With ``?part=``, return one part of it, for the page's script. With ``?key=``, show
    only that key.
    """
    if not admin.has_view_permission(request):
        raise PermissionDenied
    request.current_app = admin.admin_site.name
    room = Room(admin, request)
    if not (backend := backends[admin.alias]).unlisted:
        room.list_holds(backend)
    part = request.GET.get("part")
    if part in EVERY:
        return TemplateResponse(
            request,
            f"admin/dlocks/resourcelock/live_{part}.html",
            {"room": room, **admin.alias_context},
        )
    subtitle = printable(room.key) if room.key else None
    page: HttpResponse = admin.page(
        request, "live", title=_("Control room"), subtitle=subtitle, room=room
    )
    return page


class Room(LiveHistory):
    """The context of the templates: current locks, and ended holds.

    Each part runs only its own queries, whose number does not depend on that of locks.
    """

    def __init__(self, admin: Any, request: HttpRequest) -> None:
        self.admin = admin
        self.request = request
        # PostgreSQL raises an error for a NUL in a query's parameter.
        self.key, self.search = (
            text if "\0" not in text and len(text) <= KEY_LENGTH else ""
            for text in (request.GET.get("key", ""), request.GET.get("q", "").strip())
        )
        only = request.GET.get("only", "")
        self.only = only if only in ONLY else ""
        self.every = EVERY
        # Loaded only if a lease looks stale.
        self._kept = Kept()

    def list_holds(self, backend: Backend) -> None:
        """Load the holds in a backend without rows, or the reason of a failure."""
        self.key, self.is_listed, self.every = "", True, dict.fromkeys(EVERY, 10)
        self.query = urlencode(self.admin.query)
        try:
            self.holds = [
                {**self.admin._row(hold), "waiting": lock.waiting}
                for lock in listed(backend)
                for hold in lock.sharers or [lock]
            ]
        except LockBackendError as error:
            self.trouble = str(error)

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
            # An empty filter is no valid one.
            total=Count("pk", filter=self._matching or None),
            waiters=Sum("waiting", default=0),
            **by_state,
        )
        return {name: int(number) for name, number in counts.items()}

    @cached_property
    def page(self) -> Any:
        total = self.counts["total"]
        # The longest queue comes first, because callers are blocked. Then come stale
        # locks, because their holders have failed, and then the oldest holds.
        is_live = Case(When(state=LockState.STALE, then=Value(0)), default=Value(1))
        paginator = Paginator(
            self._busy.filter(self._matching).order_by(
                "-waiting", is_live, "begin_time", "pk"
            ),
            LOCKS,
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

    @property
    def _matching(self) -> Q:
        found = Q(key_resource__icontains=self.search) if self.search else Q()
        return found & ONLY.get(self.only, Q())

    @property
    def is_filtered(self) -> bool:
        return bool(self._matching)

    @property
    def filters(self) -> list[dict[str, Any]]:
        """Return the links to the page with each filter."""
        labels = {"": _("All"), "waiting": _("With waiters"), "stale": _("Stale")}
        search = {"q": self.search} if self.search else {}
        return [
            {
                "label": text,
                "url": url(self.admin, **search, **({"only": only} if only else {})),
                "is_current": only == self.only,
            }
            for only, text in labels.items()
        ]

    def _of_page(self, number: int) -> dict[str, str | int]:
        chosen = {"key": self.key, "q": self.search, "only": self.only}
        return {
            **self.admin.query,
            **{name: value for name, value in chosen.items() if value},
            "page": number,
        }

    @cached_property
    def locks(self) -> list[dict[str, Any]]:
        """Return the rows of the table."""
        locks = list(self.page.object_list)
        claims = self._claims(
            [lock.pk for lock in locks if lock.waiting or lock.shares]
        )
        may_force = self.admin.has_force_release_permission(self.request)
        return [self._row(lock, claims.get(lock.pk, []), may_force) for lock in locks]

    def _claims(self, keys: Sequence[str]) -> dict[str, list[LockRow]]:
        """Return the first waiters and the first shared holds of each of the keys."""
        found: dict[str, list[LockRow]] = {}
        if keys:
            position = Window(
                RowNumber(),
                partition_by=[F("key_resource"), F("state")],
                order_by=F("id").asc(),
            )
            claims = (
                LockClaim.objects.using(self._busy.db)
                .by_clock(self._kept)
                .defer("owner", "channel")
                .filter(key_resource__in=keys)
                .exclude(state=ClaimState.DEAD)
                .annotate(position=position)
            )
            for claim in claims.filter(position__lte=CLAIMS).order_by(
                "key_resource", "id"
            ):
                found.setdefault(claim.key_resource, []).append(claim)
        return found

    def _row(
        self, lock: LockRow, claims: Sequence[LockRow], may_force: bool
    ) -> dict[str, Any]:
        alone = in_row(lock) and lock.state != LockState.FREE
        held_long = is_long(lock, self.admin.backend())
        queue = [claim for claim in claims if claim.state == ClaimState.WAITING]
        shares = [claim for claim in claims if claim.state != ClaimState.WAITING]
        return {
            # The script finds the row again by this id.
            "id": (
                "lock-"
                + hashlib.blake2s(
                    lock.pk.encode("utf-8", "surrogatepass"), digest_size=8
                ).hexdigest()
            ),
            "key": printable(lock.pk),
            "url": url(self.admin, key=lock.pk),
            "state": lock.state,
            "label": label(lock, is_long=held_long),
            "style": "long" if held_long else lock.state,
            **(self._hold(lock, may_force) if alone else {}),
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
            "shares": [
                {
                    "id": f"share-{share.pk}",
                    "badge": badge(share),
                    "mode": mode(share),
                    **self._hold(share, may_force),
                }
                for share in shares
            ],
            "more_shares": max(0, lock.shares - len(shares)),
        }

    def _hold(self, held: LockRow, may_force: bool) -> dict[str, Any]:
        """Return the cells of an exclusive or a shared hold."""
        has_begun = held.begin_time is not None
        return {
            "holder": name_of(held) or _("unknown"),
            "owner_ip": address_of(held),
            "held_for": shown_duration(held.seconds_held) if has_begun else "",
            "since": moment(held.begin_time) if has_begun else None,
            # No bar: a row does not have the ttl of its lease.
            "left": time_left(held),
            **(self.admin.form_of(Target.of(held)) if may_force else {}),
        }

    @property
    def lock_url(self) -> str:
        """Return the address of the page of this key's lock."""
        return lock_url(self.admin, self.key)
