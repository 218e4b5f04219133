"""The public class of elections, which run in a thread or in an event loop."""

from __future__ import annotations

from typing import Self

# It reports that the app is not installed, so the app cannot register it.
from dlocks import checks  # noqa: F401
from dlocks.election.coroutines import CoroutineElection
from dlocks.election.threads import ThreadElection


class LeaderElection(ThreadElection, CoroutineElection):
    """An election among all processes that run one of the same name.

    The process campaigns until it leads, and campaigns again after its lead.

    ``on_elected(hold)`` is called when this process has become the leader. It can do
    the leader's work for as long as ``is_leader`` is true, or start that work and
    return. The lead lasts until it is lost or ``stop()`` is called. Then
    ``on_deposed(hold)`` is called, once for each ``on_elected``, however that ended.
    After that, a lead that was not lost is released, and the next process in the queue
    acquires it at once. The two functions are never called at the same time.

    An error in ``on_elected`` is logged and ends the lead. The process campaigns again
    after 5 seconds. This time doubles with each further failure in a row, up to a
    minute. With ``give_up_after=3`` the third failure in a row ends the election:
    ``run()`` and ``arun()`` raise the error, and a thread of ``start()`` logs it. A
    lead that ended well or lasted more than a minute resets the count.

    If a leader dies or cannot reach the backend, another one follows after ``ttl``
    seconds and the backend's grace. By then ``is_leader`` is false in the old leader,
    even if its process was paused meanwhile. ``hold.token`` grows with every lead.

    ``run()`` blocks. ``start()`` and ``with`` run the election in a thread, and
    ``arun()`` runs it in an event loop. An election runs once, and cannot be restarted
    after ``stop()``. An election in a thread is stopped at the end of the process,
    which waits at most five seconds for ``on_elected`` and ``on_deposed``.
    """

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
