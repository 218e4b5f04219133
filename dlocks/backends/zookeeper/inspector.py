"""What people read about a key in ZooKeeper: its holders and its waiters."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from kazoo.exceptions import NoNodeError

from dlocks.backends.base import Inspector
from dlocks.values import Holder, Waiter


def holder_of(key: str, data: bytes, stat: Any) -> Holder:
    """Return the holder that created a node with this data."""
    known = _facts(data)
    created = datetime.fromtimestamp(stat.ctime / 1000, UTC)
    return Holder(
        key=key,
        holder=str(known.get("holder") or ""),
        owner_ip=known.get("ip"),
        since=None if known.get("waited", True) else created,
        remaining=math.inf,
        token=stat.czxid,
        count=1,
        stale=False,
    )


def _facts(data: bytes) -> dict[str, Any]:
    """Return what a node says of its claim."""
    with suppress(ValueError):
        return dict(json.loads(data))
    return {}


class ZooKeeperInspector(Inspector):
    backend: Any

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        return [*self.backend.holders(key, shared=True)], self.backend.waiting(key)

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        parent = self.backend.nodes.parent(key)
        queue = self.backend.nodes.queue_of(parent)
        waiting = [one for one in queue.tickets if one not in queue.granted]
        reads = [("get", f"{parent}/{ticket.name}") for ticket in waiting]
        answers = self.backend.ensemble.ask(*reads) if reads else []
        found = []
        for ticket, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, NoNodeError):
                continue
            data, stat = answer
            known = _facts(data)
            found.append(
                Waiter(
                    holder=str(known.get("holder") or ""),
                    owner_ip=known.get("ip"),
                    holds=(),
                    waits_for=key.removeprefix(prefix),
                    waited=max(0.0, time.time() - stat.ctime / 1000),
                    shared=ticket.shared,
                )
            )
        return found
