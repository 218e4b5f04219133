"""Five processes increment an unguarded counter again and again.

The counter goes wrong if the lock does.
"""

from __future__ import annotations

from functools import partial

import pytest
from django.db import transaction

from dlocks import db_lock
from dlocks.models import ResourceLock
from tests import jobs
from tests.for_each import for_each
from tests.promises.commands.running import run
from tests.volume import volume

pytestmark = [pytest.mark.django_db(transaction=True)]

PROCESSES = 5
# The number of increments of each process. In the queue, each increment belongs to
# another process, which has to wake up. A claim in a transaction makes the key busy.
# Each backend meets both scopes and both orders.
CASES = [
    ("default", "lease", False, 20),
    ("default", "transaction", True, 5),
    ("optimistic", "lease", True, 5),
    ("optimistic", "transaction", False, 8),
    ("insert", "lease", False, 20),
    ("insert", "transaction", True, 5),
]


@pytest.mark.driver
@for_each("case", CASES)
def test_no_increment_is_lost_and_tokens_strictly_increase(
    case, workers, count_together
):
    """Rows are purged and created again all the time."""
    using, scope, fair, times = case
    policy = {"scope": scope, "using": using, "fair": fair, "timeout": None}
    purge = partial(run, "reap_locks", idle_for="0s", using=using)
    crowd = workers(PROCESSES)
    for mine in count_together(crowd, volume(times), purge, 0.05, **policy):
        assert mine == sorted(mine)


# A unit test forces the moment on PostgreSQL, see test_a_lost_race_in_a_transaction_….
@pytest.mark.engine("mariadb")
def test_a_failed_attempt_in_a_transaction_locks_no_row(workers):
    """The last writer may unlock the row just as the caller stops trying.

    This moment cannot be forced, so the test waits for it. It took less than 12,000
    attempts on MariaDB 10.11, and each run makes some of them.
    """
    times = volume(250)
    with db_lock("stock:7", ttl=600):
        *askers, one, other = workers(5)
        for writer in one, other:
            assert writer.call(jobs.write_again_and_again, "stock:7") == "writing"
        for asker in askers:
            asker.start(jobs.ask_again_and_again, "stock:7", times=times)
        for asker in askers:
            assert asker.hear(200) == "asked"
        for writer in one, other:
            assert writer.go_on() > times / 10
        with transaction.atomic():
            ResourceLock.objects.select_for_update(nowait=True).get(pk="stock:7")
        for asker in askers:
            asker.tell()
        assert [asker.hear() for asker in askers] == [0, 0, 0]
