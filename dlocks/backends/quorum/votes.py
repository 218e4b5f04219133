"""Requests to all members of a quorum, and what their replies decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from dlocks.backends.base import Backend
from dlocks.backends.quorum.members import Member
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock


@dataclass(frozen=True, slots=True)
class Answers:
    """The replies of the members by alias, and the errors of the others."""

    said: dict[str, Any]
    failed: dict[str, BaseException]

    def yes(self) -> int:
        return sum(bool(answer) for answer in self.said.values())

    def no(self) -> int:
        return len(self.said) - self.yes()


class Votes(Backend):
    """The requests to the members, and the count of their replies."""

    of: tuple[str, ...]
    majority: int
    node_timeout: float
    _found: Sequence[Member] = ()

    def members(self) -> Sequence[Member]:
        """Return the members, or raise an error that names an unsuitable one."""
        if not self._found:
            places: dict[str, str] = {}
            found = []
            for alias in self.of:
                try:
                    backend = self.runtime.backend_of(alias)
                except ImproperlyConfigured as error:
                    raise self._impossible(
                        f"{alias!r} cannot be a member: {error}"
                    ) from error
                if isinstance(backend, Votes) or not backend.exclusive:
                    raise self._impossible(
                        f"{alias!r} cannot be a member: it is a"
                        f" {type(backend).__name__}."
                    )
                if not backend.has_fixed_prefix:
                    # Requests run in threads of the members, which do not know the
                    # caller's tenant.
                    raise self._impossible(
                        f"{alias!r} cannot be a member: its prefix is a function."
                        f" Set the prefix on {self.alias!r} instead."
                    )
                if (other := places.setdefault(backend.identity, alias)) != alias:
                    raise self._impossible(
                        f"{other!r} and {alias!r} keep their locks in the same"
                        " place, which has only one vote."
                    )
                found.append(Member(alias, backend))
            # Two threads may both get here. A request is correct with either list.
            self._found = found
        return self._found

    def _impossible(self, why: str) -> ImproperlyConfigured:
        return ImproperlyConfigured(f"DLOCKS[{self.alias!r}]['OPTIONS']['of']: {why}")

    def _ask(
        self,
        question: Callable[[Member], Any],
        decided: Callable[[Answers], bool],
        *,
        cancel: bool = True,
    ) -> Answers:
        """Send a request to all members in parallel, and return the replies.

        The wait ends after ``node_timeout`` seconds. Members with an overdue reply are
        not waited for if the other replies decide.
        """
        futures = {member.ask(question): member for member in self.members()}
        pending = set(futures)
        answers = Answers({}, {})
        deadline = clock.real_now() + self.node_timeout
        while pending and not (
            decided(answers) and all(futures[future].silent for future in pending)
        ):
            done, pending = wait(
                pending, max(0.0, deadline - clock.real_now()), FIRST_COMPLETED
            )
            if not done:
                for future in pending:
                    futures[future].silent = True
                    answers.failed[futures[future].alias] = TimeoutError(
                        f"no answer within {self.node_timeout:g} s"
                    )
                break
            for future in done:
                if (error := future.exception()) is None:
                    answers.said[futures[future].alias] = future.result()
                else:
                    answers.failed[futures[future].alias] = error
        if cancel:
            # Requests that no thread has begun.
            for future in pending:
                future.cancel()
        return answers

    def _counted(self, answers: Answers) -> bool:
        if not self._decided(answers):
            raise self._failure(answers)
        return answers.yes() >= self.majority

    def _decided(self, answers: Answers) -> bool:
        return (
            answers.yes() >= self.majority
            or answers.no() > len(self.of) - self.majority
        )

    def _suffices(self, answers: Answers) -> bool:
        """Return whether to ignore the replies that are still missing.

        Their votes may even be decisive. A split vote is abandoned at once, so that the
        next one can succeed.
        """
        return len(answers.said) >= self.majority

    def _enough(self, answers: Answers) -> None:
        """Raise LockBackendError unless enough members for a majority replied."""
        if len(answers.said) < self.majority:
            raise self._failure(answers)

    def _failure(self, answers: Answers) -> LockBackendError:
        failed = "; ".join(
            f"{alias}: {error}" for alias, error in sorted(answers.failed.items())
        )
        trouble = LockBackendError(
            f"DLOCKS[{self.alias!r}]: {len(answers.said)} of {len(self.of)} members"
            f" answered, and {self.majority} must agree. {failed}"
        )
        trouble.__cause__ = next(iter(answers.failed.values()), None)
        return trouble
