"""The members of a quorum, with threads of their own, and their replies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from dlocks.backends.base import Backend
from dlocks.runtime.pools import use_private_connections
from dlocks.runtime.process import each_in_child
from dlocks.runtime.requests import request
from dlocks.runtime.threads import BackgroundThread, new_mutex

# The largest number of threads that send requests to one member. A member that does not
# reply blocks that many requests.
THREADS = 8

# Requests to a member that wait for a thread. The oldest is dropped, since its caller
# no longer waits for it.
QUESTIONS = 1000

# Seconds for which an idle thread keeps its connections. It is less than the time for
# which DROP DATABASE waits for them to close.
IDLE_CLOSE_AFTER = 0.5


# A member with its reply, or with the error instead.
Reply = tuple["Member", Any, BaseException | None]


@dataclass(eq=False, slots=True)
class Question:
    """A request to one member, whose reply is put into ``replies``.

    That queue is written in C. The condition of a future stays locked if an interrupt
    strikes its caller, and the member's thread would wait for it without end.
    """

    work: Callable[[Member], Any]
    replies: SimpleQueue[Reply]
    # Then it is not sent, unless a thread has begun to do so.
    is_withdrawn: bool = False


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
        self._mutex = new_mutex()
        self._questions: SimpleQueue[Question] = SimpleQueue()
        # The number of questions that are queued or in progress.
        self._open = 0
        name = f"dlocks-quorum-{self.alias}"
        self._threads = [BackgroundThread(name, self._loop) for _ in range(THREADS)]

    def ask(
        self, work: Callable[[Member], Any], replies: SimpleQueue[Reply]
    ) -> Question:
        """Let a thread call a function with this member, and put its reply there."""
        question = Question(work, replies)
        with self._mutex:
            running = sum(thread.is_running for thread in self._threads)
            if self._open > running + QUESTIONS:
                with suppress(Empty):
                    self._questions.get_nowait()
                    self._open -= 1
            self._open += 1
            self._questions.put(question)
            has_idle = self._open <= running
        try:
            if not has_idle:
                any(map(BackgroundThread.start, self._threads))
        except RuntimeError:
            # No thread can start any more when Python is about to exit.
            if not running:
                with suppress(Empty):
                    self._answer(self._questions.get_nowait())
        return question

    def _loop(self) -> None:
        has_place = any(thread.is_current for thread in self._threads)
        if not (has_place or any(map(BackgroundThread.take, self._threads))):
            # Callers that asked at once have started more threads than are allowed.
            return
        use_private_connections()
        while (question := self._next()) is not None:
            request(self._answer, question)
            # A reference kept during the pause would keep the caller's objects alive.
            del question
        self.backend.close()

    def _next(self) -> Question | None:
        """Return a question, or None if this thread ends because there is none."""
        while True:
            with suppress(Empty):
                return self._questions.get(timeout=IDLE_CLOSE_AFTER)
            with self._mutex:
                if self._questions.empty():
                    for thread in list(one for one in self._threads if one.is_current):
                        thread.end()
                    return None

    def _answer(self, question: Question) -> None:
        reply: Reply = self, None, None
        try:
            if not question.is_withdrawn:
                reply = self, question.work(self), None
                self.silent = False
        except BaseException as error:  # noqa: BLE001 (passed to the caller)
            reply = self, None, error
        with self._mutex:
            # Before the reply, after which the caller may ask the next question.
            self._open -= 1
        question.replies.put(reply)
        # Otherwise an error and the frames of its traceback would be a cycle.
        del reply


_members = each_in_child(Member._reset)


class Answers:
    """The replies of the members by alias, and the errors of the others."""

    def __init__(self, majority: int) -> None:
        self.majority = majority
        self.said: dict[str, Any] = {}
        self.failed: dict[str, BaseException] = {}

    def yes(self) -> int:
        return sum(bool(answer) for answer in self.said.values())

    def no(self) -> int:
        return len(self.said) - self.yes()

    def is_refused(self) -> bool:
        return self.no() >= self.majority

    def is_decided(self) -> bool:
        return self.yes() >= self.majority or self.is_refused()

    def suffices(self) -> bool:
        """Return whether to ignore the replies that are still missing.

        Their votes may even be decisive. A split vote is abandoned at once, so that the
        next one can succeed.
        """
        return len(self.said) >= self.majority
