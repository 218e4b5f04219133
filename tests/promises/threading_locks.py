"""The classes of ``threading``, made of the locks of dlocks.

``acquire()``, ``release()`` and the block are those of ``threading``. dlocks decides
who holds the key. The private methods are those that ``threading.Condition`` and the
tests of CPython call.
"""

import itertools
import threading
from collections import deque
from functools import partial

from dlocks import LockTimeout, db_lock, db_semaphore

# Ten years, the longest timeout of dlocks, in seconds.
TIMEOUT_MAX = 10 * 365 * 86400.0

_numbers = itertools.count()


class Primitive:
    """A lock of ``threading`` whose holds are released at the end of the test."""

    # The alias of the DLOCKS setting, and all holds of the test.
    using = "default"
    holds: list = []

    def __init__(self, make, *arguments, **options):
        """Lock a new key. ``make`` is a function of dlocks that returns a lock."""
        key = f"conformance:{next(_numbers)}"
        self._lock = partial(make, key, *arguments, using=self.using, **options)
        # Refuses a wrong number of permits.
        self._lock()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()

    def _acquire(self, blocking, timeout):
        """Return the lock and the hold, or None if the key is still not free."""
        if timeout in {None, -1}:
            timeout = None
        elif not blocking:
            raise ValueError("can't specify a timeout for a non-blocking call")
        elif timeout > TIMEOUT_MAX:
            raise OverflowError("timeout value is too large")
        lock = self._lock(timeout=timeout)
        if not blocking:
            hold = lock.try_acquire()
        else:
            try:
                hold = lock.acquire()
            except LockTimeout:
                hold = None
        if hold is None:
            return None
        self.holds.append(hold)
        return lock, hold


class BoundedSemaphore(Primitive):
    """A semaphore. Any thread may release a permit that another has acquired."""

    def __init__(self, value=1):
        super().__init__(db_semaphore, value, reentrant=False)
        self._value, self._held = value, deque()

    def __repr__(self):
        name, free = type(self).__qualname__, self._value - len(self._held)
        return f"<threading.{name} at {id(self):#x}: value={free}{self._limit()}>"

    def _limit(self):
        return f"/{self._value}"

    def acquire(self, blocking=True, timeout=None):
        acquired = self._acquire(blocking, timeout)
        if acquired is not None:
            self._held.append(acquired[1])
        return acquired is not None

    def release(self, n=1):
        for _ in range(n):
            try:
                hold = self._held.popleft()
            except IndexError:
                raise ValueError("Semaphore released too many times") from None
            hold.release()


class Semaphore(BoundedSemaphore):
    """A semaphore whose number does not grow, unlike that of ``threading``."""

    def _limit(self):
        return ""


class Lock(BoundedSemaphore):
    """A lock that a thread may acquire once, and that any thread may release.

    It is a semaphore with one permit.
    """

    def __init__(self):
        super().__init__(1)

    def __repr__(self):
        state = "locked" if self.locked() else "unlocked"
        return f"<{state} threading.Lock object at {id(self):#x}>"

    def acquire(self, blocking=True, timeout=-1):
        return super().acquire(blocking, timeout)

    def release(self):
        try:
            super().release()
        except ValueError:
            raise RuntimeError("release unlocked lock") from None

    def locked(self):
        return self._lock().locked()


class RLock(Primitive):
    """A lock that its thread may acquire again, and that only its thread releases."""

    def __init__(self):
        super().__init__(db_lock)
        # The locks by which each thread has acquired the key, oldest first.
        self._mine = threading.local()

    def __repr__(self):
        state = "locked" if self.locked() else "unlocked"
        return f"<{state} threading.RLock object at {id(self):#x}>"

    @property
    def _entries(self):
        return self._mine.__dict__.setdefault("entries", [])

    def acquire(self, blocking=True, timeout=-1):
        acquired = self._acquire(blocking, timeout)
        if acquired is not None:
            self._entries.append(acquired)
        return acquired is not None

    def release(self):
        # dlocks raises RuntimeError if this thread has not acquired it.
        lock, _hold = self._entries[-1] if self._entries else (self._lock(), None)
        lock.release()
        self._entries.pop()

    def locked(self):
        return self._lock().locked()

    def _is_owned(self):
        return self._lock().held()

    def _recursion_count(self):
        return self._entries[-1][1].count if self._entries else 0

    def _release_save(self):
        if not self._is_owned():
            raise RuntimeError("cannot release un-acquired lock")
        count = self._recursion_count()
        for _ in range(count):
            self.release()
        return count

    def _acquire_restore(self, count):
        for _ in range(count):
            self.acquire()


def Condition(lock=None):  # noqa: N802 (as in threading)
    """Return the condition of ``threading`` on a lock of dlocks."""
    return threading.Condition(RLock() if lock is None else lock)
