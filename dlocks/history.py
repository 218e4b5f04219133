"""The history: holds that have ended, on their way to the table, for the backends that want it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from django.db.utils import InterfaceError, OperationalError

from dlocks import clock
from dlocks.backends.database import DatabaseBackend
from dlocks.backends.database.records import Finished
from dlocks.exceptions import LockBackendError
from dlocks.forks import in_child
from dlocks.keeper import keeper
from dlocks.signals import End, Watcher, watchers

if TYPE_CHECKING:
    from dlocks.holds import Hold

logger = logging.getLogger("dlocks")

# How long a record waits for others to be written with: what a process that is killed loses.
WRITE_EVERY = 2.0
# How soon it is tried again after the database could not be reached, ...
TRY_AGAIN = 3.0
# ... and how many records wait for that at most.
KEPT = 10_000
# Records in one statement.
BATCH = 500


class Book:
    """The holds of one backend that are not written yet."""

    def __init__(self, backend: DatabaseBackend) -> None:
        self.backend = backend
        self._notes: deque[Finished] = deque()
        self._writing = threading.Lock()
        # Told already, until it has been written again.
        self._failed = self._dropped = False

    def note(self, hold: Hold, ending: str) -> None:
        """Have a hold written soon, by the keeper."""
        connection = self.backend.connection
        if any(getattr(block, "_from_testcase", False) for block in connection.atomic_blocks):
            # Nothing of a TestCase stays, and the keeper would be outside of its transaction.
            return
        if len(self._notes) >= KEPT:
            if not self._dropped:
                self._dropped = True
                logger.warning("The history of DLOCKS[%r] leaves holds out: %d wait", self.backend.alias, KEPT)
            return
        claim = hold.claim
        finished = Finished(
            key=claim.key,
            token=hold.token,
            # As the other tables have it: not every engine cuts it by itself.
            holder=claim.holder[:255],
            owner_ip=claim.owner_ip,
            scope=hold.scope,
            shared=claim.shared,
            waited=hold.waited,
            held=hold.age,
            ended_at=clock.now(),
            ending=ending,
            database=connection.settings_dict["NAME"],
        )
        self._notes.append(finished)
        keeper.later(self.write, WRITE_EVERY, self.backend)

    def write(self) -> None:
        """Write what there is; what cannot be written now is tried again, up to a bound."""
        with self._writing:
            while self._notes:
                batch = [self._notes.popleft() for _ in range(min(BATCH, len(self._notes)))]
                database = self.backend.connection.settings_dict["NAME"]
                try:
                    if records := [note for note in batch if note.database == database]:
                        self.backend.remember(records, clock.now())
                except LockBackendError as error:
                    if not self._failed:
                        self._failed = True
                        logger.warning("The history could not be written: %s", error)
                    if isinstance(error.__cause__, OperationalError | InterfaceError):
                        self._notes.extendleft(reversed(batch))
                        keeper.later(self.write, TRY_AGAIN, self.backend)
                        return
                else:
                    self._failed = self._dropped = False


_books: dict[DatabaseBackend, Book] = {}


def flush() -> None:
    """Write what there is now, and return when that is done: for tests."""
    for book in list(_books.values()):
        keeper.run(book.write, book.backend)


class History(Watcher):
    """Notes the holds that end."""

    def ended(self, hold: Hold, how: End) -> None:
        backend = hold.backend
        if not isinstance(backend, DatabaseBackend) or not backend.history:
            return
        book = _books.get(backend) or _books.setdefault(backend, Book(backend))
        book.note(hold, "F" if how == "released" and hold._failed else _ENDINGS[how])


# As HoldRecord has them.
_ENDINGS = {"released": "R", "lost": "L", "detached": "D"}

watchers.append(History())
# What the parent has noted, the parent writes.
in_child(_books.clear)
