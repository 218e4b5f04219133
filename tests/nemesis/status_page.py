"""A status page in shared memory, on which each process shows its state.

The faults use it to find holders.
"""

from __future__ import annotations

import mmap
from pathlib import Path

IDLE, ASKING, HOLDING, LEAVING = range(4)
SLOTS = 256


class StatusPage:
    """A byte for the state and a byte for the key of each process.

    One more byte makes all processes finish.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(1 + 2 * SLOTS))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)

    def say(self, slot: int, state: int, key: int | None = None) -> None:
        """Show a state, and a key if it is another one than before."""
        self._memory[1 + 2 * slot] = state
        if key is not None:
            self._memory[2 + 2 * slot] = key

    def read(self, slot: int) -> tuple[int, int]:
        return self._memory[1 + 2 * slot], self._memory[2 + 2 * slot]

    @property
    def finished(self) -> bool:
        return self._memory[0] == 1

    def finish(self) -> None:
        self._memory[0] = 1
