"""What the page on troubleshooting says of keys that look free."""

import io
import json
import threading

import pytest
from django.core.management import call_command
from django.db import transaction

from dlocks import LockTimeout, db_lock

pytestmark = pytest.mark.django_db(transaction=True)


def printed(*command, **options):
    out = io.StringIO()
    call_command(*command, stdout=out, no_color=True, **options)
    return out.getvalue()


def test_a_key_that_a_transaction_holds_looks_free_until_its_commit(threads):
    """The page on troubleshooting says so, and quotes the error of another caller.

    The list, ``locked()`` and ``holder()`` see only committed rows.
    """
    with db_lock("stock:7"):
        pass
    held, seen = threading.Event(), threading.Event()

    def work():
        with transaction.atomic(), db_lock("stock:7"):
            held.set()
            assert seen.wait(30)

    other = threads(work)
    assert held.wait(30)
    try:
        assert printed("list_locks") == "No locks.\n"
        (lock,) = json.loads(printed("list_locks", "--all", "--json"))
        assert (lock["key"], lock["state"]) == ("stock:7", "free")
        assert not db_lock("stock:7").locked()
        assert db_lock("stock:7").holder() is None
        with pytest.raises(LockTimeout, match="held by an open transaction"):
            db_lock("stock:7", timeout=0).acquire()
    finally:
        seen.set()
        other.join()
