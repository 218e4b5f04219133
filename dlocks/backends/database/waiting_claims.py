"""Reading of the queued claims whose callers hold other keys."""

from __future__ import annotations

import json
from typing import Any

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.backends.database.statements import Statements
from dlocks.values import HeldKey, WaitingClaim

# In one statement, so that it shows one state. There is a row for each shared hold of
# the key.
SELECT = (
    "SELECT mine.id, mine.owner, mine.holder, mine.owner_ip, mine.key_resource,"
    " {since}, {left}, mine.holding, mine.permits, CASE WHEN NOT mine.shared OR EXISTS"
    " (SELECT 1 FROM {claims} AS earlier WHERE earlier.key_resource ="
    " mine.key_resource AND earlier.version IS NULL AND NOT earlier.shared AND"
    " earlier.end_time > {now} AND earlier.id < mine.id) THEN 1 ELSE 0 END, CASE WHEN"
    " locks.end_time > {now} THEN locks.owner END, sharing.owner FROM {claims} AS mine"
    " LEFT JOIN {locks} AS locks ON locks.key_resource = mine.key_resource LEFT JOIN"
    " {claims} AS sharing ON sharing.key_resource = mine.key_resource AND"
    " sharing.version IS NOT NULL AND sharing.end_time > {now} WHERE mine.version IS"
    " NULL AND mine.holding <> '' AND mine.end_time > {now}"
)


def read_waiting_claims(statements: Statements) -> list[WaitingClaim]:
    """Return the live queued claims of all callers that hold other keys."""
    until = statements.dialect.seconds_until
    select = SELECT.replace("{since}", until("mine.begin_time"))
    sql = statements._text(select.replace("{left}", until("mine.end_time")))
    claims: dict[int, tuple[Any, ...]] = {}
    sharers: dict[int, list[str]] = {}
    for position, *columns, sharer in statements._rows(sql, {}):
        claims[position] = tuple(columns)
        sharers.setdefault(position, []).extend([sharer] if sharer else [])
    return [
        WaitingClaim(
            position=position,
            owner=owner,
            holder=holder,
            owner_ip=None if ip is None else str(ip),
            key=key,
            waited=max(0.0, -float(since)),
            silent=HEARTBEAT_TIMEOUT - float(left),
            holding=tuple(HeldKey(*held) for held in json.loads(holding)),
            permits=permits,
            needs_all=bool(needs_all),
            held_by=held_by,
            shared_by=tuple(sharers[position]),
        )
        for position, (
            owner,
            holder,
            ip,
            key,
            since,
            left,
            holding,
            permits,
            needs_all,
            held_by,
        ) in claims.items()
    ]
