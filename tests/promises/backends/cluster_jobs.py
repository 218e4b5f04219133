"""The jobs of the tests of other servers, see tests/processes.py."""

from __future__ import annotations

import time
import uuid
from contextlib import contextmanager, nullcontext, suppress

from django.core.management import call_command
from django.db import DatabaseError, InterfaceError, connections, transaction

from dlocks import LockError, db_lock
from tests.models import Counter

# The table of the model Counter.
TABLE = "tests_counter"
TROUBLE = (LockError, DatabaseError, InterfaceError)


@contextmanager
def _locked(key, how, **policy):
    """Enter a transaction under a lock of the kind ``how``, and yield the token."""
    if how == "transaction":
        with transaction.atomic(), db_lock(key, **policy) as held:
            yield held.token
    elif how == "nothing":
        with transaction.atomic():
            yield 0
    else:
        with (
            db_lock(key, **policy) as held,
            held.atomic() if how == "guard" else transaction.atomic(),
        ):
            yield held.token


def number_rows(pipe, key, how, *, rows=None, **policy):
    """Insert rows, each with the number of the rows that it sees.

    This goes on until so many rows are committed, or without ``rows`` until notified.
    Return the numbers and tokens of the committed rows in order, and the names of the
    errors.
    """
    written, troubles = [], []
    while not pipe.poll() if rows is None else len(written) < rows:
        try:
            with _locked(key, how, **policy) as token:
                number = Counter.objects.count()
                Counter.objects.create(name=uuid.uuid4().hex, value=number)
            written.append((number, token))
        except TROUBLE as trouble:
            troubles.append(type(trouble).__name__)
            time.sleep(0.01)
    if rows is None:
        pipe.hear()
    return written, troubles


def numbers(pipe):
    """Return the numbers of all rows."""
    connections["default"].close()
    return sorted(Counter.objects.values_list("value", flat=True))


def names(pipe, using="default"):
    connections[using].close()
    return sorted(Counter.objects.using(using).values_list("name", flat=True))


def prepare(pipe):
    """Create the tables that are missing, and delete the rows of other tests."""
    connection = connections["default"]
    if TABLE not in connection.introspection.table_names():
        call_command("migrate", "dlocks", verbosity=0)
        with connection.schema_editor() as editor:
            editor.create_model(Counter)
    with connection.cursor() as cursor:
        # The tables of models that refer to it do not exist.
        cursor.execute(f"DELETE FROM {TABLE}")


def hold_and_write(pipe, key, name, *, wait="inside", careless=False, **policy):
    """Write inside the block of a transaction-scoped lock, and after it.

    Wait for the test at one of the two points. A careless caller ignores the LockError
    of the block. Return the outcome.
    """
    try:
        with transaction.atomic():
            ignored = suppress(LockError) if careless else nullcontext()
            with ignored, db_lock(key, **policy) as held:
                Counter.objects.create(name=f"{name}, inside")
                if wait == "inside":
                    pipe.pause(held.token)
            if wait == "inside":
                # A caller that ignores a lost lock must not commit anything.
                Counter.objects.create(name=f"{name}, after")
            else:
                # The message is sent only now, so that the other transaction does not
                # commit while this one leaves the block.
                pipe.pause(held.token)
    except TROUBLE as trouble:
        return type(trouble).__name__
    return "committed"


def guard(pipe, key, name, *, when_told=False, **policy):
    """Acquire, and write in a guarded transaction that ends when notified.

    If it is to begin ``when_told``, it uses a new connection, and ends at once. Return
    the outcome.
    """
    held = db_lock(key, **policy).acquire()
    pipe.say(held.token)
    if when_told:
        pipe.hear()
        connections["default"].close()
    try:
        with held.atomic():
            Counter.objects.create(name=name)
            if not when_told:
                pipe.pause("inside")
    except TROUBLE as trouble:
        return type(trouble).__name__
    finally:
        with suppress(LockError):
            held.release()
    return "committed"


def check_takeover(worker, token):
    """Check that ``guard()`` of a process commits, with a larger token."""
    assert worker.hear() > token
    assert worker.hear() == "inside"
    assert worker.go_on() == "committed"


def write_under(pipe, key, name, **policy):
    with db_lock(key, **policy) as held, transaction.atomic():
        Counter.objects.create(name=name)
    return held.token


def token_of(pipe, key, **policy):
    with db_lock(key, **policy) as held:
        return held.token


def names_under(pipe, key, using="default", **policy):
    """Read under the lock, through another alias of the database."""
    with db_lock(key, **policy):
        return names(pipe, using)


def system_check(pipe):
    from django.core.checks import run_checks

    return [
        message.id
        for message in run_checks(databases=["default"])
        if message.id.startswith("dlocks.")
    ]


def error_of_acquiring(pipe, key, **policy):
    """Acquire and release. Return the error message, or None."""
    try:
        db_lock(key, **policy).acquire().release()
    except Exception as error:
        return str(error)
    return None
