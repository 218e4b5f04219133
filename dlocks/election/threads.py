"""Elections that run in a thread."""

from __future__ import annotations

import inspect
import logging
import threading

from django.db import connections

from dlocks.core.acquire import Acquisition
from dlocks.core.callers import current_caller
from dlocks.core.drive import drive
from dlocks.core.hold import Hold
from dlocks.election.state import UNREACHABLE, ElectionState, retry_delays
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime import clock

logger = logging.getLogger("dlocks")


class ThreadElection(ElectionState):
    """An election in the caller's thread, or in one of its own."""

    def run(self) -> None:
        """Campaign and lead until ``stop()`` is called.

        If the backend cannot be reached, retry until it can.
        """
        self._refuse_coroutines()
        self._begin()
        retries = retry_delays()
        try:
            while not self._stopping:
                try:
                    self._campaign()
                except LockBackendError as error:
                    self._rest_of(next(retries), error)
                    continue
                retries = retry_delays()
                if self._hold is not None:
                    self._lead(self._hold)
                    self._see_to_connections()
        finally:
            try:
                self._release()
            finally:
                self._ended.set()

    def start(self) -> None:
        """Run the election in a new thread."""
        self._refuse_coroutines()
        thread = threading.Thread(
            target=self._run_in_thread, name=f"dlocks-{self.key}", daemon=True
        )
        self._begin(thread)
        self._alone = True
        try:
            thread.start()
        except BaseException:
            self._ended.set()
            raise

    # Internal methods.

    def _refuse_coroutines(self) -> None:
        for function in (self.on_elected, self.on_deposed):
            if inspect.iscoroutinefunction(function):
                raise TypeError(
                    f"{function!r} is a coroutine function, which run() and start() do"
                    " not await. Use arun()."
                )

    def _run_in_thread(self) -> None:
        try:
            self.run()
        except BaseException:
            if not self._gives_up:
                logger.exception("The election %r ended with an error", self.name)
        finally:
            connections.close_all()

    def _see_to_connections(self) -> None:
        """Close unusable connections between leads, as Django does between requests.

        This is needed only in a thread of the election's own.
        """
        for connection in connections.all(initialized_only=True) if self._alone else ():
            connection.close_if_unusable_or_obsolete()

    def _campaign(self) -> None:
        acquisition = Acquisition(self._lock, current_caller(), self._wakeup, wait=True)
        self._hold = drive(acquisition, self._wakeup.rest, lambda: self._stopping)
        self._expect_a_long_hold()

    def _lead(self, hold: Hold) -> None:
        logger.info(
            "Elected %r: %s, token %d", self.name, hold.claim.holder, hold.token
        )
        failure: BaseException | None = None
        try:
            try:
                if self.on_elected is not None:
                    _refuse_coroutine(self.on_elected(hold))
                while self.is_leader:
                    self._wakeup.rest(hold.remaining)
            except Exception as error:  # noqa: BLE001 (logged there)
                failure = self._failure(hold, error)
            except SystemExit as error:
                if not self._alone:
                    raise
                # SystemExit would end only this thread, so it counts as a failure.
                failure = self._failure(hold, error)
            finally:
                self._depose(hold)
        finally:
            self._release(failed=failure is not None)
        # Drop the reference to the error, whose traceback refers to this frame.
        pause, failure = self._pause_after(failure), None
        self._pause(pause)

    def _depose(self, hold: Hold) -> None:
        self._deposing = True
        # ``on_deposed`` may wait for threads in ``wait()``.
        self._wake_work()
        logger.info(
            "Deposed %r: %s, token %d", self.name, hold.claim.holder, hold.token
        )
        if self.on_deposed is not None:
            try:
                _refuse_coroutine(self.on_deposed(hold))
            except Exception:
                logger.exception("on_deposed of %r failed", self.name)

    def _rest_of(self, seconds: float, error: LockError) -> None:
        logger.warning(UNREACHABLE, self.name, error)
        self._pause(seconds)

    def _pause(self, seconds: float) -> None:
        """Wait for ``seconds``, unless the election is stopped."""
        deadline = clock.now() + seconds
        while not self._stopping and (left := deadline - clock.now()) > 0:
            self._wakeup.rest(left)


def _refuse_coroutine(result: object) -> None:
    if inspect.iscoroutine(result):
        result.close()
        raise TypeError(
            f"{result!r} was returned, which run() and start() do not await. Use"
            " arun()."
        )
