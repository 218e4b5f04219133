"""What error messages say about a key in the database, beyond its holder."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.db import router
from django.utils import timezone

from dlocks.backends.base import Inspector
from dlocks.backends.database.waiting_claims import read_waiting_claims
from dlocks.text import duration, shown_holder, shows_holder
from dlocks.values import Claim, Holder, Waiter, WaitingClaim


class DatabaseInspector(Inspector):
    """An inspector that reads the tables of locks, and the log of the admin."""

    backend: Any

    def taken_by(self, claim: Claim, token: int, age: float) -> str | None:
        from dlocks.models import LockState

        if (fact := self._taken_in_admin(claim, age)) is not None or claim.shared:
            return fact
        row = self.backend.row_of(claim.key)
        if row is None or row["version"] == token:
            return None
        holder = holder_of(row)
        if row["state"] != LockState.FREE:
            return f"it is now held by {holder}"
        ago = f"{duration(-holder.remaining)} ago"
        if row["status"] == "F" and not row["owner"]:
            return (
                f"it was cleared or force released {ago}. The log dlocks.audit names"
                " the user and the reason"
            )
        return f"{shown_holder(holder.holder)} took it over and released it {ago}"

    def _taken_in_admin(self, claim: Claim, age: float) -> str | None:
        """Return what the admin's log says about a forced release of the claim.

        Return None without an entry, or if the log is in another database.
        """
        if not apps.is_installed("django.contrib.admin"):
            return None
        from django.contrib.admin.models import LogEntry
        from django.contrib.auth import get_user_model

        if router.db_for_read(LogEntry) != self.backend.database:
            return None
        entries = LogEntry.objects.using(self.backend.database).filter(
            content_type__app_label="dlocks",
            content_type__model="resourcelock",
            object_id=claim.key,
            change_message__contains=shown_holder(claim.holder),
            # The clocks of the hosts may differ slightly.
            action_time__gte=timezone.now() - timedelta(seconds=age + 1),
        )
        columns = (
            f"user__{get_user_model().USERNAME_FIELD}",
            "action_time",
            "change_message",
        )
        for who, when, message in entries.order_by("action_time").values_list(*columns)[
            :1
        ]:
            since = duration(max(0.0, (timezone.now() - when).total_seconds()))
            if not shows_holder():
                return f"it was force released in the admin {since} ago"
            return f"{who} wrote in the admin {since} ago: {message}"
        return None

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        rows = self.backend._run(
            lambda *_: list(self.backend.shares_of(key, self.backend.kept([key])))
        )
        return [holder_of(row) for row in rows], self.backend.waiting(key)

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        from dlocks.models import ClaimState, LockClaim

        rows = (
            LockClaim.objects.using(self.backend.database)
            .by_clock()
            .filter(key_resource=key, state=ClaimState.WAITING)
            .defer("owner", "channel")
            .order_by("id")
        )
        return [
            Waiter(
                holder=row.holder,
                owner_ip=row.owner_ip,
                holds=tuple(held.removeprefix(prefix) for held in row.held_keys),
                waits_for=key.removeprefix(prefix),
                waited=max(0.0, row.seconds_held),
                shared=row.shared,
            )
            for row in self.backend._run(lambda *_: list(rows))
        ]

    def waiting_claims(self) -> Sequence[WaitingClaim]:
        return read_waiting_claims(self.backend)


def holder_of(row: Mapping[str, Any]) -> Holder:
    """Return the holder named by a lock row or by the row of a shared hold."""
    # The same rule as in ``LockState`` and ``ClaimState``.
    in_transaction = row["state"] == "held" and row["seconds_left"] <= 0
    return Holder(
        key=row["key_resource"],
        holder=row["holder"],
        owner_ip=row["owner_ip"],
        since=row["begin_time"],
        remaining=math.inf if in_transaction else row["seconds_left"],
        token=row["version"],
        count=row["hold_count"],
        stale=row["state"] == "stale",
        in_transaction=in_transaction,
    )
