"""The jobs of the tests of other servers, see tests/processes.py."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import uuid
from contextlib import contextmanager, suppress

from django.core.management import call_command
from django.db import DatabaseError, InterfaceError, connections, transaction

from dlocks import LockError, LockLost, db_lock
from tests import jobs
from tests.internals import backends, waiters
from tests.models import Counter

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
    if Counter._meta.db_table not in connection.introspection.table_names():
        call_command("migrate", "dlocks", verbosity=0)
        with connection.schema_editor() as editor:
            editor.create_model(Counter)
    # The tables of models that refer to it do not exist.
    Counter.objects.all()._raw_delete("default")


def hold_and_write(pipe, key, name, *, wait, **policy):
    """Write inside the block of a transaction-scoped lock, and after it.

    Wait for the test at one of the two points. Return the outcome.
    """
    try:
        with transaction.atomic():
            with db_lock(key, **policy) as held:
                Counter.objects.create(name=f"{name}, inside")
                if wait == "inside":
                    pipe.say(held.token)
                    pipe.hear()
            if wait == "inside":
                # A caller that ignores a lost lock must not commit anything.
                Counter.objects.create(name=f"{name}, after")
            else:
                # The message is sent only now, so that the other transaction does not
                # commit while this one leaves the block.
                pipe.say(held.token)
                pipe.hear()
    except TROUBLE as trouble:
        return type(trouble).__name__
    return "committed"


def go_on_after_an_error(pipe, key, name, **policy):
    """Go on writing in a transaction that has lost its lock.

    The ``LockError`` is ignored. Return the outcome.
    """
    try:
        with transaction.atomic():
            with suppress(LockError), db_lock(key, **policy):
                Counter.objects.create(name=f"{name}, inside")
                pipe.say("inside")
                pipe.hear()
            Counter.objects.create(name=f"{name}, after")
    except TROUBLE as trouble:
        return type(trouble).__name__
    return "ended"


def guard(pipe, key, name, **policy):
    """Write in a guarded transaction that ends when notified."""
    held = db_lock(key, **policy).acquire()
    pipe.say(held.token)
    try:
        with held.atomic():
            Counter.objects.create(name=name)
            pipe.say("inside")
            pipe.hear()
    except TROUBLE as trouble:
        return type(trouble).__name__
    finally:
        with suppress(LockError):
            held.release()
    return "committed"


def guard_when_told(pipe, key, name, **policy):
    """Acquire, and begin the guarded transaction when notified.

    It uses a new connection. Return the outcome.
    """
    held = db_lock(key, **policy).acquire()
    pipe.say(held.token)
    pipe.hear()
    connections["default"].close()
    try:
        with held.atomic():
            Counter.objects.create(name=name)
    except TROUBLE as trouble:
        return type(trouble).__name__
    finally:
        with suppress(LockError):
            held.release()
    return "committed"


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


def still_held(pipe):
    """Return for each key whether its hold is still held.

    The holds are those of ``tests.jobs.acquire()``.
    """
    answers = {}
    for held in jobs._kept:
        try:
            held.check()
            answers[held.key] = True
        except LockLost:
            answers[held.key] = False
    return answers


def error_of_acquiring(pipe, key, **policy):
    """Acquire and release. Return the error message, or None."""
    try:
        db_lock(key, **policy).acquire().release()
    except Exception as error:
        return str(error)
    return None


def fork_in_the_middle_of_a_question(pipe, key, *, using):
    """Fork while another thread is inside the client of a Redis cluster.

    Return the token of the hold, and the token that the child sees.
    """
    with db_lock(key, using=using) as held:
        token = held.token
    inside, forked = threading.Event(), threading.Event()

    def ask():
        # Every request takes this lock for a moment. The thread simulates a request
        # that is under way.
        with backends[using]._client.nodes_manager._lock:
            inside.set()
            forked.wait(60)

    thread = threading.Thread(target=ask)
    thread.start()
    assert inside.wait(10)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with db_lock(key, using=using) as held:
            os.write(writing, str(held.token).encode())
        os._exit(0)
    forked.set()
    thread.join()
    there, _, _ = select.select([reading], [], [], 20)
    granted = os.read(reading, 100).decode() if there else "nothing, since it hangs"
    if not there:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return token, granted


def be_patient(pipe, seconds):
    """Set the seconds after which unreachable servers are reported to waiters."""
    waiters.CONNECT_TIMEOUT = seconds
