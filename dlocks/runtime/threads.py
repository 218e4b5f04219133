"""Background threads, the mutexes of what they share, and how they are woken.

Whatever a signal handler or a finalizer may interrupt is implemented in C here. A
condition or an event of ``threading`` stays locked if a handler raises in the middle of
one of its methods, and then blocks all threads that use it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue


class PythonIsExitingError(RuntimeError):
    """No thread can start any more, because Python has begun to exit.

    Exit handlers run after that. From Python 3.12 on, some versions forbid new threads
    then, but daemon threads still run: https://github.com/python/cpython/issues/113964
    """


class ThisThread(threading.local):
    """Facts about the current thread."""

    # Whether it is the keeper's or a worker's.
    is_keepers = False
    # Sends the renewals that wait for this worker.
    send_renewals: Callable[[], None] | None = None


this_thread = ThisThread()


Mutex = threading.RLock

# Returns a new mutex, which is a leaf: its holder sends no request, calls no user code
# and waits for no other mutex. It is reentrant, because a signal handler or a finalizer
# may strike inside a section of its own thread. Its owner replaces it in a forked
# child, because a thread of the parent may have held it. This is the function of
# threading itself, because each hold makes a mutex.
new_mutex: Callable[[], Mutex] = threading.RLock


class BackgroundThread:
    """A daemon thread that is started when it is needed, and may end and start again.

    ``end()`` and ``is_current`` are called with the owner's mutex held, and ``start()``
    without one. The start waits for the new thread, in which a finalizer may strike
    before it has started, and that may need any mutex of dlocks.
    """

    def __init__(self, name: str, target: Callable[[], object]) -> None:
        self._name = name
        self._target = target
        # Makes the check and the record of a thread that begins to work one step.
        self._mutex = new_mutex()
        self.thread: threading.Thread | None = None

    @property
    def is_current(self) -> bool:
        return self.thread is threading.current_thread()

    @property
    def is_running(self) -> bool:
        # Read once, because the thread may end at any moment.
        thread = self.thread
        return thread is not None and thread.is_alive()

    def start(self) -> threading.Thread | None:
        """Start the thread unless it runs, and return it if it was started.

        Two callers at once may start two threads, and an interrupted start may leave
        one beside the next. The first of them that begins to work is the current one,
        whatever becomes of the other starts. A target that must not run twice at once
        ends where it is not in the current thread.
        """
        if self.is_running:
            return None
        if sys.is_finalizing():
            # A new thread would not run, and its start would wait for it.
            raise PythonIsExitingError("Python has ended all threads.")
        thread = threading.Thread(target=self._begin, name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # threading raises another error if a signal handler raises meanwhile.
            if "unlocked" in str(error) and error.__context__ is not None:
                raise error.__context__ from None
            if not threading.main_thread().is_alive():
                raise PythonIsExitingError(str(error)) from error
            raise
        return thread

    def end(self) -> None:
        """Let ``start()`` start another thread, because this one is about to end."""
        self.thread = None

    def take(self) -> bool:
        """Let this thread be the current one unless another runs. Return whether it is.

        Each new thread does so. One of a pool may take the place of another one.
        """
        with self._mutex:
            if not self.is_running:
                self.thread = threading.current_thread()
            return self.is_current

    def _begin(self) -> None:
        self.take()
        self._target()


class Flag:
    """A flag for which one thread waits. Waiting also clears it."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        # A flag for which no thread waits does not grow.
        if self._queue.empty():
            self._queue.put(None)

    def is_set(self) -> bool:
        return not self._queue.empty()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the flag is set, at most ``seconds``, and return whether it is."""
        was_set = False
        with suppress(Empty):
            self._queue.get(
                timeout=None
                if seconds is None
                else min(max(0.0, seconds), threading.TIMEOUT_MAX)
            )
            was_set = True
        self.clear()
        return was_set

    def clear(self) -> None:
        with suppress(Empty):
            while True:
                self._queue.get_nowait()


class Latch:
    """An event that happens once, and for which any number of threads wait."""

    def __init__(self) -> None:
        self._is_set = False
        # Held until the event happens.
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        self._is_set = True
        # No call lies before the release, and none in ``wait()`` between the two of the
        # lock. An interrupt there would leave the other threads waiting. (A signal
        # within suppress() could come before the release.)
        try:  # noqa: SIM105
            self._lock.release()
        except RuntimeError:
            # Another thread has done so.
            pass

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the event has happened, at most ``seconds``.

        Return whether it has.
        """
        longest = threading.TIMEOUT_MAX
        if seconds is not None:
            longest = min(max(0.0, seconds), longest)
        try:
            if not self._is_set:
                self._lock.acquire(timeout=longest)
        finally:
            # Also after an interrupt, so that the next thread gets it.
            if self._is_set:
                try:  # noqa: SIM105
                    self._lock.release()
                except RuntimeError:
                    pass
        return self._is_set
