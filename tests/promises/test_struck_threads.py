"""Exceptions that strike a thread at any moment, as a time limit of a worker does."""

import gc
import random
import secrets
import threading
import time
from contextlib import suppress
from functools import partial

import pytest
from django.db import connections

from dlocks import LockError, db_lock, db_semaphore
from tests.promises.ended import is_refused
from tests.strikes import strike
from tests.volume import volume

pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

TTL, GRACE = 1.0, 0.5
ROUNDS, THREADS = 12, 4
# A key that is free later than this after the end of its threads was kept for too
# long. The last part is for a machine with other work.
FREE_WITHIN = TTL + GRACE + 1.5


class TimeLimitError(Exception):
    """What a time limit raises in the thread of a job."""


class Job(threading.Thread):
    """A thread that works until an exception strikes it."""

    def __init__(self, name, function):
        super().__init__(name=name, daemon=True)
        self._function = function
        self._is_over, self._mutex = False, threading.Lock()
        self.is_struck = False

    def run(self):
        try:
            while True:
                with suppress(LockError):
                    self._function()
        except TimeLimitError:
            self.is_struck = True
        finally:
            connections.close_all()
            with self._mutex:
                self._is_over = True

    def strike(self):
        """Raise the error in the thread, and return whether it may still run."""
        with self._mutex:
            # Otherwise its identity may be that of another thread by now.
            if self._is_over or not self.is_alive():
                return False
            strike(self.ident, TimeLimitError)
        return True


def work(name, using, choice):
    """Use locks in one of the ways of a job."""
    options = {"using": using, "ttl": TTL, "timeout": 1}
    first, second = choice.sample([f"{name}:a", f"{name}:b"], 2)
    lock = db_lock(first, **options)
    way = choice.randrange(6)
    if way == 0:
        with lock:
            time.sleep(0.001)
    elif way == 1:
        lock.acquire()
        try:
            with lock:
                pass
        finally:
            lock.release()
    elif way == 2:
        with db_lock(first, second, **options) as hold:
            hold.check()
    elif way == 3:
        with lock as hold, hold.atomic():
            pass
    elif way == 4:
        with db_semaphore(f"{name}:c", permits=1, **options):
            time.sleep(0.001)
    else:
        hold = lock.acquire()
        hold.renew()
        hold.release()


@pytest.fixture
def collected():
    """Collect the connections that a strike has kept a thread from closing.

    Python warns of them, and otherwise it would do so in a later test. pytest keeps the
    errors of threads, and thus their connections, until the test itself has ended.
    """
    yield
    gc.collect()


# A strike may hit the last lines of a thread, outside of all handlers.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("collected")
@pytest.mark.parametrize("using", ["default", "memory"])
def test_a_struck_thread_leaves_no_key_for_longer_than_its_ttl(using, until):
    """The key is free after ttl and grace at the latest, and nothing else is stopped.

    Jobs of several threads use the same keys. An exception strikes each of them at a
    random moment: in dlocks, in the driver, or in the job.
    """
    seed = secrets.randbits(32)
    print("The seed is", seed)
    choice = random.Random(seed)
    names = [f"job {number}" for number in range(volume(ROUNDS))]
    struck = 0
    for name in names:
        jobs = [
            Job(name, partial(work, name, using, random.Random(choice.random())))
            for _ in range(THREADS)
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            time.sleep(choice.uniform(0, 0.02))
            while job.strike():
                # Code such as a callback of a library may swallow the error.
                job.join(1)
            job.join(20)
            assert not job.is_alive(), seed
            struck += job.is_struck
    assert struck, seed
    taken = [db_lock(f"{name}:{key}", using=using) for name in names for key in "abc"]

    def are_free():
        taken[:] = filter(is_refused, taken)
        return not taken

    until(are_free, FREE_WITHIN)
