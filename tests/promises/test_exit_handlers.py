"""A lock in an exit handler is held and renewed while its block is open.

``is_alive()`` of the main thread is false by then, and Python 3.12 starts no threads.
"""

import textwrap

import pytest

from dlocks import db_lock
from tests.scripts import run_script

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

HELPERS = """
import atexit, contextlib, threading, time

TTL = 0.9

def outlast():
    # Work until the lease has outlived its first ttl by renewals alone.
    ends = time.monotonic() + TTL + 0.3
    while time.monotonic() < ends:
        time.sleep(0.01)

def is_held(hold):
    # The backend says so, too.
    hold.check()
    return hold.held
"""

IMPORTS = """
from django.db import connections
from dlocks import db_lock, db_semaphore
"""


def run(script, *, before="", quiet=True):
    """Run a script, and return the ended process.

    ``before`` is code that runs before dlocks is imported, so its exit handlers run
    after those of dlocks.
    """
    done = run_script(
        IMPORTS + textwrap.dedent(script), before=HELPERS + textwrap.dedent(before)
    )
    assert done.returncode == 0
    assert not (quiet and done.stderr), done.stderr
    return done


HANDLER = """
@atexit.register
def handler():
    blocks = (
        db_lock("one", ttl=TTL),
        db_lock("two", "three", ttl=TTL),
        db_semaphore("permit", 1, ttl=TTL),
        db_lock("memory", ttl=TTL, using="memory"),
    )
    acquired = db_lock("acquired", ttl=TTL)
    with contextlib.ExitStack() as stack:
        holds = [stack.enter_context(lock) for lock in blocks]
        holds.append(acquired.acquire())
        outlast()
        print(*map(is_held, holds))
        acquired.release()
    print(*(lock.locked() for lock in (*blocks, acquired)))
"""


@pytest.mark.parametrize("order", ["after dlocks", "before dlocks"])
def test_a_lock_in_an_exit_handler_is_renewed(order):
    """The process has used a lock before. The handler runs before or after dlocks'."""
    use = "with db_lock('earlier'): pass\n"
    if order == "after dlocks":
        done = run(f"{HANDLER}\n{use}")
    else:
        done = run(use, before=HANDLER)
    assert done.stdout == "True True True True True\nFalse False False False False\n"


def test_a_block_that_an_exit_handler_ends_is_kept():
    """It began before the main thread ended. So did a hold that a handler releases."""
    done = run("""
        stack = contextlib.ExitStack()
        block, hold = db_lock("block", ttl=TTL), db_lock("hold", ttl=TTL)
        open_block, open_hold = stack.enter_context(block), hold.acquire()

        @atexit.register
        def handler():
            outlast()
            print(is_held(open_block), is_held(open_hold))
            stack.close()
            hold.release()
            print(block.locked(), hold.locked())
        """)
    assert done.stdout == "True True\nFalse False\n"


def test_the_main_thread_holds_until_the_process_exits():
    """A thread of the process works on after the end of the main thread."""
    done = run(
        """
        hold = db_lock("stock:7", ttl=TTL).acquire()

        def work():
            threading.main_thread().join()
            outlast()
            print(is_held(hold))

        threading.Thread(target=work).start()
        """,
        quiet=False,
    )
    assert done.stdout == "True\n"
    assert "'stock:7' was never released by" in done.stderr
    assert not db_lock("stock:7").locked()


def test_an_exit_handler_waits_for_a_key():
    """A thread holds it, and releases it while the handler waits."""
    # The thread that serves waiting callers may end with an open connection.
    done = run(
        """
        waiting, entered = threading.Event(), threading.Event()

        def work():
            with db_lock("stock:7"):
                entered.set()
                # Python 3.12 starts no thread here that would queue the caller.
                waiting.wait()
                time.sleep(0.1)
            connections.close_all()

        threading.Thread(target=work, daemon=True).start()
        entered.wait()

        @atexit.register
        def handler():
            assert db_lock("stock:7").try_acquire() is None
            waiting.set()
            with db_lock("stock:7", timeout=10) as hold:
                print(hold.held)
        """,
        quiet=False,
    )
    assert done.stdout == "True\n"


def test_the_first_lock_of_a_process_may_be_in_an_exit_handler():
    """Where Python starts no more threads, a warning says that it is not renewed.

    Then the hold ends after its ttl. The end of its block raises LockLost if another
    caller has taken the key over, which none has here.
    """
    done = run(
        """
        @atexit.register
        def handler():
            with db_lock("stock:7", ttl=TTL) as hold:
                print(is_held(hold))
                outlast()
                print("renewed" if hold.held else "ended")
        """,
        quiet=False,
    )
    warned = "Leases are not renewed" in done.stderr
    assert done.stdout == ("True\nended\n" if warned else "True\nrenewed\n")
    assert warned or not done.stderr
    assert not db_lock("stock:7").locked()
