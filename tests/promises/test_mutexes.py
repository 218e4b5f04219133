"""No thread waits for a mutex while it has another one.

Otherwise a signal handler could: it runs while its thread has any mutex.
"""

from __future__ import annotations

import json

import pytest

from tests.scripts import run_python

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("sqlite", "postgresql"),
]

WATCHED = """
import sys
import threading

class Held(threading.local):
    def __init__(self):
        self.mutexes = []

held, nested = Held(), set()

class Watched:
    \"\"\"A mutex that notes which ones its thread has when it is entered.\"\"\"

    def __init__(self, mutex, module):
        self.mutex, self.module = mutex, module

    def __getattr__(self, name):
        return getattr(self.mutex, name)

    def __enter__(self):
        self.mutex.__enter__()
        for other in held.mutexes:
            if other is not self:
                nested.add((other.module, self.module))
        held.mutexes.append(self)

    def __exit__(self, *exc):
        held.mutexes.remove(self)
        self.mutex.__exit__(*exc)

    # For conditions.

    def _is_owned(self):
        return self in held.mutexes

    def _release_save(self):
        kept = [one for one in held.mutexes if one is self]
        held.mutexes = [one for one in held.mutexes if one is not self]
        for _ in kept:
            self.mutex.release()
        return kept

    def _acquire_restore(self, kept):
        for _ in kept:
            self.mutex.acquire()
        held.mutexes += kept

def watched(make):
    def factory():
        module = sys._getframe(1).f_globals["__name__"]
        return Watched(make(), module) if module.startswith("dlocks.") else make()
    return factory

threading.Lock, threading.RLock = map(watched, (threading.Lock, threading.RLock))
"""

USED = """
import json
import time
import django
django.setup()
import dlocks
from django.db import connections, transaction
from dlocks import db_lock

def use(using):
    for _ in range(3):
        with db_lock("a", using=using, timeout=20, ttl=0.6) as hold:
            with db_lock("a", using=using):
                hold.check()
        with db_lock("b", "c", using=using, timeout=20):
            pass
    connections.close_all()

for using in sys.argv[1:]:
    kept = db_lock("kept", using=using, ttl=0.6).acquire()
    threads = [threading.Thread(target=use, args=[using]) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    kept.detach(within=5) if using == "default" else kept.release()
    with transaction.atomic(), db_lock("d", using=using):
        pass
# Background threads end after half a second.
time.sleep(1.2)
dlocks.shutdown()
print(json.dumps(sorted(nested)))
"""

# The mutex of a session of the session backend is the turn to send a request, and is
# not entered inside of any other.
TURNS = "dlocks.backends.session."


def test_no_mutex_is_taken_under_another(settings):
    session = [alias for alias in settings.DLOCKS if alias == "session"]
    done = run_python(
        *("-c", WATCHED + USED, "default", "memory", *session),
        DJANGO_SETTINGS_MODULE="tests.settings",
        warnings="ignore",
    )
    assert done.returncode == 0, done.stderr
    nested = [pair for pair in json.loads(done.stdout) if not pair[0].startswith(TURNS)]
    assert nested == []
