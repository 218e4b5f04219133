"""An interrupt at any moment within the backend leaves no key of a session taken."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import threading
from pathlib import Path

import pytest

import dlocks
from dlocks import LockError, LockTimeout, db_lock, db_rwlock
from tests.internals import Claim, SessionBackend, backends, disconnect
from tests.timing import eventually

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.engine("postgresql", "mariadb"),
]

BACKENDS = Path(dlocks.__file__).parent / "backends"
STRUCK = (str(BACKENDS / "session"), str(BACKENDS / "local_claims.py"))
# Python calls signal handlers when a call has returned, at the start of a function, and
# at a jump back.
MOMENTS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD"}


class StrikeError(BaseException):
    """The exception of a signal handler."""


@functools.cache
def names_and_handlers(code):
    """Return the name of the instruction at each offset, and its first handler."""
    table = dis.Bytecode(code).exception_entries
    names = {one.offset: one.opname for one in dis.get_instructions(code)}
    return names, {
        offset: next((one.target for one in table if one.start <= offset < one.end), 0)
        for offset in names
    }


class Strike:
    """Run a function, and raise an error when it reaches a moment for the first time.

    A moment is a code object and an offset in it. ``moments`` has all that it reached.
    """

    def __init__(self, function, moment=None):
        self.moments, self.has_struck = {}, False
        self._moment, self._last = moment, {}
        before = sys.gettrace()
        # Python 3.12 sends opcodes only if a frame asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            function()
        except StrikeError:
            pass
        finally:
            sys.settrace(before)

    def _trace(self, frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(STRUCK):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            names, handlers = names_and_handlers(code)
            before, here = self._last.get(frame), frame.f_lasti
            self._last[frame] = here
            # The error is raised one instruction too late. Where that has another
            # handler, it is no such moment.
            if names.get(before) in MOMENTS and handlers[before] == handlers[here]:
                self.moments[code, here] = True
                if self._moment == (code, here) and not self.has_struck:
                    self.has_struck = True
                    raise StrikeError
        elif event == "return":
            self._last.pop(frame, None)
        return self._trace


def lock(key="k", **policy):
    return db_lock(key, using="session", **policy)


def free():
    lock(timeout=0).acquire().release()


def keep():
    lock(timeout=0, min_hold=0.02).acquire().release()


def timeout():
    with contextlib.suppress(LockTimeout):
        lock(timeout=0.03).acquire().release()


def granted():
    lock(timeout=30).acquire().release()


def nested():
    with lock("outer", timeout=0):
        granted()


def shared():
    both = db_rwlock("k", using="session", timeout=0)
    with both.read():
        pass
    with both.write(), both.read():
        pass


@pytest.fixture
def other(transactional_db):
    """A backend with sessions of its own, like that of another process."""
    backend = SessionBackend("other", linger=60)
    backend.waiting("k")
    yield backend
    disconnect(backend)


@pytest.fixture
def runs(other, threads):
    """Return a function that runs a case with a moment at which to strike."""

    def run(case, moment=None):
        claim = Claim(key="k", ttl=30.0, holder="other")
        over = threading.Event()

        def release():
            eventually(lambda: over.is_set() or other.waiting("k"))
            other.release(claim)

        if case in (timeout, granted, nested):
            assert other.acquire(claim)
        releases = threads(release) if case in (granted, nested) else None
        try:
            return Strike(case, moment)
        finally:
            over.set()
            if releases is not None:
                releases.join(30)
            other.release(claim)

    return run


# Only PostgreSQL has shared session locks.
SHARED = pytest.param(shared, marks=pytest.mark.engine("postgresql"))


@pytest.mark.parametrize("case", [free, keep, timeout, granted, nested, SHARED])
def test_an_interrupt_leaves_no_key_taken(case, other, runs, threads, until, settings):
    """Other threads and processes get the keys, and the tables are empty again."""
    session = settings.DLOCKS["session"]
    options = {**session.get("OPTIONS", {}), "ttl": 2.0, "grace": 0.1}
    settings.DLOCKS = {**settings.DLOCKS, "session": {**session, "OPTIONS": options}}
    backend = backends["session"]

    def use_keys():
        for key in ("k", "outer"):
            lock(key, timeout=10).acquire().release()

    def is_clean():
        claims = backend.claims
        at = [session.at for session in backend.sessions.all()]
        return not any([claims.all(), claims.queued, claims.nested, *at])

    def is_free():
        claim = Claim(key="k", ttl=30.0, holder="other")
        return other.acquire(claim) is not None and other.release(claim)

    # The first run connects.
    moments = runs(case).moments
    until(is_clean)
    moments |= runs(case).moments
    until(is_clean)
    struck = 0
    for code, offset in moments:
        struck += runs(case, (code, offset)).has_struck
        where = f"{code.co_qualname} at {offset}"
        try:
            threads(use_keys).join(60)
            until(is_clean)
            until(is_free)
        except (AssertionError, LockError) as error:
            raise AssertionError(where) from error
    # The others are those of a new connection.
    assert struck > 30
