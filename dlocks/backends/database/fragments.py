"""The conditions, assignments and limits that many statements share."""

from __future__ import annotations

MICROSECONDS = 1_000_000

# The condition for claims that are queued, which have no shared hold yet.
IN_QUEUE = "version IS NULL"

# The conditions for a free key. Its last hold was released, or its lease expired at
# least ``grace`` ago.
RELEASED = "(status <> 'P' AND end_time <= {now})"
STALE_AFTER_GRACE = "(status = 'P' AND end_time <= {grace})"
FREE_BY_CLOCK = f"({RELEASED} OR {STALE_AFTER_GRACE})"

# The condition for shared holds that are not released.
SHARE = "version IS NOT NULL AND hold_count > 0"

# The conditions for an expired lease, and for a shared hold that has ended.
STALE = "status = 'P' AND end_time <= {now}"
ENDED_SHARE = f"NOT {IN_QUEUE} AND end_time <= {{grace}}"

# Maximum number of rows that one statement of reaping, purging or renewing changes.
BATCH = 1000

CLEAR = "status = 'F', owner = '', hold_count = 0, end_time = {now}"

GRANT = (
    "status = %(status)s, owner = %(owner)s, holder = %(holder)s, owner_ip ="
    " %(owner_ip)s, begin_time = {now}, end_time = {end}, hold_count = 1, version ="
    " {token}"
)
