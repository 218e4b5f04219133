"""Work that every node starts and one must do: scheduled jobs and management commands."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from dlocks.backends.base import seconds
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.coroutines import in_django_thread
from dlocks.decorators import Key, LockDecorator, Template
from dlocks.exceptions import LockTimeout
from dlocks.holds import Hold
from dlocks.locks import Lock

# EX_TEMPFAIL of sysexits.h: nothing is wrong, try again later.
BUSY = 75


class _OneRun(LockDecorator[None]):
    """A decorator that skips, and whose lease lasts for ``at_least`` even when its holder dies."""

    def lock(self, key: str) -> Lock:
        backend = backends[self.policy["using"]]
        ttl = max(self.policy["at_least"], backend.ttl)
        policy = dict(self.policy)
        if backend.in_transaction() and backend.lease_refused() is None and not backend.keeps_shares():
            # One that belonged to the caller's transaction would end with that, and be taken back by its rollback.
            policy["scope"] = "lease"
        return Lock(key=key, ttl=ttl, **policy)

    async def alock(self, key: str) -> Lock:
        # The caller's transaction, if there is one, is that of Django's thread.
        return await in_django_thread(partial(self.lock, key))


def run_once(
    key: Key,
    *,
    at_least: float,
    at_most: float | None = None,
    using: str = DEFAULT_ALIAS,
    **policy: Any,
) -> LockDecorator[None]:
    """
    Decorate a job that every node starts at about the same time, and that one of them must run.

    The others return None at once. For ``at_least`` seconds from its beginning the job is not begun again, however
    soon it is done, fails or dies: more than the clocks of the nodes differ by, and less than the time between two
    runs. A run that takes longer than ``at_most`` seconds no longer keeps the next one away, and ends with LockLost;
    without ``at_most`` it keeps it away for as long as its process lives. The rest is the policy of ``db_lock()``.
    """
    seconds("at_least", at_least, above_zero=True)
    if at_most is not None and seconds("at_most", at_most, above_zero=True) < at_least:
        raise ValueError(f"at_most must be no less than at_least, {at_least!r}, not {at_most!r}")
    if refused := {"busy", "max_hold", "timeout", "ttl"} & policy.keys():
        raise TypeError(f"run_once() takes no {', '.join(sorted(refused))}: use db_lock() as the decorator.")
    if policy.get("scope") == "transaction":
        raise ValueError("run_once() cannot belong to a transaction: a rollback would have the job begun again.")
    return _OneRun(
        key, busy="skip", timeout=0, at_least=at_least, max_hold=at_most, using=using, reentrant=False, **policy
    )


class SingleInstance(BaseCommand):
    """
    A mixin for management commands of which one at a time may run: ``class Command(SingleInstance, BaseCommand)``.

    ``lock_key`` is the key, by default ``command:`` and the command's name; its fields are the command's options, as
    in ``"import:{supplier}"``. ``lock_policy`` is that of ``db_lock()``; without a ``timeout`` the command does not
    wait. While the command runs, ``hold`` is the hold. A command that runs already is a CommandError, with exit
    status 75.
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
        return Lock(key=key, **{"timeout": 0, **self.lock_policy})

    def execute(self, *args: Any, **options: Any) -> str | None:
        entered = False
        try:
            with self.get_lock(**options) as self.hold:
                entered = True
                return super().execute(*args, **options)
        except LockTimeout as error:
            # One of the command's own is not about this lock.
            if entered:
                raise
            raise CommandError(f"This command runs already: {error}", returncode=BUSY) from error
        finally:
            self.hold = None
