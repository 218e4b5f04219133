"""The classes of ``asyncio``, made of the locks of dlocks.

In ``asyncio``, a lock changes hands within a step of the event loop. In dlocks, this
takes requests to a backend. So these classes wait where ``asyncio`` need not. Tasks
join the queue one after the other, and ``sleep()`` returns when no request is on its
way. ``release()`` and ``locked()`` are no coroutines in ``asyncio``, so another thread
makes their requests.
"""

import asyncio
import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from dlocks import db_semaphore

_numbers = itertools.count()

# Seconds between two looks at the queue, and for which a test waits for it at most.
PAUSE, PATIENCE = 0.001, 10.0

# More permits than a test releases without having acquired them.
SPARE = 3


class Waiter:
    """A task that waits for a lock, as the tests see it."""

    def __init__(self):
        self._task = asyncio.current_task()

    def cancelled(self):
        return self._task.cancelling() > 0

    done = cancelled


class Primitive:
    """A semaphore of dlocks with the methods of ``asyncio``.

    ``spare`` permits are held by another caller until they are released.
    """

    # The alias of the DLOCKS setting, and the primitives of the test.
    using = "default"
    made: list = []
    # A thread that makes the requests of methods that are no coroutines.
    thread: ThreadPoolExecutor

    def __init__(self, value, spare=0):
        key = f"conformance:{next(_numbers)}"
        options = {"using": self.using, "reentrant": False, "timeout": None}
        if value < 0:
            raise ValueError("the value must be 0 or more")
        self._lock = db_semaphore(key, value + spare, **options)
        self._permits, self._held, self._waiters = value, deque(), deque()
        # The number of cancelled tasks that have not ended.
        self._leaving = 0
        self._spare = [self._call(self._lock.acquire) for _ in range(spare)]
        # All holds so far. The first one can be asked for the length of the queue.
        self._all = list(self._spare)
        self.made.append(self)

    def _call(self, function):
        return self.thread.submit(function).result()

    def __repr__(self):
        state = "locked" if self.locked() else f"unlocked{self._shown_value()}"
        queue = f", waiters:{len(self._waiters)}" if self._waiters else ""
        name = f"asyncio.locks.{type(self).__name__}"
        return f"<{name} object at {id(self):#x} [{state}{queue}]>"

    def _shown_value(self):
        return ""

    async def acquire(self):
        waiter, earlier = Waiter(), list(self._waiters)
        self._waiters.append(waiter)
        try:
            await self.settle(earlier)
            hold = await self._lock.aacquire()
        except asyncio.CancelledError:
            self._waiters.remove(waiter)
            self._leaving += 1
            await self.settle(list(self._waiters))
            self._leaving -= 1
            raise
        self._waiters.remove(waiter)
        self._all.append(hold)
        self._held.append(hold)
        return True

    def release(self):
        if self._held:
            hold = self._held.popleft()
        elif self._spare:
            hold = self._spare.pop()
            self._permits += 1
        else:
            raise self._error
        self._call(hold.release)

    def locked(self):
        """Return whether the next caller would have to wait."""
        hold = None if self._waiters else self._call(self._lock.try_acquire)
        if hold is not None:
            self._call(hold.release)
        return hold is None

    async def __aenter__(self):
        await self.acquire()

    async def __aexit__(self, *_):
        self.release()

    @property
    def _value(self):
        granted = 0
        if self._waiters:
            granted = len(self._waiters) - self._call(self._all[0].queue_length)
        return self._permits - len(self._held) - granted

    async def settle(self, waiters=None):
        """Wait until all of the waiters are in the queue, or hold a permit.

        By default, this is about all waiters, and those that leave.
        """
        async with asyncio.timeout(PATIENCE):
            while not await self._is_settled(waiters):
                await asyncio.sleep(PAUSE)

    async def _is_settled(self, waiters):
        if waiters is None:
            if self._leaving:
                return False
            waiters = self._waiters
        waiting = [one for one in waiters if one in self._waiters]
        if not waiting:
            return True
        if not self._all or any(one.cancelled() for one in waiting):
            return False
        return await self._all[0].aqueue_length() >= len(waiting)

    def end(self):
        for hold in self._all:
            if hold.held:
                hold.release()


class Lock(Primitive):
    """A lock that any task may release. It is a semaphore with one permit."""

    _error = RuntimeError("Lock is not acquired.")

    def __init__(self):
        super().__init__(1)


class BoundedSemaphore(Primitive):
    """A semaphore. Any task may release a permit that another has acquired."""

    _error = ValueError("BoundedSemaphore released too many times")

    def __init__(self, value=1):
        super().__init__(value)

    def _shown_value(self):
        return f", value:{self._value}"


class Semaphore(BoundedSemaphore):
    """A semaphore whose number grows, by the permits that another caller holds."""

    def __init__(self, value=1):
        Primitive.__init__(self, value, SPARE)


async def sleep(delay, result=None):
    """Sleep, and then until all tasks have what they can have."""
    await asyncio.sleep(delay)
    for primitive in list(Primitive.made):
        await primitive.settle()
    # The task of a cancelled waiter ends in the next step.
    await asyncio.sleep(0)
    return result
