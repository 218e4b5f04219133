"""What the page on troubleshooting says of keys that look free."""

import pytest
from django.db import connection, transaction

from dlocks import LockTimeout, db_lock
from tests.promises.commands.running import listed, run

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]


def test_a_key_that_a_transaction_holds_looks_free_until_its_commit(paused):
    """The page on troubleshooting says so, and quotes the error of another caller.

    Without waiters, only PostgreSQL finds the transaction.
    """
    with db_lock("stock:7"):
        pass

    def work():
        with transaction.atomic(), db_lock("stock:7"):
            yield

    end = paused(work)
    is_found = connection.vendor == "postgresql"
    try:
        assert (run("list_locks") != "No locks.\n") is is_found
        state = "held" if is_found else "free"
        assert listed("--all")["stock:7"]["state"] == state
        assert db_lock("stock:7").locked() is is_found
        assert (db_lock("stock:7").holder() is not None) is is_found
        by = "session .*, in a transaction" if is_found else "an open transaction"
        with pytest.raises(LockTimeout, match=f"held by {by}"):
            db_lock("stock:7", timeout=0).acquire()
    finally:
        end()
