"""The history that this process has written."""

from __future__ import annotations

import pytest

from tests.internals import HoldRecord, history, keeper


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Write remaining records before and after each test.

    They belong to the database of the test that made them.
    """

    def write():
        history.flush()
        with keeper._mutex:
            # These jobs are for records that are written by now. They could run during
            # the next test.
            keeper._workers.deferred.clear()

    write()
    yield
    write()


def records(**conditions):
    history.flush()
    return list(HoldRecord.objects.filter(**conditions).order_by("id"))
