"""Forks while a thread changes a hold."""

from __future__ import annotations

import os
import threading

import pytest

from dlocks import LockLost, db_lock

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


def leave_a_block_in_a_child(pipe):
    """Fork in a block while a thread renews its lease.

    Return the status of the child, which is 7 for LockLost.
    """
    parent, begun, done = os.getpid(), threading.Event(), threading.Event()

    def work(life):
        with life._mutex:
            begun.set()
            done.wait()

    status = 1
    try:
        with db_lock("stock:7") as hold:
            thread = threading.Thread(target=work, args=[hold._parts[0].life])
            thread.start()
            begun.wait()
            if child := os.fork():
                done.set()
                thread.join()
                return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except LockLost:
        status = 7
    finally:
        if os.getpid() != parent:
            os._exit(status)


def test_a_forked_child_leaves_a_block_during_a_renewal(doomed):
    """The block raises LockLost there, also if a thread of the parent works on it."""
    assert doomed().call(leave_a_block_in_a_child) == 7
