"""What tests of several promises share."""

import signal

import pytest
from django.db import transaction


@pytest.fixture
def handled():
    """Return a function that sets the handler of a signal until the test ends."""
    before = []

    def handle(number, handler):
        before.append((number, signal.signal(number, handler)))

    yield handle
    for number, handler in reversed(before):
        signal.signal(number, handler)


@pytest.fixture
def leave_in_transaction(paused):
    """Return a function that leaves a hold in an open transaction of another thread.

    It returns a function that commits the transaction, or rolls it back.
    """

    def leave(hold, *, rollback=False):
        def work():
            with transaction.atomic():
                hold.release()
                yield
                transaction.set_rollback(rollback)

        return paused(work)

    return leave
