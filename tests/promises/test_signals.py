"""An exception from a signal handler reaches the handlers around the code."""

import contextlib
import dis
import itertools
import sys
from functools import partial
from pathlib import Path
from types import CodeType

import pytest
from django.db import transaction

import dlocks
from dlocks import LockLost, db_lock, resume_hold, shutdown
from dlocks.testing import undo_shutdown
from tests.promises.locks.keys import await_renewal

pytest_plugins = ["tests.moments"]
pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

PACKAGE = Path(dlocks.__file__).parent


# PostgreSQL too, whose tests run with the newest Python.
@pytest.mark.engine("sqlite", "postgresql")
@pytest.mark.skipif(
    sys.version_info < (3, 13), reason="calls signal handlers after the jump"
)
def test_no_jump_of_this_python_leaves_the_handlers_of_its_block():
    """An interrupt never leaves a mutex locked, with the Python that runs this test.

    Python calls signal handlers at backward jumps. CPython 3.13 and 3.14 compile some
    of them outside of the handlers of the ``with`` or ``try`` around their loop. 3.14
    compiles ``any()`` of a generator as such a loop.
    """
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for code in codes_in(compile(path.read_text(), str(path), "exec"))
        for line in lines_that_lose_handlers(code)
    ]
    assert found == []


def codes_in(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def lines_that_lose_handlers(code):
    """Yield the lines of loops whose jump back has fewer handlers than its target."""
    table = list(dis.Bytecode(code).exception_entries)
    instructions = {one.offset: one for one in dis.get_instructions(code)}

    def handlers(offset):
        # Handlers of comprehensions and generators restore variables, and are inside of
        # others.
        found, todo = set(), [offset]
        while todo:
            place = todo.pop()
            for entry in table:
                if entry.start <= place < entry.end and entry.target not in found:
                    found.add(entry.target)
                    todo.append(entry.target)
        return {one for one in found if instructions[one].opname == "PUSH_EXC_INFO"}

    for one in instructions.values():
        if one.opname == "JUMP_BACKWARD" and handlers(one.argval) - handlers(
            one.offset
        ):
            yield one.positions.lineno


# The moments at which Python calls signal handlers, within dlocks.


PARTS_OF_A_COMMIT = ("core", "runtime", "transactions")


def test_an_interrupt_at_a_commit_does_not_stop_the_renewals(
    strike_in_dlocks, in_other_thread
):
    """The commit releases a lease that was left in the transaction."""
    options = {"using": "memory", "ttl": 0.9}
    other = in_other_thread(db_lock("other", **options).acquire)
    for number in itertools.count():
        block = transaction.atomic()
        block.__enter__()
        with db_lock(f"left:{number}", scope="lease", **options):
            pass
        commit = partial(block.__exit__, None, None, None)
        if not strike_in_dlocks(number, commit, within=PARTS_OF_A_COMMIT):
            break
    assert number > 10
    await_renewal(other)
    assert other.held
    in_other_thread(other.release)


def test_an_interrupt_before_a_block_keeps_no_hold_of_another_thread(
    strike_in_dlocks, in_other_thread, is_busy
):
    """A block that does not begin leaves nothing that only its own caller could leave.

    Another thread has acquired the hold, and its release frees the key.
    """
    lock, has_begun, taken = db_lock("stock:7", using="memory"), [], []
    for number in itertools.count():
        hold = in_other_thread(lock.acquire)

        def use(hold=hold):
            with hold:
                has_begun.append(True)

        struck = strike_in_dlocks(number, use)
        in_other_thread(hold.release)
        if is_busy("stock:7", "memory"):
            taken.append((number, bool(has_begun)))
            hold.release()
        if has_begun or not struck:
            break
    assert number > 10
    # Only this test strikes after the last call of ``__enter__()``. Python handles no
    # signal when a function that is written in Python returns. An error before
    # ``__exit__()`` has done anything is the exception of docs/safety.md.
    assert set(taken) <= {(number - 1, False), (number, True)}


def test_an_interrupt_before_a_block_keeps_the_key_for_its_min_hold(
    strike_in_dlocks, threads, is_busy
):
    """The thread that acquired the hold has ended, and the block takes its place."""
    for number in itertools.count():
        lock = db_lock(f"rested:{number}", using="memory", min_hold=60)
        acquiring = threads(lock.acquire)
        acquiring.join(10)
        (hold,) = acquiring.results

        def use(hold=hold):
            with hold:
                pass

        struck = strike_in_dlocks(number, use)
        assert is_busy(lock.key, "memory"), number
        with contextlib.suppress(LockLost):
            hold.release()
        if not struck:
            break
    assert number > 10


@pytest.mark.parametrize("keys", [("stock:7",), ("stock:7", "stock:8")])
def test_an_interrupt_of_a_release_frees_no_key_before_the_commit(
    strike_in_dlocks, is_busy, keys
):
    """The caller may catch the error of the handler, and commit all the same."""
    lock, struck = db_lock(*keys, using="memory", scope="lease"), True
    for number in itertools.count():
        lock.acquire()
        with transaction.atomic():
            struck = strike_in_dlocks(number, lock.release)
            assert is_busy("stock:7", "memory"), number
        with contextlib.suppress(RuntimeError):
            lock.release()
        assert not is_busy("stock:7", "memory"), number
        if not struck:
            break
    assert number > 10


@pytest.mark.parametrize("entries", [1, 2])
def test_a_release_is_interrupted_as_a_whole(strike_in_dlocks, is_busy, entries):
    """Either an entry is left, or ``release()`` can be called once more."""
    lock = db_lock("stock:7", using="memory")
    for number in itertools.count():
        for _ in range(entries):
            hold = lock.acquire()
        struck = strike_in_dlocks(number, hold.release)
        for _ in range(hold.count):
            hold.release()
        assert not is_busy("stock:7", "memory"), number
        if not struck:
            break
    assert number > 10


def test_an_interrupted_detach_ends_no_block_in_silence(strike_in_dlocks, is_busy):
    """The block goes on after the error of the handler, and learns of a loss."""
    wrong = []
    for number in itertools.count():
        lock, texts, is_lost = db_lock(f"stock:{number}", using="memory"), [], False
        try:
            with lock as hold:
                struck = strike_in_dlocks(
                    number, lambda hold=hold, texts=texts: texts.append(hold.detach())
                )
                is_held = hold.held
        except LockLost:
            is_lost = True
        for text in texts:
            resume_hold(text).release()
        if is_busy(lock.key, "memory") or not (texts or is_held or is_lost):
            wrong.append(number)
        if not struck:
            break
    assert number > 50
    # Only this test strikes when a function that is written in Python has returned, as
    # the last two of them have.
    assert [one for one in wrong if one < number - 2] == []


def test_an_interrupted_shutdown_frees_the_key(strike_in_dlocks, is_busy):
    """The process may go on. The block ends with the loss of its hold."""
    lock = db_lock("stock:7", using="memory")
    for number in itertools.count():
        with contextlib.suppress(LockLost), lock:
            struck = strike_in_dlocks(number, shutdown)
        undo_shutdown()
        assert not is_busy("stock:7", "memory"), number
        if not struck:
            break
    assert number > 10
