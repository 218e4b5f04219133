"""Scheduled jobs and management commands that only one node may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Never, Required, TypeVar, Unpack, overload

from django.core.management.base import BaseCommand, CommandError

from dlocks.backends.base import ANY_LEASE
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.core.options import KEYS, RUN, RunOptions, refuse_unknown
from dlocks.core.policy import shown
from dlocks.core.template import Template
from dlocks.decorators import Key, LockDecorator, running
from dlocks.exceptions import LockNotAwaitable, LockTimeout
from dlocks.runtime.connected import connection_of
from dlocks.runtime.coroutines import run_in_sync_thread
from dlocks.transactions import in_testcase
from dlocks.values import Duration, seconds

SHARED = replace(ANY_LEASE, shared=True, scope="transaction")

# EX_TEMPFAIL of sysexits.h: a temporary failure, to be retried later.
BUSY = 75

# Why run_once() has not all options of db_lock().
NEVER_WAITS = (
    "It does not wait while the key is held. To change that, use db_lock() as the"
    " decorator."
)


B = TypeVar("B", covariant=True)
T = TypeVar("T")


class _OneRun(LockDecorator[B]):
    """A decorator of a job that another node may have begun.

    Its lease lasts for ``min_hold`` even if the holder dies.
    """

    async def alock(self, key: str) -> Lock:
        # The caller's transaction, if any, belongs to the thread of
        # ``sync_to_async()``.
        return await run_in_sync_thread(partial(self.lock, key))

    def lock(self, key: str) -> Lock:
        backend = backends[self.policy["using"]]
        policy = {**self.policy, "ttl": max(self.policy["min_hold"], backend.ttl)}
        if backend.in_transaction() and (
            backend.refusal(SHARED) is not None
            or not in_testcase(connection_of(backend.database))
        ):
            # A hold in transaction scope would end with the caller's transaction, and a
            # rollback would undo it. A TestCase and SQLite accept even shared holds in
            # a transaction. SQLite refuses a lease there.
            policy["scope"] = "lease"
        return Lock(key=key, **policy)


class _Options(RunOptions, total=False):
    min_hold: Required[Duration]
    max_hold: Duration | None
    using: str


@overload
def run_once(
    key: Key, *, busy: Literal["skip"] = ..., **options: Unpack[_Options]
) -> LockDecorator[None]: ...


@overload
def run_once(
    key: Key, *, busy: Literal["raise"], **options: Unpack[_Options]
) -> LockDecorator[Never]: ...


@overload
def run_once(
    key: Key, *, busy: Callable[..., T], **options: Unpack[_Options]
) -> LockDecorator[T]: ...


def run_once(
    key: Key,
    *,
    min_hold: Duration,
    max_hold: Duration | None = None,
    busy: Any = "skip",
    using: str = DEFAULT_ALIAS,
    **options: Unpack[RunOptions],
) -> LockDecorator[Any]:
    """Run a scheduled job on one node although every node starts it.

    The nodes start the job at about the same time. All but one skip it and return None
    at once, and so does a run that the job itself starts. To tell a skipped run from a
    job that returns None, use ``busy="raise"``, which raises LockTimeout, or a function
    of the LockTimeout and the job's arguments. Its result is that of the call.

    ``min_hold`` is the time after a run's start in which no other run starts, in
    seconds or as a ``timedelta`` (ShedLock's ``lockAtLeastFor``). This holds even if
    the run finishes early, fails or dies. It must exceed the difference between the
    nodes' clocks, and be less than the time between two runs.

    A run that takes longer than ``max_hold`` (ShedLock's ``lockAtMostFor``) no longer
    blocks the next one, and ends with LockLost. The job can extend it by
    ``current_hold().renew(max_hold=…)``. Without ``max_hold`` it blocks the next one
    for as long as its process lives. The other options are those of ``db_lock()``.
    """
    policy: dict[str, Any] = {**options}
    refuse_unknown(
        "run_once()",
        policy,
        RUN,
        **dict.fromkeys(("reentrant", "timeout", "ttl"), NEVER_WAITS),
    )
    min_hold = seconds("min_hold", min_hold, above_zero=True)
    if max_hold is not None:
        max_hold = seconds("max_hold", max_hold, above_zero=True)
        if max_hold < min_hold:
            raise ValueError(
                f"min_hold must not be greater than max_hold: {shown(min_hold)} s and"
                f" {shown(max_hold)} s"
            )
    if policy.get("scope") == "transaction":
        raise ValueError(
            "run_once() cannot use scope='transaction': after a rollback the job would"
            " run again."
        )
    return _OneRun(
        key,
        busy=busy,
        timeout=0,
        min_hold=min_hold,
        max_hold=max_hold,
        using=using,
        reentrant=False,
        **policy,
    )


# The keys and tokens of the commands that run in this process. A command that calls
# itself would enter its own hold.
_runs: set[tuple[str, int]] = set()


class SingleInstance(BaseCommand):
    """A mixin for management commands of which only one may run at a time.

    Use it as in ``class Command(SingleInstance, BaseCommand)``.

    ``lock_key`` is the key. The default is ``command:`` and the command's name. Its
    fields are the command's options, as in ``"import:{supplier}"``. ``lock_policy`` has
    the options of ``db_lock()``. Without a ``timeout`` the command does not wait. While
    the command runs, ``hold`` is its hold. If the command is running already, also if
    it calls itself, CommandError is raised with exit status 75.
    """

    lock_key: str | None = None
    lock_policy: Mapping[str, Any] = {}
    hold: Hold | None = None

    def get_lock(self, **options: Any) -> Lock:
        """Return the lock for a run with these options."""
        if self.lock_key is None:
            key = f"command:{type(self).__module__.rpartition('.')[2]}"
        else:
            key = Template(self.lock_key).render(options)
        refuse_unknown("lock_policy", self.lock_policy, KEYS)
        return Lock(key=key, **{"timeout": 0, **self.lock_policy})

    def execute(self, *args: Any, **options: Any) -> str | None:
        before, entered = self.hold, False
        try:
            with self.get_lock(**options) as self.hold:
                entered = True
                run = self.hold.key, self.hold.token
                if run in _runs:
                    raise CommandError(
                        f"This command is already running: {run[0]!r} is held by the"
                        " run that calls it.",
                        returncode=BUSY,
                    )
                _runs.add(run)
                try:
                    # A run of any length is normal.
                    self.hold.allow_long()
                    with running(self.hold):
                        return super().execute(*args, **options)
                finally:
                    _runs.discard(run)
        except (LockTimeout, LockNotAwaitable) as error:
            # An error from the command itself concerns another lock.
            if entered:
                raise
            raise CommandError(
                f"This command is already running: {error}", returncode=BUSY
            ) from error
        finally:
            self.hold = before
