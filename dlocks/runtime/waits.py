"""The waits of this process for keys, all of which ``shutdown()`` ends."""

from __future__ import annotations

import weakref
from typing import Any

from dlocks.runtime.process import in_child
from dlocks.runtime.threads import new_mutex


class Waits:
    """The waits of this process. After ``end_all()``, no further one begins."""

    def __init__(self) -> None:
        # Acquisitions. Weak, since each refers to its task, which is collected with its
        # loop. A plain set, since WeakSet is written in Python.
        self._waits: set[weakref.ref[Any]] = set()
        self._forked()
        in_child(self._forked)

    def _forked(self) -> None:
        self._mutex = new_mutex()
        self.may_begin = True

    def begin(self, wait: Any) -> bool:
        """Add a wait, unless ``end_all()`` was called. Return whether it was added."""
        with self._mutex:
            # Added first. A signal handler may end all waits between the two lines.
            self._waits.add(weakref.ref(wait, self._waits.discard))
            return self.may_begin

    def is_open(self, wait: Any) -> bool:
        """Return whether ``end_all()`` has not ended a wait."""
        return weakref.ref(wait) in self._waits

    def complete(self, wait: Any) -> bool:
        """Remove a wait whose key was acquired. Return whether it had not ended."""
        with self._mutex:
            is_open = self.is_open(wait)
            self._waits.discard(weakref.ref(wait))
            return is_open

    def end_all(self) -> None:
        """End and wake all waits, and let no further one begin."""
        with self._mutex:
            self.may_begin = False
            waits, self._waits = list(self._waits), set()
        for one in waits:
            if (wait := one()) is not None:
                wait.wakeup.wake()

    def resume(self) -> None:
        """Let waits begin again. Those that have ended do not continue."""
        self.may_begin = True


waits = Waits()
