"""The history: buffers for ended holds until they are written to its table.

Only database backends with the ``history`` option have one.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

from django.db.utils import InterfaceError, OperationalError

from dlocks.backends.database.backend import DatabaseBackend
from dlocks.backends.database.history import EndedHold
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.keeper import keeper
from dlocks.runtime.process import in_child
from dlocks.runtime.requests import refuse_nested, request
from dlocks.signals import Event, watchers
from dlocks.transactions import in_testcase

if TYPE_CHECKING:
    from dlocks.core.hold import Hold

logger = logging.getLogger("dlocks")

# Seconds for which a record is buffered, so that one statement writes several. A killed
# process loses the records of this time.
WRITE_EVERY = 2.0
# Seconds until the next attempt after the database could not be reached.
RETRY_AFTER = 3.0
# Maximum number of buffered records. Further ones are dropped.
MAX_BUFFERED = 10_000
# Records per statement.
BATCH = 500


class HistoryBuffer:
    """The ended holds of one backend that have not been written yet."""

    def __init__(self, backend: DatabaseBackend) -> None:
        self.backend = backend
        self._records: deque[EndedHold] = deque()
        # Reentrant, because a signal handler may call ``shutdown()`` during a write.
        self._writing = threading.RLock()
        # Whether a failure or a dropped record has been logged since the last
        # successful write.
        self._failed = self._dropped = False

    def record(self, hold: Hold, ending: str) -> None:
        """Add a hold to the buffer. The keeper writes it soon."""
        connection = self.backend.connection
        if in_testcase(connection):
            # A TestCase rolls everything back. The keeper would write outside of its
            # transaction.
            return
        if len(self._records) >= MAX_BUFFERED:
            if not self._dropped:
                self._dropped = True
                logger.warning(
                    "The history of DLOCKS[%r] drops holds: %d are unwritten",
                    self.backend.alias,
                    MAX_BUFFERED,
                )
            return
        claim = hold.claim
        ended = EndedHold(
            key=claim.key,
            token=hold.token,
            # Cut to the column's length, as in the other tables. Some engines reject a
            # longer value.
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
        self._records.append(ended)
        if keeper.is_exiting:
            # The process is about to end, so there is no later write.
            keeper.run(self.write, self.backend)
        else:
            self.backend.runtime.call_later(self.write, WRITE_EVERY)

    def write(self) -> None:
        """Write the buffered records.

        If the database cannot be reached, they are kept, up to a limit, and written
        later.
        """
        # Within another request of this thread, none could be sent.
        refuse_nested()
        with self._writing:
            while True:
                if not self._records:
                    break
                batch = [
                    self._records.popleft()
                    for _ in range(min(BATCH, len(self._records)))
                ]
                database = self.backend.connection.settings_dict["NAME"]
                try:
                    if records := list(
                        record for record in batch if record.database == database
                    ):
                        request(self.backend.records.remember, records, clock.now())
                except LockBackendError as error:
                    if not self._failed:
                        self._failed = True
                        logger.warning("The history could not be written: %s", error)
                    if isinstance(error.__cause__, OperationalError | InterfaceError):
                        self._records.extendleft(reversed(batch))
                        self.backend.runtime.call_later(self.write, RETRY_AFTER)
                        return
                else:
                    self._failed = self._dropped = False


_buffers: dict[DatabaseBackend, HistoryBuffer] = {}


def flush() -> None:
    """Write all buffered records and wait until that is done. For tests."""
    for buffer in list(_buffers.values()):
        keeper.run(buffer.write, buffer.backend)


class History:
    """The watcher that records ended holds."""

    def ended(self, event: Event, hold: Hold) -> None:
        backend = hold.backend
        if not isinstance(backend, DatabaseBackend) or not backend.history:
            return
        buffer = _buffers.setdefault(backend, HistoryBuffer(backend))
        has_failed = event == "released" and hold.has_failed
        buffer.record(hold, "F" if has_failed else _ENDINGS[event])

    released = lost = detached = ended


# The choices of ``HoldRecord.ending``.
_ENDINGS: dict[Event, str] = {"released": "R", "lost": "L", "detached": "D"}

watchers.append(History())
# The parent process writes its own records. A forked child must not write them again.
in_child(_buffers.clear)
