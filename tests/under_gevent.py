"""Locks under gevent, where greenlets replace threads.

Run it as ``python -m gevent.monkey tests/under_gevent.py ALIAS ...``.
"""

import os
import sys
import threading
import time

import django
import gevent
from django.db import connections

from dlocks import LockError, LockTimeout, db_lock, shutdown
from dlocks.testing import held_elsewhere, undo_shutdown

GREENLETS, TURNS = 8, 3


def apart(function):
    """Return a function that closes its connections, as a request does."""

    def run(*args):
        try:
            return function(*args)
        finally:
            connections.close_all()

    return run


def together(spawn, using):
    """Let many threads or greenlets take turns with one key.

    Return the number of turns, and the largest number of holders at a time.
    """
    inside, seen = [], []

    @apart
    def run():
        for _ in range(TURNS):
            with db_lock("stock:7", using=using, timeout=30) as hold:
                inside.append(hold)
                time.sleep(0.002)
                seen.append(len(inside))
                inside.remove(hold)

    for one in [spawn(run) for _ in range(GREENLETS)]:
        one.join(60)
    return len(seen), max(seen)


def thread(function):
    started = threading.Thread(target=function)
    started.start()
    return started


def main(using):
    # This hold ends by itself, or with its session.
    acquire = apart(db_lock("forgotten", using=using, ttl=1.0).acquire)
    forgotten = gevent.spawn(acquire).get(timeout=30)
    print("threads", *together(thread, using))
    print("greenlets", *together(gevent.spawn, using))
    with db_lock("renewed", using=using, ttl=3.0) as hold:
        time.sleep(3.5)
        print("renewed", hold.held)

        @apart
        def ask():
            try:
                db_lock("renewed", using=using, timeout=0.2).acquire()
            except LockTimeout:
                return "busy"

        print("beside", gevent.spawn(ask).get(timeout=30))
    with db_lock("forgotten", using=using, timeout=20):
        print("forgotten", forgotten.held)
    print("ended", ended(using))
    connections.close_all()


def ended(using):
    """Let a shutdown end the wait of a greenlet, and return its error."""

    @apart
    def wait():
        try:
            db_lock("ended", using=using, timeout=None).acquire()
        except LockError as error:
            return type(error).__name__

    with held_elsewhere("ended", using=using):
        waiting = gevent.spawn(wait)
        time.sleep(0.5)
        shutdown()
        found = waiting.get(timeout=30)
    undo_shutdown()
    return found


os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
django.setup()
for alias in sys.argv[1:]:
    main(alias)
