"""The use of a hold by one caller."""

from __future__ import annotations

from typing import Any


class Entry:
    """The use of a hold by one caller. It is open until it is left, once."""

    __slots__ = (
        "acquired_by",
        "caller",
        "hold",
        "is_member",
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
        # The key, or the list of keys, of the lock whose ``acquire()`` made it.
        self.acquired_by = ""
        # Whether it belongs to a hold of several keys.
        self.is_member = False
        # The earlier entry of its caller that a ``with hold`` block uses in its place.
        self.used: Entry | None = None
