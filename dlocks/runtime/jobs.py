"""The workers of all servers, and the jobs that the keeper gives them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.db import connections

from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.runtime.requests import request
from dlocks.runtime.threads import Mutex
from dlocks.runtime.workers import IDLE_CLOSE_AFTER, ServerWorker

if TYPE_CHECKING:
    from dlocks.backends.base import Backend

logger = logging.getLogger("dlocks")

# Seconds that a renewal may take before its hold is reported as lost, even after the
# deadline. A process that was stopped may find that it still holds the key.
REPLY_TIMEOUT = 1.0

# Maximum lost holds per renewal for which the backend is asked who took the key.
EXPLAINED_LIMIT = 10
# The reason given for all other lost holds.
GONE = "the backend reports that this hold has ended"


class Workers:
    """The workers of all servers, and the jobs that the keeper gives them."""

    def __init__(self, keeper: Any, mutex: Mutex) -> None:
        self._keeper, self._mutex = keeper, mutex
        # When each deferred function is due, and the worker that calls it. FOREVER if
        # it was posted.
        self.deferred: dict[Callable[[], None], tuple[float, ServerWorker]] = {}
        # By the identity of their backends.
        self.by_server: dict[str, ServerWorker] = {}

    def of(self, backend: Backend | None) -> ServerWorker:
        identity = "" if backend is None else backend.identity
        worker = self.by_server.get(identity)
        if worker is None:
            with self._mutex:
                worker = self.by_server.setdefault(
                    identity, ServerWorker(self._is_needed, self._keeper.run_at_exit)
                )
        return worker

    def _is_needed(self, worker: ServerWorker) -> bool:
        """Return whether a worker will have further jobs.

        The worker has its own mutex, so this takes none. A signal handler may wait for
        the worker's while its thread has the keeper's.
        """
        return any(
            self.by_server.get(hold.backend.identity) is worker
            for hold in self._keeper.holds
        ) or any(needed is worker for _, needed in list(self.deferred.values()))

    def due(self, holds: Iterable[Any]) -> set[Backend]:
        """Return the backends with a lease to renew now."""
        now = clock.now()
        return {
            hold.backend
            for hold in holds
            if hold.renewable and hold.lease.renew_at <= now
        }

    def reply_by(self, hold: Any) -> float | None:
        """Return until when the reply to a pending renewal may arrive, or None."""
        worker = self.by_server.get(hold.backend.identity)
        sent_at = None if worker is None else worker.pending.get(hold.backend)
        return (
            sent_at + REPLY_TIMEOUT if sent_at is not None and hold.renewable else None
        )

    def take_deferred(self) -> list[Callable[[], None]]:
        """Return the jobs that post the functions that are due. Hold the mutex."""
        now = clock.now()
        jobs: list[Callable[[], None]] = []
        # A copy, since a finalizer in this thread may add a function.
        for function, (due, worker) in self.deferred.copy().items():
            if due <= now:
                self.deferred[function] = FOREVER, worker
                jobs.append(partial(self._post_deferred, function, worker))
        return jobs

    def _post_deferred(
        self, function: Callable[[], None], worker: ServerWorker
    ) -> None:
        try:
            worker.post(partial(self._run_deferred, function))
        except BaseException:
            with self._mutex:
                self.deferred[function] = clock.now() + IDLE_CLOSE_AFTER, worker
            raise

    def _run_deferred(self, function: Callable[[], None]) -> None:
        try:
            function()
        finally:
            with self._mutex:
                # Kept until now, so that the exit does not miss it, and longer if it
                # was requested again.
                if self.deferred.get(function, (0.0, None))[0] == FOREVER:
                    del self.deferred[function]

    def _post_once(
        self,
        worker: ServerWorker,
        subject: Any,
        job: Callable[[], None],
        *,
        renewal: bool = False,
    ) -> None:
        """Post a job, unless the last one about its subject has not ended."""
        if subject in worker.pending:
            return
        worker.pending[subject] = clock.now()

        def run() -> None:
            try:
                job()
            finally:
                del worker.pending[subject]
                if renewal:
                    # The next one may already be due.
                    self._keeper.check_soon()

        try:
            worker.post(run, renewal=renewal)
        except BaseException:
            del worker.pending[subject]
            raise

    def post_end(self, hold: Any) -> None:
        self._post_once(self.of(hold.backend), hold, partial(self._end, hold))

    def _end(self, hold: Any) -> None:
        # The caller may have entered the hold again since this was posted.
        if hold.to_settle:
            hold.settle(timeout=0.0)
        elif hold.watch.is_orphaned(hold):
            hold.watch.end_orphaned(hold)

    def post_renewal(self, backend: Backend) -> None:
        # Other jobs may take seconds where a row is locked. A queue of them would
        # outlast a lease.
        renew = partial(self._renew_all, backend)
        try:
            self._post_once(self.of(backend), backend, renew, renewal=True)
        except BaseException as error:
            for hold in self._holds_of(backend):
                hold.lease.put_off_renewal(error)
            raise

    def _holds_of(self, backend: Backend) -> list[Any]:
        return [hold for hold in self._keeper.holds if hold.backend is backend]

    def _renew_all(self, backend: Backend) -> None:
        holds = self._holds_of(backend)
        # Those that are renewable, not only those that are due. It is one statement.
        guards = [hold.life.state.guards for hold in holds]
        asked = {
            hold: number
            for hold, number in zip(holds, guards, strict=True)
            if hold.renewable
        }
        self._renew(backend, asked)
        # No other one. A guard that has just ended may have renewed its lease.
        for hold in asked:
            # The reply is here. The next renewal may already be due, and must not be
            # waited for.
            hold.watch.check_expiry(hold)

    def _renew(self, backend: Backend, holds: Mapping[Any, int]) -> None:
        """Renew holds, each with the number of its guards so far."""
        sent = clock.now()
        if all(hold.lease.renew_at > sent for hold in holds):
            return
        claims = [hold.next_claim() for hold in holds]
        try:
            seconds_left = request(backend.renew, claims)
        except Exception as error:  # noqa: BLE001 (it concerns one backend only)
            # Not lost, but unknown until each deadline. The next try reconnects, since
            # after a failover the old server may answer but never write.
            keys = [repr(claim.key) for claim in claims[:EXPLAINED_LIMIT]]
            keys += ["…"] * (len(claims) > EXPLAINED_LIMIT)
            logger.warning(
                "Could not renew the holds on %s: %s", ", ".join(keys), error
            )
            with suppress(Exception):
                connections.close_all()
            for hold in holds:
                hold.lease.put_off_renewal(error)
                hold.free_if_lost()
            return
        lost = []
        for hold in holds:
            owner = hold.claim.owner
            if owner in seconds_left:
                hold.lease.record_answer(sent, seconds_left[owner])
                hold.free_if_lost()
            else:
                lost.append(hold)
        for number, hold in enumerate(lost):
            why = GONE
            # After a long pause there may be many, and other holds wait.
            if number < EXPLAINED_LIMIT:
                # The loss is certain, and it is what matters.
                with suppress(Exception):
                    why = hold.why_gone()
            # Otherwise a guard had locked the row, and the request found its old lease.
            # A guard that begins later finds a loss itself.
            if hold.life.state.guards == holds[hold]:
                hold.lose(why)
