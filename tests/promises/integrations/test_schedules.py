"""Jobs that every node starts and only one runs.

The recipes are in docs/how-to/schedules.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.management import BaseCommand, CommandError, call_command
from django.db import transaction

from dlocks import (
    LockBackendError,
    LockLost,
    LockTimeout,
    SingleInstance,
    current_hold,
    db_lock,
    lock_acquired,
    lock_timeout,
    run_once,
)
from dlocks.models import ResourceLock
from dlocks.testing import abandoned, frozen_clock, held_elsewhere
from tests import jobs, pages
from tests.for_each import for_each
from tests.processes import state_of, states_of
from tests.promises.commands.running import exit_of, refused, run
from tests.promises.locks.keys import clear
from tests.promises.optimistic.kinds import received
from tests.timing import eventually

ROOT = Path(__file__).parent.parent.parent.parent

pytest_plugins = ["tests.promises.stops"]
pytestmark = [
    # Jobs and commands have no SQL of their own.
    pytest.mark.front,
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture(scope="module")
def page():
    return pages.run("how-to/schedules")


# run_once.


def test_one_of_several_processes_runs_the_job(workers):
    """Processes that start it later, within ``min_hold``, do not run it again."""
    team = workers(4)
    for worker in team:
        worker.start(jobs.run_job, "nightly", min_hold=30)
    assert sorted(worker.hear() for worker in team) == [False, False, False, True]
    assert [worker.call(jobs.run_job, "nightly", min_hold=30) for worker in team] == [
        False
    ] * 4


@pytest.mark.usefixtures("memory_locks")
@for_each("skew", [0, 59.9])
async def test_a_clock_skew_below_min_hold_does_not_run_a_job_twice(
    skew, frozen_lock_clock, page
):
    """This holds for functions, for coroutines, and for a job that fails."""
    frozen_lock_clock.tick(61)
    runs = []

    @run_once("weekly", min_hold=60)
    async def fails():
        raise KeyError

    job = run_once("nightly", min_hold=60)(lambda: runs.append("ran") or "done")

    @run_once("nightly:{region}", min_hold=60)
    async def coroutine(region):
        return region

    report = sync_to_async(page.nightly_report)

    async def both():
        return await sync_to_async(job)(), await coroutine("north")

    assert await both() == ("done", "north")
    assert await report() == "sent"
    with pytest.raises(KeyError):
        await fails()
    frozen_lock_clock.tick(skew)
    assert await both() == (None, None)
    assert await report() is await fails() is None
    assert await coroutine("south") == "south"
    frozen_lock_clock.tick(60.01 - skew)
    assert await both() == ("done", "north")
    assert await report() == "sent"
    with pytest.raises(KeyError):
        await fails()
    assert len(runs) == 2


async def test_a_job_that_starts_itself_runs_once(signalled):
    """The inner run is a timeout like that of another node."""
    runs, refused = [], signalled(lock_timeout)

    @run_once("nightly:{region}", min_hold=60)
    def job(region):
        runs.append(region)
        current_hold().check()
        assert job(region) is None
        return "done"

    @run_once("weekly", min_hold=60)
    async def coroutine():
        runs.append("weekly")
        assert db_lock("weekly").held()
        assert await coroutine() is None
        assert await asyncio.create_task(coroutine()) is None
        return "done"

    assert await sync_to_async(job)("north") == "done"
    assert await coroutine() == "done"
    assert runs == ["north", "weekly"]
    keys = [lock.key for _, lock in refused]
    assert keys == ["nightly:north", "weekly", "weekly"]
    assert await sync_to_async(job)("north") is await coroutine() is None


@pytest.mark.usefixtures("memory_locks")
async def test_a_skipped_run_is_not_a_job_that_returns_none():
    """``busy`` says what a skipped run does: an error, or the result of a function."""
    inner = []

    def skipped(error, region):
        return type(error), error.key, region

    @run_once("sync:{region}", min_hold=60, busy="raise")
    def raises(region):
        with pytest.raises(LockTimeout, match="this thread holds it already"):
            raises(region)
        inner.append(region)

    @run_once("async:{region}", min_hold=60, busy=skipped)
    async def calls(region):
        inner.append(await calls(region))

    assert await sync_to_async(raises)("north") is None
    assert await calls("north") is None
    found = LockTimeout, "async:north", "north"
    assert inner == ["north", found]
    # Within min_hold, although the first run has ended.
    assert await calls("north") == found
    with pytest.raises(LockTimeout, match="'sync:north' could not be acquired"):
        await sync_to_async(raises)("north")


@pytest.mark.parametrize("using", ["default", "memory"])
def test_a_job_extends_its_max_hold(using, is_busy):
    """It counts from the renewal, and has no effect on other runs."""
    kept = threading.Event()

    @run_once("job", min_hold=0.1, max_hold=1.5, using=using)
    def job():
        hold = current_hold()
        hold.renew(max_hold=timedelta(minutes=1))
        ends = time.monotonic() + 2
        while time.monotonic() < ends:
            time.sleep(0.01)
        hold.check()
        assert is_busy("job", using)
        kept.set()
        # A shorter one counts, too.
        hold.renew(max_hold=0.5)
        eventually(lambda: not hold.held)
        eventually(lambda: not is_busy("job", using))

    with pytest.raises(LockLost, match=r"its max_hold of 0\.5 s from a renewal"):
        job()
    assert kept.is_set()


async def test_the_current_hold_is_that_of_the_innermost_decorated_function():
    """In functions, coroutines, their tasks and calls of ``sync_to_async()``."""

    def keys():
        with db_lock("block", using="memory"):
            return current_hold().key

    @db_lock("sync", using="memory")
    def sync():
        return keys()

    @db_lock("async:{name}", using="memory", busy="raise")
    async def coroutine(name):
        inner = await sync_to_async(sync)()
        tasks = asyncio.create_task(sync_to_async(keys)()), asyncio.to_thread(keys)
        async with db_lock("block", using="memory"):
            keys_here = current_hold().keys
        return [inner, *await asyncio.gather(*tasks), *keys_here]

    both = await asyncio.gather(coroutine("one"), coroutine("two"))
    assert both == [["sync", *[f"async:{name}"] * 3] for name in ("one", "two")]
    with pytest.raises(RuntimeError, match="No function runs here that a lock"):
        current_hold()

    @db_lock("fails", using="memory")
    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        await sync_to_async(fails)()
    with pytest.raises(RuntimeError):
        await sync_to_async(current_hold)()


def test_the_current_hold_of_a_command():
    class Command(SingleInstance, BaseCommand):
        lock_key = "command"

        def handle(self, **options):
            assert current_hold() is self.hold
            return current_hold().key

    assert run(Command()) == "command\n"
    with pytest.raises(RuntimeError):
        current_hold()


@pytest.mark.engine("postgresql")
def test_a_job_that_failed_in_a_transaction_keeps_min_hold():
    """The transaction of a coroutine belongs to the thread that starts it."""
    runs = []

    @run_once("nightly", min_hold=60)
    def job():
        runs.append("job")
        raise KeyError

    @run_once("weekly", min_hold=60)
    async def coroutine():
        runs.append("coroutine")

    for expected in (pytest.raises(KeyError), contextlib.nullcontext()):
        with expected, transaction.atomic():
            assert job() is None
        with transaction.atomic():
            async_to_sync(coroutine)()
            transaction.set_rollback(True)
    # After a rollback, a thread of dlocks releases the key.
    with frozen_clock() as clock:
        clock.tick(0)
    assert runs == ["job", "coroutine"]


@for_each("keys", [["nightly"], ["nightly", "weekly"]])
def test_a_job_interrupted_at_its_end_keeps_min_hold(keys, stops, is_busy):
    """The key is kept, however the job ends."""
    interrupted = []

    def interrupt(usual, *_):
        answer = usual()
        if not interrupted:
            interrupted.append(answer)
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt), db_lock(*keys, min_hold=60):
        stops.replace("release", interrupt)
    assert interrupted
    assert all(map(is_busy, keys))


@pytest.mark.django_db
def test_a_job_in_a_testcase_does_not_affect_the_next_test():
    @run_once("nightly", min_hold=60)
    def job():
        return "done"

    # Like two tests.
    for _ in range(2):
        with transaction.atomic():
            assert job() == "done"
            transaction.set_rollback(True)


@pytest.mark.engine("sqlite")
@for_each("use", ["call", "coroutine"])
def test_a_job_in_a_transaction_of_sqlite_is_refused(use):
    """A rollback would undo ``min_hold``, and a later node would run the job again."""
    runs = []
    job = run_once("nightly", min_hold=60)(lambda: runs.append("ran"))

    @run_once("nightly", min_hold=60)
    async def coroutine():
        runs.append("ran")

    start = job if use == "call" else async_to_sync(coroutine)
    why = "'nightly' cannot .* SQLite has one writer.*Acquire it before the tran"
    with pytest.raises(RuntimeError, match=why), transaction.atomic():
        start()
    assert runs == []
    start()
    with transaction.atomic(), pytest.raises(RuntimeError, match=why):
        start()
    start()
    assert runs == ["ran"]


def test_a_job_of_a_dead_node_keeps_min_hold(doomed, is_busy):
    """Its lease would expire after the ttl of 0.6 s."""
    node = doomed()
    node.call(jobs.run_job, "nightly", min_hold=3, using="brisk", wait=True)
    began = time.monotonic()
    node.kill()
    while True:
        busy = is_busy("nightly")
        if time.monotonic() >= began + 1.5:
            break
        assert busy
        time.sleep(0.1)
    eventually(lambda: not is_busy("nightly"), pause=0.1)


@pytest.mark.usefixtures("memory_locks")
def test_a_run_longer_than_max_hold_does_not_block_the_next(
    frozen_lock_clock, in_other_thread
):
    runs = []

    @run_once("nightly", min_hold=60, max_hold=600)
    def job():
        runs.append("began")
        if len(runs) == 1:
            for _ in range(59):
                frozen_lock_clock.tick(10)
            assert in_other_thread(job) is None
            frozen_lock_clock.tick(10.6)
            assert in_other_thread(job) == "done"
        return "done"

    with pytest.raises(LockLost, match="max_hold of 600"):
        job()
    assert len(runs) == 2


def test_an_invalid_schedule_is_refused_when_decorating():
    for policy in {"min_hold": 0}, {"min_hold": 60, "max_hold": 59}:
        with pytest.raises(ValueError):
            run_once("nightly", **policy)
    for policy in {}, {"min_hold": "60"}, {"timeout": 3}, {"ttl": 3}:
        with pytest.raises(TypeError):
            run_once("nightly", **({"min_hold": 60} if policy else {}) | policy)
    with pytest.raises(ValueError, match="cannot use scope='transaction'"):
        run_once("nightly", min_hold=60, scope="transaction")


# SingleInstance.


def test_a_command_runs_under_a_lock_of_its_own_name():
    """A timeout inside the command is not taken for a second instance."""

    class Plain(SingleInstance, BaseCommand):
        def handle(self, *args, **options):
            self.hold.check()
            return self.hold.key

    class WithTimeout(SingleInstance, BaseCommand):
        lock_key = "outer"

        def handle(self, *args, **options):
            db_lock("inner", timeout=0).acquire()

    command, key = Plain(), "command:test_schedules"
    assert run(command) == f"{key}\n"
    assert Plain.hold is None
    with held_elsewhere("inner"), pytest.raises(LockTimeout, match="inner"):
        call_command(WithTimeout())
    said = "already running.*held by web-2:77:MainThread"
    with held_elsewhere(key, holder="web-2:77:MainThread"):
        with pytest.raises(CommandError, match=said) as caught:
            call_command(command)
    assert caught.value.returncode == 75
    assert command.hold is None


def test_a_command_that_cannot_wait_exits_with_75():
    """As one that did not wait does. SQLite cannot wait in a transaction."""

    class Command(SingleInstance, BaseCommand):
        lock_key = "import"
        lock_policy = {"timeout": 0.2}

    with held_elsewhere("import"), transaction.atomic():
        with pytest.raises(CommandError, match="already running") as caught:
            call_command(Command())
    assert caught.value.returncode == 75


def test_a_command_that_calls_itself_exits_with_75(is_busy):
    """Its first run goes on under its lock. A caller may hold the key itself."""
    ran = []

    class Command(SingleInstance, BaseCommand):
        lock_key = "import"

        def handle(self, *args, **options):
            for again in (self, Command()):
                with pytest.raises(CommandError, match="running: 'import'") as caught:
                    call_command(again)
                assert caught.value.returncode == 75
            self.hold.check()
            ran.append(self.hold)

    call_command(Command())
    with db_lock("import") as hold:
        call_command(Command())
        call_command(Command())
        hold.check()
    assert len(ran) == 3
    assert not is_busy("import")


def test_the_documented_command_locks_by_its_options(page):
    with held_elsewhere("import_prices:acme"):
        assert "import_prices:acme" in refused(page.Command(), "acme")
        assert run(page.Command(), "other") == "imported other\n"


# run_locked.


@pytest.fixture
def run_locked(doomed, tmp_path):
    """Return a function that starts ``run_locked`` in a process of its own."""
    return lambda *args: Program(doomed(), tmp_path, *args)


class Program:
    """``run_locked`` in a forked process, which takes less time than an interpreter."""

    def __init__(self, worker, directory, *args):
        self.process, self.directory = worker.process, directory
        self.pid, self._read = worker.process.pid, 0
        os.mkfifo(directory / "in")
        self.stdin = os.open(directory / "in", os.O_RDWR)
        worker.start(serve, directory, *args)

    def line(self):
        """Return the next line of the output."""

        def more():
            lines = self.text("out").splitlines()[self._read :]
            return lines and lines[0]

        found = eventually(more, 60)
        self._read += 1
        return found

    def text(self, name):
        file = self.directory / name
        return file.read_text() if file.exists() else ""

    def end(self, text=b"end\n"):
        """Let the command end, and return the exit status."""
        os.write(self.stdin, text)
        os.close(self.stdin)
        self.process.join(60)
        return self.process.exitcode


def serve(pipe, directory, *args):
    """Run ``run_locked`` with files as its streams. Exit with its status."""
    # Under nohup, SIGHUP would be ignored here and in the child process.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    written = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, name in enumerate(("in", "out", "err")):
        os.dup2(os.open(directory / name, written if number else os.O_RDONLY), number)
    os._exit(exit_of(*args))


def serve_in_terminal(pipe, terminal, *args):
    """Run ``run_locked`` in the foreground of a terminal."""
    os.setsid()
    for number in range(3):
        os.dup2(os.open(terminal, os.O_RDWR), number)
    os._exit(exit_of(*args))


def python(code):
    return ["--", sys.executable, "-c", code]


# A script that prints each signal that it receives, and exits after the line "end".
LISTENER = """
import os, signal, sys, threading
numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
def listen():
    for line in sys.stdin:
        if line.strip() == "end":
            break
    os._exit(3)
