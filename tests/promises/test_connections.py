"""dlocks' own connections commit, and no caller waits for one for ever."""

from __future__ import annotations

import asyncio
import io
import json

import pytest
from django.core.management import call_command
from django.db import connection, transaction

from dlocks import db_lock, db_rwlock, db_semaphore
from dlocks.testing import abandoned
from tests import jobs

pytestmark = pytest.mark.django_db(transaction=True)

SERVERS = pytest.mark.engine("postgresql", "mariadb", "mysql")


def there(**changes):
    """Return the environment of a process that has changed settings of DATABASES."""
    settings = connection.settings_dict
    same = {name: str(settings[name]) for name in ("ENGINE", "NAME", "USER", "HOST")}
    same |= {"PORT": str(settings["PORT"]), "OPTIONS": settings["OPTIONS"]}
    databases = {"default": {**same, **changes}}
    return {"DLOCKS_TEST_DATABASES": json.dumps(databases)}


# Without autocommit, as by "AUTOCOMMIT": False in DATABASES.


@pytest.fixture
def manual(doomed):
    """Return a process whose own connections never commit by themselves."""
    return doomed(**there(AUTOCOMMIT=False))


def leases(**policy):
    """Return leases of every kind, by a name."""
    policy["scope"] = "lease"
    return {
        "one": db_lock("stock:1", **policy),
        "several": db_lock("stock:2", "stock:3", **policy),
        "permit": db_semaphore("stock:4", 1, **policy),
        "write": db_rwlock("stock:5", **policy).write(),
    }


def hold_leases(pipe, in_loop):
    """Acquire all leases, hold them for as long as the test says, and release them."""

    async def cycle():
        for lock in leases().values():
            await lock.aacquire()
        pipe.say("held")
        pipe.hear()
        held = [lock.held() for lock in leases().values()]
        for lock in leases().values():
            await lock.arelease()
        return held

    if in_loop:
        return asyncio.run(cycle())
    holds = [lock.acquire() for lock in leases().values()]
    pipe.say("held")
    pipe.hear()
    held = [hold.held for hold in holds]
    for hold in holds:
        hold.release()
    return held


@SERVERS
@pytest.mark.parametrize("in_loop", [False, True], ids=["sync", "async"])
def test_a_lease_survives_its_session_without_autocommit(in_loop, manual, doomed):
    """No second caller gets a key while ``held`` is true.

    The sessions of dlocks commit each change, so the server undoes none of them when it
    ends a session. A release is visible to others at once.
    """
    before = doomed().call(jobs.other_sessions)
    manual.start(hold_leases, in_loop)
    assert manual.hear() == "held"
    killer = doomed()
    assert killer.call(jobs.kill_other_sessions, but=before)
    for name, lock in leases(timeout=0).items():
        assert lock.try_acquire() is None, name
    manual.tell()
    assert manual.hear() == [True] * len(leases())
    for lock in leases(timeout=0).values():
        lock.acquire().release()


def wait_and_count(pipe):
    """Wait for a key in the queue, and return the token of the hold."""
    with db_lock("stock:7", scope="lease", timeout=30) as hold:
        return hold.token


@SERVERS
def test_a_waiter_is_served_in_its_turn_without_autocommit(manual, until):
    """The queue of a key shows the waiter, and the release hands the key over."""
    with db_lock("stock:7") as hold:
        manual.start(wait_and_count)
        until(lambda: hold.queue_length() == 1)
        token = hold.token
    assert manual.hear() > token
    db_lock("stock:7", timeout=0).acquire().release()


def follow_the_advice(pipe):
    """Do what the errors advise, and return the errors."""
    errors = []

    def refused(action):
        try:
            action()
        except RuntimeError as error:
            errors.append(str(error))

    is_server = connection.vendor != "sqlite"
    lock = db_lock("stock:7", timeout=0)
    refused(lock.acquire)
    with transaction.atomic(), lock as hold:
        assert hold.scope == "transaction"
    transaction.commit()
    if is_server:
        with db_lock("stock:8", scope="lease", timeout=0) as hold:
            refused(hold.atomic().__enter__)
    else:
        refused(db_lock("stock:7", scope="lease", timeout=0).acquire)
    transaction.commit()
    transaction.set_autocommit(True)
    with lock as hold:
        assert hold.scope == "lease"
        with hold.atomic():
            pass
    return errors


def test_the_advice_about_autocommit_works(manual):
    """An error names what the caller can do, and each of that works."""
    errors = manual.call(follow_the_advice)
    assert len(errors) == 2
    for error in errors:
        assert "Remove 'AUTOCOMMIT' from DATABASES['default']" in error
        assert "transaction.set_autocommit(True, using='default')" in error
    assert "'with atomic()' or scope='lease'" in errors[0]


def leave_the_block(pipe):
    """Return whether a hold of an atomic block is held after it and after a commit."""
    with transaction.atomic():
        hold = db_lock("stock:7").acquire()
        inside = hold.held
    after = hold.held
    transaction.commit()
    return inside, after, hold.held


def test_a_hold_of_an_atomic_block_ends_with_it_without_autocommit(manual, is_busy):
    """Django does not report the commit, so nothing says that the key is held then."""
    assert manual.call(leave_the_block) == (True, False, False)
    assert not is_busy()


def check_and_clear(pipe):
    """Return what the check says, and whether ``clear_lock`` took effect."""
    errors = io.StringIO()
    call_command("check", stderr=errors)
    call_command("clear_lock", "stock:7", "--yes", stdout=io.StringIO())
    return errors.getvalue()


def test_a_check_and_the_commands_know_about_autocommit(manual):
    """``check`` warns, and ``clear_lock`` commits what it says that it did."""
    abandoned("stock:7")
    assert db_lock("stock:7").holder().stale
    said = manual.call(check_and_clear)
    assert said.count("(dlocks.W009) Database 'default' has 'AUTOCOMMIT': False") == 1
    assert db_lock("stock:7").holder() is None
