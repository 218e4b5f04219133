"""What the processes of the tests do: see tests/processes.py."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path

from django.db import transaction

from dlocks import LockError, db_lock


def hold(pipe, key, **policy):
    """Acquire, say the token, and hold until told to release."""
    with db_lock(key, **policy) as held:
        pipe.say(held.token)
        pipe.hear()
    return "released"


def hold_in_transaction(pipe, key, *, roll_back=False, **policy):
    with transaction.atomic(), db_lock(key, **policy) as held:
        pipe.say(held.token)
        pipe.hear()
        transaction.set_rollback(roll_back)
    return "ended"


def wait_for(pipe, key, **policy):
    """Acquire, and say when on the clock that all processes share."""
    pipe.say("waiting")
    with db_lock(key, **policy) as held:
        return time.monotonic(), held.token


def try_once(pipe, key, **policy):
    found = db_lock(key, **policy).try_acquire()
    if found is None:
        return None
    found.release()
    return found.token


def acquire(pipe, key, **policy):
    """Acquire and never release; the answer is the token, or the error's name."""
    try:
        held = db_lock(key, **policy).acquire()
    except LockError as error:
        return type(error).__name__
    _kept.append(held)
    return held.token


def forget(pipe):
    for held in _kept:
        held.release()
    _kept.clear()


_kept = []


def count(pipe, path, key, *, times, scope, **policy):
    """
    Add to an unguarded counter in a file, under the lock; return the tokens in order.

    The counter goes wrong if the lock does: it is read and written in two steps, with a chance for others between.
    """
    tokens = []
    path = Path(path)
    for number in range(times):
        with transaction.atomic() if scope == "transaction" else nullcontext(), db_lock(key, **policy) as held:
            value, last = map(int, path.read_text().split())
            assert held.token > last, f"token {held.token} after {last}"
            if number % 50 == 0:
                time.sleep(0)
            path.write_text(f"{value + 1} {held.token}")
            tokens.append(held.token)
    return tokens


def migrate(pipe):
    from django.core.management import call_command
    from django.db import connection

    connection.close()
    _create_database()
    call_command("migrate", verbosity=0)


def _create_database():
    """Make the database on a server that is quite new."""
    port, engine, name = (os.environ[f"DLOCKS_TEST_{part}"] for part in ("PORT", "ENGINE", "NAME"))
    if engine == "postgresql":
        import psycopg

        server = psycopg.connect(host="127.0.0.1", port=port, user="dlocks", dbname="postgres", autocommit=True)
        server.execute(f"CREATE DATABASE {name}")
    else:
        import MySQLdb

        server = MySQLdb.connect(host="127.0.0.1", port=int(port), user="root")
        server.cursor().execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
    server.close()


def state(pipe, key):
    """Return the row as it is committed now."""
    from dlocks.models import ResourceLock

    return ResourceLock.objects.by_clock().filter(pk=key).values("status", "state", "hold_count", "version").first()


def hold_timed(pipe, key, **policy):
    """Hold, and say when on the common clock the request was sent and answered."""
    before = time.monotonic()
    held = db_lock(key, **policy).acquire()
    pipe.say((before, time.monotonic(), held.token))
    pipe.hear()
    held.release()


def wait_quietly(pipe, key, **policy):
    held = db_lock(key, **policy).acquire()
    granted = time.monotonic()
    held.release()
    return granted, held.token


def check(pipe):
    try:
        for held in _kept:
            held.check()
    except LockError as error:
        return type(error).__name__
    return "held"


def release_all(pipe):
    answers = []
    for held in _kept:
        try:
            held.release()
            answers.append("released")
        except LockError as error:
            answers.append(type(error).__name__)
    _kept.clear()
    return answers


def count_through_trouble(pipe, path, key, *, times, **policy):
    """Add to the counter; where the server is away, say so and go on. Return how many were added."""
    path, done, troubles = Path(path), 0, 0
    for number in range(times):
        if number == times // 3:
            pipe.say("a third")
        if number == 2 * times // 3:
            pipe.say("two thirds")
        try:
            with db_lock(key, **policy) as held:
                value, last = map(int, path.read_text().split())
                assert held.token > last, f"token {held.token} after {last}"
                path.write_text(f"{value + 1} {held.token}")
                done += 1
        except LockError as error:
            troubles += 1
            assert type(error).__name__ in {"LockBackendError", "LockTimeout"}, error
            time.sleep(0.05)
    return done, troubles


def kill_other_sessions(pipe):
    """End every other session of the server's, from the server's side."""
    from django.db import connection

    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
            return cursor.fetchone()[0]
        cursor.execute("SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID() AND db = DATABASE()")
        sessions = cursor.fetchall()
        for (session,) in sessions:
            cursor.execute(f"KILL {session}")
        return len(sessions)


def wall_clock(pipe):
    return time.time()


def hold_and_time_releases(pipe, key, *, seconds, **policy):
    """Take a lease again and again; return the longest that giving it back took."""
    end, longest = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        with db_lock(key, timeout=None, **policy):
            started = time.monotonic()
        longest = max(longest, time.monotonic() - started)
    return longest


def wait_in_transactions(pipe, key, *, seconds, **policy):
    """Wait for the key inside of transactions that go on after it was not to be had."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with transaction.atomic():
            try:
                with db_lock(key, **policy):
                    pass
            except LockError:
                time.sleep(2.5)