threading.Thread(target=listen, daemon=True).start()
print(os.getpid(), flush=True)
while True:
    print(signal.Signals(signal.sigwait(numbers)).name, flush=True)
"""


def test_a_command_exits_as_in_a_shell(capfd, is_busy):
    """This includes a command that is killed or cannot run. Code can call it too."""
    for args, status, printed in (
        (["--", "false"], 1, ""),
        (python("import os; os.kill(os.getpid(), 9)"), 137, ""),
        (["--", "/nowhere/to/be/found"], 127, ""),
        (["--", str(ROOT / "README.md")], 126, ""),
        # An argument that is not text, and options of the command itself.
        ([*python("print('ran')"), os.fsdecode(b"\xff\xfe.txt")], 0, "ran\n"),
        (["--timeout", "1s", "--", "echo", "--", "-x y"], 0, "-- -x y\n"),
    ):
        assert exit_of("backup", *args) == status, args
        out, err = capfd.readouterr()
        assert out == printed, args
        assert status not in (126, 127) or args[1] in err
        assert "Traceback" not in err
        assert not is_busy("backup")
    call_command("run_locked", "backup", command=["echo", "called"])
    assert capfd.readouterr().out == "called\n"
    with pytest.raises(SystemExit) as caught:
        call_command("run_locked", "backup", command=["false"])
    assert caught.value.code == 1


def test_an_invalid_command_line_is_refused_in_one_line(capfd):
    """A busy key exits with 75 and names the holder. The command does not run."""
    work = python("print('ran')")
    too_long = "A key can have at most 255 characters with its prefix, not"
    busy = "'busy' could not be acquired without waiting: held by web-2:7:MainThread"
    for args, status, why in (
        (["backup"], 1, ""),
        (["backup", "--"], 1, ""),
        (["", *work], 1, ""),
        (["k", "--ttl", "0s", *work], 1, "ttl must be above 0"),
        (["k", "--timeout", "60", *work], 1, "--timeout takes a duration such as"),
        (["k", "--using", "nope", *work], 1, ""),
        (["x" * 253, "--using", "prefixed", *work], 1, too_long),
        (["busy", *work], 75, busy),
    ):
        with held_elsewhere("busy", holder="web-2:7:MainThread"):
            assert exit_of(*args) == status, args
        out, err = capfd.readouterr()
        assert out == "", args
        assert why in err, args
        assert "Traceback" not in err, args


def test_signals_reach_the_command_and_the_key_stays_held(run_locked, is_busy, until):
    """A signal that comes when the command has ended keeps its exit status."""
    program = run_locked("backup", *python(LISTENER))
    child = int(program.line())
    _host, pid, thread = db_lock("backup").holder().holder.split(":", 2)
    assert pid == str(program.pid)
    assert thread == f"MainThread [run_locked {Path(sys.executable).name}]"
    for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP] * 3:
        os.kill(program.pid, number)
        assert program.line() == signal.Signals(number).name
        assert program.process.is_alive()
        assert is_busy("backup")
    os.kill(program.pid, signal.SIGSTOP)
    until(lambda: state_of(program.pid) == "T")
    os.kill(program.pid, signal.SIGTERM)
    os.write(program.stdin, b"end\n")
    until(lambda: state_of(child) == "Z")
    os.kill(program.pid, signal.SIGCONT)
    assert program.end() == 3
    assert program.text("err") == ""
    assert not is_busy("backup")
    # The child is neither running nor a zombie.
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_arguments_are_shown_only_with_an_option(capfd, signalled):
    """They may contain passwords."""
    for options, shown in (
        ([], "MainThread [run_locked echo]"),
        (
            ["--show-arguments"],
            "MainThread [run_locked /bin/echo --password 'a b']",
        ),
    ):
        acquired = signalled(lock_acquired)
        command = "/bin/echo", "--password", "a b"
        assert exit_of("backup", *options, "--", *command) == 0
        holders = [hold.claim.holder.split(":", 2)[2] for _, hold in acquired]
        assert holders == [shown]


def test_a_signal_during_the_wait_leaves_no_claim(run_locked, until):
    with held_elsewhere("backup"):
        program = run_locked("backup", "--timeout", "60s", *python("print('ran')"))
        until(lambda: _handles(program.pid, signal.SIGTERM), 60)
        os.kill(program.pid, signal.SIGTERM)
        assert (program.end(), program.text("out")) == (143, "")
    assert db_lock("backup").holder() is None


def _handles(pid, number):
    """Return whether a process has a handler for a signal."""
    (caught,) = (
        line
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith("SigCgt")
    )
    return int(caught.split()[1], 16) >> (number - 1) & 1


def test_the_command_inherits_ignored_signals(capfd):
    """An example is nohup."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert exit_of("backup", *python(code)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr().out == "True\n"


