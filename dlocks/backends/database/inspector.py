"""What error messages say about a key in the database, beyond its holder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.db import router
from django.utils import timezone

from dlocks.backends import table as rules
from dlocks.backends.base import HEARTBEAT_TIMEOUT, Inspector
from dlocks.backends.database.state import Key
from dlocks.text import duration, shown_holder, shows_holder
from dlocks.values import Claim, HeldKey, Holder, Waiter, WaitingClaim


class DatabaseInspector(Inspector):
    """An inspector that reads the tables of locks, and the log of the admin."""

    backend: Any

    def taken_by(self, claim: Claim, token: int, age: float) -> str | None:
        if (fact := self._taken_in_admin(claim, age)) is not None or claim.shared:
            return fact
        key = self.backend.store.peek(claim.key, by_clock=True)
        if key is None or key.row.owner == claim.owner:
            # Its own read lock may have changed the version.
            return None
        holder = rules.holder(key.state, claim.key, key.at)
        if holder is not None:
            return f"it is now held by {holder}"
        ago = f"{duration(max(0.0, key.at.now - key.row.end_time.timestamp()))} ago"
        if key.row.status == "F" and not key.row.owner:
            return (
                "it was cleared, force released or taken over by a shared hold"
                f" {ago}. The log dlocks.audit names the user and the reason, if a"
                " person did it"
            )
        # A transaction may still keep the key. Its release is only seen once committed.
        how = "in a transaction" if key.row.hold_count else "and released it"
        return f"{shown_holder(key.row.holder)} took it over {how} {ago}"

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
        user = f"user__{get_user_model().USERNAME_FIELD}"
        columns = (user, "action_time", "change_message")
        for who, when, message in entries.order_by("action_time").values_list(*columns)[
            :1
        ]:
            since = duration(max(0.0, (timezone.now() - when).total_seconds()))
            if not shows_holder():
                return f"it was force released in the admin {since} ago"
            return f"{who} wrote in the admin {since} ago: {message}"
        return None

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        return self.backend.maintenance.sharers(key), self.backend.waiting(key)

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        found = self.backend.store.read([key], by_clock=True).get(key)
        if found is None:
            return ()
        now = found.at.now
        return [
            Waiter(
                holder=row.holder,
                owner_ip=row.owner_ip,
                holds=tuple(held.removeprefix(prefix) for held in row.held_keys),
                waits_for=key.removeprefix(prefix),
                waited=max(0.0, now - row.begin_time.timestamp()),
                shared=row.shared,
            )
            for row in found.waiting
        ]

    def waiting_claims(self) -> Sequence[WaitingClaim]:
        store = self.backend.store
        queued = store.claims.filter(version__isnull=True).exclude(holding="")
        names = queued.values_list("key_resource", flat=True).distinct()
        keys = store.session.unlocked(list, names)
        return [
            one
            for key in store.read(keys, by_clock=True).values()
            for one in _waiting_claims(key)
        ]


def _waiting_claims(key: Key) -> Sequence[WaitingClaim]:
    """Return the live queued claims of a key whose callers hold other keys."""
    at, held = key.at, key.state.held
    live = held is not None and held.end > at.now
    shared_by = tuple(one.claim.owner for one in key.state.shares if one.end > at.now)
    alone_before, found = False, []
    for row in key.waiting:
        alone_before |= not row.shared
        if row.holding:
            found.append(
                WaitingClaim(
                    position=row.pk,
                    owner=row.owner,
                    holder=row.holder,
                    owner_ip=row.owner_ip,
                    key=row.key_resource,
                    waited=max(0.0, at.now - row.begin_time.timestamp()),
                    silent=HEARTBEAT_TIMEOUT + at.now - row.end_time.timestamp(),
                    holding=tuple(HeldKey(*one) for one in json.loads(row.holding)),
                    permits=row.permits,
                    needs_all=alone_before,
                    held_by=held.claim.owner if held is not None and live else None,
                    shared_by=shared_by,
                )
            )
    return found
