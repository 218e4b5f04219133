"""What the tests of snapshots need: another connection, and an isolation level."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections

from tests import jobs


@pytest.fixture
def in_second_connection():
    """Return a function that calls another one in a second thread.

    Its connection stays open, unlike that of ``in_other_thread``.
    """
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(60)
        pool.submit(connections.close_all).result(60)


@pytest.fixture
def repeatable_read(transactional_db):
    """Run the transactions of this thread at REPEATABLE READ."""
    with jobs.isolated("REPEATABLE READ"):
        yield
