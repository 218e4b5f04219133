"""What other callers find, and what operators do, by public names."""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager

from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import held_elsewhere
from tests.promises.commands.running import run
from tests.timing import eventually


def is_taken(key, using="default"):
    """Return whether another caller finds the key held.

    It acquires on the connection of the test, which needs no thread.
    """
    try:
        with held_elsewhere(key, using=using):
            return False
    except RuntimeError:
        return True


def clear(key, using="default"):
    """End the hold of a key as an operator does."""
    run("clear_lock", key, "--yes", "--reason", "tests", using=using)


def row(key):
    """Return the row of a key, with its state by the database's clock."""
    return ResourceLock.objects.by_clock().get(pk=key)


def await_renewal(hold):
    """Wait until the lease of a hold is renewed once more.

    Return the seconds that were left before.
    """
    lowest = hold.remaining

    def has_grown():
        nonlocal lowest
        left = hold.remaining
        lowest = min(lowest, left)
        return left > lowest + 0.1

    eventually(has_grown, 30)
    return lowest


@contextmanager
def unlocked_after(seconds, worker, job, *args, **which):
    """Let a process lock a row for some seconds from the beginning of a block."""
    with ExitStack() as stack:
        stack.enter_context(worker.doing(job, *args, **which))
        timer = threading.Timer(seconds, stack.close)
        timer.start()
        try:
            yield
        finally:
            timer.join()


def queued(key):
    """Return the waiters of a key in the default backends."""
    return LockClaim.objects.filter(key_resource=key, version=None)
