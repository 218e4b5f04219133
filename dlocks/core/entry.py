"""The use of a hold by one caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False, repr=False)
class Entry:
    """The use of a hold by one caller. It is open until it is left, once."""

    caller: Any
    # Has the options of this entry, such as ``on_lost``.
    lock: Any = None
    hold: Any = None
    # Until when the key stays taken after its release, because of ``min_hold``.
    min_hold_until: float = 0.0
    # What ``acquire()`` has returned with it, for ``lock.release()``.
    acquired: Any = None
    # Whether its caller has learned that the hold has ended.
    knows_end: bool = False
    # Whether it belongs to a hold of several keys.
    is_member: bool = False
    # The earlier entry of its caller that a ``with hold`` block uses in its place.
    used: Entry | None = None
