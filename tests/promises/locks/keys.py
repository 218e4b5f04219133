"""What other callers find, and what operators do, by public names."""

from __future__ import annotations

import io

from django.core.management import call_command

from dlocks.models import LockClaim, ResourceLock
from dlocks.testing import held_elsewhere
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
    reason = "--reason", "tests"
    call_command("clear_lock", key, "--yes", *reason, using=using, stdout=io.StringIO())


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


def queued(key):
    """Return the waiters of a key in the default backends."""
    return LockClaim.objects.filter(key_resource=key, version=None)