def test_the_command_receives_a_terminals_ctrl_c_once(doomed, until):
    """The command is in the foreground of the terminal itself."""
    # By default, the terminal discards output after the signal, even if it was written
    # before.
    start = """
import termios
modes = termios.tcgetattr(0)
modes[3] |= termios.NOFLSH
termios.tcsetattr(0, termios.TCSANOW, modes)
print("ready", flush=True)
"""
    code = LISTENER.replace("print(os.getpid(), flush=True)\n", start)
    worker, (master, slave) = doomed(), os.openpty()
    parent, seen = worker.process.pid, b""

    def read_until(text):
        nonlocal seen
        while text not in seen:
            assert select.select([master], [], [], 60)[0], seen
            seen += os.read(master, 1000)

    try:
        terminal = os.ttyname(slave)
        worker.start(serve_in_terminal, terminal, "backup", *python(code))
        read_until(b"ready\r\n")
        # Two pending signals would be merged, so the command has to receive its own
        # first.
        os.kill(parent, signal.SIGSTOP)
        os.write(master, b"\x03")
        read_until(b"SIGINT\r\n")
        os.kill(parent, signal.SIGCONT)
        # Each of its threads may have received the signal, and handles it before it
        # sleeps again.
        until(lambda: states_of(parent) == {"S"})
        os.kill(parent, signal.SIGTERM)
        read_until(b"SIGTERM\r\n")
        assert seen.count(b"SIGINT") == 1
        os.write(master, b"end\n")
        worker.process.join(60)
        assert worker.process.exitcode == 3
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize(("status", "passed_on"), [(3, 3), (0, 1)])
def test_a_command_whose_lock_is_lost_receives_sigterm(run_locked, status, passed_on):
    """If it then ends with success, the result is still a failure."""
    code = LISTENER.replace("_exit(3)", f"_exit({status})")
    program = run_locked("backup", "--using", "brisk", *python(code))
    program.line()
    (row,) = ResourceLock.objects.filter(pk="backup")
    clear("backup")
    assert program.line() == "SIGTERM"
    assert program.process.is_alive()
    assert program.end() == passed_on
    err = program.text("err")
    assert f"token {row.version}" in err
    assert "'backup' was lost" in err
    assert "Traceback" not in err


