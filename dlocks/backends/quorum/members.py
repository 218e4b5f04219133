"""The members of a quorum, with threads of their own, and their replies."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from dlocks.backends.base import Backend
from dlocks.runtime.pools import use_private_connections
from dlocks.runtime.process import each_in_child
from dlocks.runtime.requests import request

# The largest number of threads that send requests to one member. A member that does not
# reply blocks that many requests.
THREADS = 8

# Requests to a member that wait for a thread. The oldest is dropped, since its caller
# no longer waits for it.
QUESTIONS = 1000

# Seconds for which an idle thread keeps its connections. It is less than the time for
# which DROP DATABASE waits for them to close.
IDLE_CLOSE_AFTER = 0.5


class Member:
    """One of the backends, with daemon threads of its own for its requests.

    So a member that does not reply delays no other one. An executor would refuse
    requests while Python exits.
    """

    def __init__(self, alias: str, backend: Backend) -> None:
        self.alias = alias
        self.backend = backend
        # Whether a reply is overdue. Then the member is not waited for if the replies
        # of the others suffice.
        self.silent = False
        self._reset()
        _members.add(self)

    def _reset(self) -> None:
        # Entered instead of the condition. An RLock is entered in C, so a signal in the
        # middle leaves nothing locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._jobs: deque[tuple[Future[Any], Callable[[], Any]]] = deque(
            maxlen=QUESTIONS
        )
        self._threads = self._idle = 0

    def ask(self, question: Callable[[Member], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._mutex:
            self._jobs.append((future, lambda: question(self)))
            if len(self._jobs) > self._idle and self._threads < THREADS:
                threading.Thread(
                    target=self._loop, name=f"dlocks-quorum-{self.alias}", daemon=True
                ).start()
                self._threads += 1
            self._changed.notify()
        return future

    def _loop(self) -> None:
        try:
            use_private_connections()
            while True:
                with self._mutex:
                    self._idle += 1
                    there = self._changed.wait_for(lambda: self._jobs, IDLE_CLOSE_AFTER)
                    self._idle -= 1
                    if not there:
                        return
                    future, work = self._jobs.popleft()
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(request(work))
                        self.silent = False
                    except BaseException as error:  # noqa: BLE001 (passed to the caller)
                        future.set_exception(error)
                del future, work
        finally:
            with self._mutex:
                self._threads -= 1
            self.backend.close()


_members = each_in_child(Member._reset)


class Answers:
    """The replies of the members by alias, and the errors of the others."""

    def __init__(self, members: int) -> None:
        self.members = members
        self.majority = members // 2 + 1
        self.said: dict[str, Any] = {}
        self.failed: dict[str, BaseException] = {}

    def yes(self) -> int:
        return sum(bool(answer) for answer in self.said.values())

    def no(self) -> int:
        return len(self.said) - self.yes()

    def is_refused(self) -> bool:
        return self.no() > self.members - self.majority

    def is_decided(self) -> bool:
        return self.yes() >= self.majority or self.is_refused()

    def suffices(self) -> bool:
        """Return whether to ignore the replies that are still missing.

        Their votes may even be decisive. A split vote is abandoned at once, so that the
        next one can succeed.
        """
        return len(self.said) >= self.majority
