"""The use of a hold by one caller."""

from __future__ import annotations

from typing import Any


class Entry:
    """The use of a hold by one caller. It is open until it is left, once."""

    __slots__ = (
        "acquired",
        "caller",
        "hold",
        "is_member",
        "knows_end",
        "lock",
        "min_hold_until",
        "used",
    )

    def __init__(self, caller: Any, lock: Any = None, hold: Any = None) -> None:
        self.caller = caller
        # Has the options of this entry, such as ``on_lost``.
        self.lock = lock
        self.hold = hold
        # Until when the key stays taken after its release, because of ``min_hold``.
        self.min_hold_until = 0.0
        # What ``acquire()`` has returned with it, for ``lock.release()``.
        self.acquired: Any = None
        # Whether its caller has learned that the hold has ended.
        self.knows_end = False
        # Whether it belongs to a hold of several keys.
        self.is_member = False
        # The earlier entry of its caller that a ``with hold`` block uses in its place.
        self.used: Entry | None = None
