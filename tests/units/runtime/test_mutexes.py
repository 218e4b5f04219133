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
from dlocks.runtime import threads

class Held(threading.local):
    def __init__(self):
        self.mutexes = []

held, nested = Held(), set()

class Watched:
    \"\"\"A mutex that notes which leaves its thread has when it is entered.\"\"\"

    def __init__(self, mutex, module, is_leaf):
        self.mutex, self.module, self.is_leaf = mutex, module, is_leaf

    def __getattr__(self, name):
        return getattr(self.mutex, name)

    def __enter__(self):
        self.mutex.__enter__()
        for other in held.mutexes:
            if other is not self and other.is_leaf:
                nested.add((other.module, self.module))
        held.mutexes.append(self)

    def __exit__(self, *exc):
        held.mutexes.remove(self)
        self.mutex.__exit__(*exc)

def watched(make, is_leaf):
    def factory():
        module = sys._getframe(1).f_globals["__name__"]
        of_dlocks = module.startswith("dlocks.")
        return Watched(make(), module, is_leaf) if of_dlocks else make()
    return factory

threads.new_mutex = watched(threading.RLock, True)
# The turn to send a request, for example, under which mutexes are taken.
threading.Lock = watched(threading.Lock, False)
threading.RLock = watched(threading.RLock, False)
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


def test_no_mutex_is_taken_under_another(settings):
    session = [alias for alias in settings.DLOCKS if alias == "session"]
    done = run_python(
        *("-c", WATCHED + USED, "default", "memory", *session),
        DJANGO_SETTINGS_MODULE="tests.settings",
        warnings="ignore",
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