def test_a_successful_command_with_a_failed_release_is_a_success(
    stops, monkeypatch, capfd
):
    """The lease expires by itself. It is held even if no thread can be started."""
    start = threading.Thread.start

    def refuse(thread):
        if not thread.name.startswith("dlocks-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    def fail(*_):
        raise LockBackendError("the database is away")

    stops.replace("release", fail)
    call_command("run_locked", "backup", using="brisk", command=["echo", "done"])
    out, err = capfd.readouterr()
    assert out == "done\n"
    assert "the database is away" in err
    stops.replace("acquire", fail)
    with pytest.raises(CommandError, match="away"):
        call_command("run_locked", "backup", using="brisk", command=["echo", "done"])


class Interrupt(BaseException):
    """Raised by a signal handler, as for the time limit of a task."""


def test_an_interrupt_ends_the_command_before_the_lock(capfd, is_busy):
    """The command never runs without the lock."""

    def interrupt(number, frame):
        raise Interrupt

    code = (
        "import os, signal, time; print(os.getpid(), flush=True);"
        " os.kill(os.getppid(), signal.SIGUSR1); time.sleep(60)"
    )
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            call_command("run_locked", "backup", command=[sys.executable, "-c", code])
    finally:
        signal.signal(signal.SIGUSR1, before)
    # The command is neither running nor a zombie.
    with pytest.raises(ProcessLookupError):
        os.kill(int(capfd.readouterr().out), 0)
    assert not is_busy("backup")


def test_a_command_does_not_start_after_its_lock_was_lost(capfd):
    """The process may have been paused for longer than its ttl."""

    def clear_it(hold, **_):
        clear(hold.key)

    lost = pytest.raises(CommandError, match="was cleared")
    with received(clear_it, None, lock_acquired), lost:
        call_command("run_locked", "backup", command=["echo", "done"])
    assert capfd.readouterr().out == ""


def test_a_signal_that_the_command_refuses_keeps_the_lock(capfd, monkeypatch):
    """The command may run as another user, for example by sudo."""

    def refuse(process, number):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(subprocess.Popen, "send_signal", refuse)
    code = "import os, signal; os.kill(os.getppid(), signal.SIGTERM); print('done')"
    call_command("run_locked", "backup", command=[sys.executable, "-c", code])
    assert capfd.readouterr().out == "done\n"


# The recipes.


def test_the_documented_console_command_works(tmp_path, monkeypatch, capfd):
    (block,) = pages.blocks("how-to/schedules", "sh")
    program, command, *arguments = shlex.split(block.removeprefix("python "))
    assert (program, command) == ("manage.py", "run_locked")
    tool = tmp_path / "pg_dump"
    tool.write_text("#!/bin/sh\necho dumped $@\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert exit_of(*arguments) == 0
    assert capfd.readouterr() == ("dumped --file=shop.sql shop\n", "")


def test_the_documented_cron_line_runs_once_on_late_hosts(capfd):
    """Cron runs it with sh, almost no environment and no terminal."""
    (block,) = pages.blocks("how-to/schedules", "cron")
    line = block.split("app", 1)[1].split("&&", 1)[1].strip()
    line = line.replace("python manage.py sync_stock", "echo synced")
    arguments = shlex.split(line.partition(" run_locked ")[2])
    bare = {"PATH": "/usr/bin:/bin", "DJANGO_SETTINGS_MODULE": "tests.settings"}
    bare |= {name: os.environ[name] for name in os.environ if "DLOCKS" in name}
    done = subprocess.run(
        ["sh", "-c", line.replace("python", f"{sys.executable} -W error")],
        cwd=ROOT, env=bare, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "synced\n", "")
    # The line of another host exits with 75, which the page names. Cron has no output
    # to mail.
    assert exit_of(*arguments) == 75
    assert capfd.readouterr() == ("", "")


def test_the_documented_celery_and_django_tasks_work(page):
    from celery import Celery

    app = Celery("tests", broker="memory://", backend="cache+memory://")
    app.conf.task_always_eager = True
    assert page.cleanup.delay().get() == "cleaned"
    assert page.cleanup.delay().get() is None
    assert page.cleanup.name.endswith(".cleanup")
    assert page.recalculate.apply(args=[7]).get() == "recalculated 7"
    with held_elsewhere("account:7"):
        # An eager task retries at once. In the end it fails because of the lock.
        result = page.recalculate.apply(args=[7])
        assert result.status == "FAILURE"
        with pytest.raises(LockTimeout, match="account:7") as caught:
            result.get()
        assert caught.value.holder.holder == "elsewhere:1:MainThread"
    abandoned("account:8")
    assert page.recalculate.apply(args=[8]).get() == "recalculated 8"
    # A task of Django.
    thumbnails = page.make_thumbnails
    assert thumbnails.enqueue(album=7).return_value == "thumbnails of 7"
    with held_elsewhere("thumbnails:7"):
        assert thumbnails.enqueue(album=7).return_value is None
        assert thumbnails.enqueue(album=8).return_value == "thumbnails of 8"
