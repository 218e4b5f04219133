"""An unguarded counter in a file goes wrong if the lock does: 8 processes, 500 increments each."""

from __future__ import annotations

import itertools

import pytest
from django.db import connection

from dlocks.conf import backends
from tests import jobs

pytestmark = [pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]), pytest.mark.timeout(300)]

PROCESSES, TIMES = 8, 500


@pytest.mark.parametrize("scope", ["lease", "transaction"])
@pytest.mark.parametrize("using", ["default", "optimistic", "insert"])
def test_no_increment_is_lost_and_tokens_strictly_increase(using, scope, workers, tmp_path):
    """… though rows are purged and made anew all the while."""
    path = tmp_path / "counter"
    path.write_text("0 0")
    crowd = workers(PROCESSES)
    for worker in crowd:
        worker.start(jobs.count, str(path), "counter", times=TIMES, scope=scope, using=using, timeout=None)
    purged = 0
    while not all(worker.pipe.poll(0.05) for worker in crowd):
        purged += sum(backends[using].purge(0))
    tokens = [worker.hear() for worker in crowd]
    connection.close()
    value, last = map(int, path.read_text().split())
    assert value == PROCESSES * TIMES
    assert last == max(itertools.chain.from_iterable(tokens))
    for mine in tokens:
        assert mine == sorted(set(mine))
    everybody = list(itertools.chain.from_iterable(tokens))
    assert len(set(everybody)) == len(everybody)
