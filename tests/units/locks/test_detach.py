"""A detach whose request is sent when its caller waits for it no more."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import pytest

from dlocks import LockBackendError, LockLost, db_lock
from tests.for_each import for_each
from tests.internals import Keeper, backends, keeper

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]


@for_each("using", ["default", "memory"])
def test_a_detach_that_is_done_too_late_lets_no_other_caller_in(
    using, threads, monkeypatch, in_other_thread
):
    """Its caller has given up, because the background thread was busy.

    The hold goes on. It counts on no longer lease than the late request leaves.
    """
    other = in_other_thread(db_lock("other", using=using).acquire)
    hold = db_lock("export:7", using=using, ttl=60).acquire()
    backend, busy = backends[using], threading.Event()
    threads(lambda: keeper.run(lambda: busy.wait(20), backend))
    monkeypatch.setitem(Keeper.run.__kwdefaults__, "timeout", 0.5)
    with pytest.raises(LockBackendError):
        hold.detach(within=1)
    busy.set()
    # When this is done, so are the requests before it.
    monkeypatch.undo()
    keeper.run(lambda: None, backend)
    keeper.catch_up()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        if in_other_thread(db_lock("export:7", using=using).try_acquire) is not None:
            assert not hold.held
            break
        time.sleep(0.1)
    with suppress(LockLost):
        hold.release()
    in_other_thread(other.release)
