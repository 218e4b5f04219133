"""Jobs that every node starts and one must run, as docs/how-to/schedules.md has them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.core.management import CommandError, call_command
from django.db import transaction

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock, run_once
from dlocks.conf import backends
from dlocks.keeper import keeper
from dlocks.models import ResourceLock
from dlocks.testing import abandoned, held_elsewhere
from tests import commands_for_tests, jobs, pages
from tests.processes import state_of, states_of

ROOT = Path(__file__).parent.parent

pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    # Jobs and commands have no SQL of their own.
    pytest.mark.engine("sqlite", "postgresql"),
]


@pytest.fixture(scope="module")
def page():
    return pages.run("how-to/schedules")


# run_once.


def test_of_processes_that_start_a_job_one_runs_it(workers):
    """And those that come when it is done, within at_least, do not run it again."""
    team = workers(4)
    for worker in team:
        worker.start(jobs.run_job, "nightly", at_least=30)
    assert sorted(worker.hear() for worker in team) == [False, False, False, True]
    assert [worker.call(jobs.run_job, "nightly", at_least=30) for worker in team] == [False] * 4


@pytest.mark.usefixtures("memory_locks")
@pytest.mark.parametrize("skew", [0, 30, 59.9])
def test_a_clock_skew_below_at_least_does_not_run_a_job_twice(skew, frozen_lock_clock):
    runs = []
    job = run_once("nightly", at_least=60)(lambda: runs.append("ran") or "done")
    assert job() == "done"
    frozen_lock_clock.tick(skew)
    assert job() is None
    frozen_lock_clock.tick(60.01 - skew)
    assert job() == "done"
    assert len(runs) == 2


@pytest.mark.engine("postgresql", "mariadb")
def test_a_job_that_failed_in_a_transaction_is_not_begun_again_within_at_least():
    @run_once("nightly", at_least=60)
    def job():
        raise KeyError

    for expected in (pytest.raises(KeyError), contextlib.nullcontext()):
        with expected, transaction.atomic():
            assert job() is None
    # After a rollback it is the keeper that gives back.
    keeper.catch_up()


@pytest.mark.engine("postgresql", "mariadb")
def test_a_coroutine_job_that_was_called_in_a_transaction_is_not_begun_again_within_at_least():
    """The transaction is that of the thread which the coroutine comes from."""
    runs = []

    @run_once("nightly", at_least=60)
    async def job():
        runs.append("ran")

    for _ in range(2):
        with transaction.atomic():
            async_to_sync(job)()
            transaction.set_rollback(True)
    keeper.catch_up()
    assert runs == ["ran"]


@pytest.mark.parametrize("together", [False, True])
def test_an_interrupt_as_a_job_ends_does_not_begin_it_again_within_at_least(together, monkeypatch, elsewhere):
    """In whatever way it ends, the key is kept."""
    backend = backends["default"]
    release = backend.release

    def interrupted(*arguments, **keywords):
        monkeypatch.undo()
        release(*arguments, **keywords)
        raise KeyboardInterrupt

    keys = ["nightly", "weekly"] if together else ["nightly"]
    with pytest.raises(KeyboardInterrupt), db_lock(*keys, at_least=60):
        monkeypatch.setattr(backend, "release", interrupted)
    for key in keys:
        assert elsewhere(db_lock(key).try_acquire) is None


@pytest.mark.django_db
def test_in_a_testcase_a_job_leaves_nothing_for_the_next_one():
    @run_once("nightly", at_least=60)
    def job():
        return "done"

    # As if each were a test of its own.
    for _ in range(2):
        with transaction.atomic():
            assert job() == "done"
            transaction.set_rollback(True)


def test_a_run_that_belongs_to_a_transaction_is_refused():
    with pytest.raises(ValueError, match="cannot belong to a transaction"):
        run_once("nightly", at_least=60, scope="transaction")


@pytest.mark.usefixtures("memory_locks")
def test_a_job_that_failed_is_not_begun_again_within_at_least(frozen_lock_clock):
    @run_once("nightly", at_least=60)
    def job():
        raise KeyError

    with pytest.raises(KeyError):
        job()
    assert job() is None
    frozen_lock_clock.tick(61)
    with pytest.raises(KeyError):
        job()


def test_a_job_whose_node_died_is_not_begun_again_within_at_least(doomed, until, is_busy):
    """Its lease would have run out after the ttl of 0.6 s."""
    node = doomed()
    node.start(jobs.run_job, "nightly", at_least=3, using="brisk", wait=True)
    node.hear()
    began = time.monotonic()
    node.kill()
    while True:
        busy = is_busy("nightly")
        if time.monotonic() >= began + 1.5:
            break
        assert busy
        time.sleep(0.05)
    until(lambda: not is_busy("nightly"))


@pytest.mark.usefixtures("memory_locks")
def test_a_run_beyond_at_most_no_longer_keeps_the_next_one_away(frozen_lock_clock, elsewhere):
    runs = []

    @run_once("nightly", at_least=60, at_most=600)
    def job():
        runs.append("began")
        if len(runs) == 1:
            for _ in range(59):
                frozen_lock_clock.tick(10)
            assert elsewhere(job) is None
            frozen_lock_clock.tick(10.6)
            assert elsewhere(job) == "done"
        return "done"

    with pytest.raises(LockLost, match="max_hold of 600"):
        job()
    assert len(runs) == 2


@pytest.mark.usefixtures("memory_locks")
async def test_a_coroutine_job_runs_once_too():
    @run_once("nightly:{region}", at_least=60)
    async def job(region):
        return region

    assert await job("north") == "north"
    assert await job("north") is None
    assert await job("south") == "south"


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        ({}, TypeError),
        ({"at_least": 0}, ValueError),
        ({"at_least": 60, "at_most": 59}, ValueError),
        ({"at_least": "60"}, TypeError),
        ({"at_least": 60, "timeout": 3}, TypeError),
        ({"at_least": 60, "ttl": 3}, TypeError),
        ({"at_least": 60, "busy": "raise"}, TypeError),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused_when_decorating(policy, error):
    with pytest.raises(error):
        run_once("nightly", **policy)


# SingleInstance.


def test_a_command_runs_under_a_lock_of_its_own_name():
    assert call_command(commands_for_tests.Plain(), stdout=io.StringIO()) == "command:commands_for_tests"
    assert commands_for_tests.Plain.hold is None


def test_a_second_instance_ends_with_status_75_and_says_who_runs():
    command = commands_for_tests.Plain()
    with held_elsewhere("command:commands_for_tests", holder="web-2:77:MainThread"):
        with pytest.raises(CommandError, match="runs already.*held by web-2:77:MainThread") as caught:
            call_command(command)
    assert caught.value.returncode == 75
    assert command.hold is None


def test_a_time_out_within_the_command_is_its_own():
    with held_elsewhere("inner"), pytest.raises(LockTimeout, match="inner"):
        call_command(commands_for_tests.WithTimeout())


def test_the_command_of_the_page_locks_by_its_options(page):
    out = io.StringIO()
    with held_elsewhere("import_prices:acme"):
        with pytest.raises(CommandError, match="import_prices:acme"):
            call_command(page.Command(), "acme", stdout=out)
        call_command(page.Command(), "other", stdout=out)
    assert out.getvalue() == "imported other\n"


# run_locked.


def manage(*args):
    return [sys.executable, "-W", "error", "manage.py", *args]


@pytest.fixture
def environment(transactional_db):
    return {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def run_locked(environment):
    """Return a function that starts run_locked as a process; what is left of it at the end is killed."""
    started = []

    def start(*args, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.PIPE, **options}
        # Under nohup a hang-up would be ignored, and so would be what is inherited.
        options["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)
        process = subprocess.Popen(manage("run_locked", *args), cwd=ROOT, env=environment, text=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def python(code):
    return ["--", sys.executable, "-c", code]


# Says what it was sent, and ends when told to.
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


@pytest.mark.parametrize("status", [0, 1, 42])
def test_the_command_s_exit_status_is_passed_on(run_locked, status, is_busy):
    process = run_locked("backup", *python(f"print('hello'); raise SystemExit({status})"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (status, "hello\n", "")
    assert not is_busy("backup")


def test_a_command_that_a_signal_ended_gives_128_and_its_number(run_locked, is_busy):
    process = run_locked("backup", *python("import os; os.kill(os.getpid(), 9)"))
    process.communicate(timeout=60)
    assert process.returncode == 137
    assert not is_busy("backup")


def test_a_name_that_is_no_text_does_not_keep_the_command_from_running(run_locked):
    process = run_locked("backup", "--", sys.executable, "-c", "print('ran')", b"\xff\xfe.txt")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ran\n"), err


def test_what_the_backend_refuses_is_told_in_one_line(run_locked):
    process = run_locked("x" * 253, "--using", "prefixed", *python("print('ran')"))
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("CommandError: With its prefix the key has")


def test_a_busy_key_is_status_75_and_the_command_is_not_run(run_locked):
    with held_elsewhere("backup", holder="web-2:77:MainThread"):
        process = run_locked("backup", *python("print('ran')"))
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (75, "")
    assert "'backup' not acquired at the first try; held by web-2:77:MainThread" in err


@pytest.mark.parametrize(("command", "status"), [("/nowhere/to/be/found", 127), (str(ROOT / "README.md"), 126)])
def test_a_command_that_cannot_be_run_has_the_status_of_a_shell(run_locked, command, status, is_busy):
    process = run_locked("backup", "--", command)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert command in err
    assert "Traceback" not in err
    assert not is_busy("backup")


@pytest.mark.parametrize(
    "args",
    [
        ("backup",),
        ("backup", "--"),
        ("", "--", "true"),
        ("k", "--ttl", "0", "--", "true"),
        ("k", "--using", "nope", "--", "true"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_in_one_line(run_locked, args):
    process = run_locked(*args)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" not in err


def test_everything_after_the_first_two_dashes_is_the_command_s(run_locked):
    process = run_locked("k", "--timeout", "1", *python("import sys; print(sys.argv[1:])"), "--", "--timeout", "-x y")
    out, _ = process.communicate(timeout=60)
    assert out == "['--', '--timeout', '-x y']\n"


def test_the_lock_is_held_while_the_command_runs_and_shows_it(run_locked, is_busy):
    process = run_locked("backup", *python(LISTENER))
    process.stdout.readline()
    assert is_busy("backup")
    holder = db_lock("backup").holder().holder
    assert holder.split(":", 2)[1] == str(process.pid)
    assert holder.split(":", 2)[2].startswith(f"run_locked {shlex.quote(sys.executable)} -c ")
    process.communicate("end\n", timeout=60)
    assert process.returncode == 3
    assert not is_busy("backup")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_reach_the_command_and_the_key_is_kept_until_it_has_ended(run_locked, number, is_busy):
    process = run_locked("backup", *python(LISTENER), start_new_session=True)
    child = int(process.stdout.readline())
    for _ in range(3):
        process.send_signal(number)
        assert process.stdout.readline().strip() == signal.Signals(number).name
        assert process.poll() is None
        assert is_busy("backup")
    process.communicate("end\n", timeout=60)
    assert process.returncode == 3
    assert not is_busy("backup")
    # Neither running nor a zombie.
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_signal_that_comes_as_the_command_ends_leaves_its_status(run_locked, until):
    """It was meant for the command, which has ended without it."""
    process = run_locked("backup", *python(LISTENER))
    child = int(process.stdout.readline())
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state_of(process.pid) == "T")
    process.terminate()
    process.stdin.write("end\n")
    process.stdin.flush()
    until(lambda: state_of(child) == "Z")
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) == 3


def test_a_signal_while_it_waits_ends_it_and_leaves_nothing_behind(run_locked, until):
    with held_elsewhere("backup"):
        process = run_locked("backup", "--timeout", "60", *python("print('ran')"))
        until(lambda: _handles(process.pid, signal.SIGTERM), 60)
        process.terminate()
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (143, "")
    assert db_lock("backup").holder() is None


def _handles(pid, number):
    """Return whether a process has a handler for a signal."""
    (caught,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return int(caught.split()[1], 16) >> (number - 1) & 1


def test_what_is_ignored_is_ignored_by_the_command_too(run_locked, environment):
    """As with nohup."""
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    line = shlex.join(manage("run_locked", "backup", *python(code)))
    done = subprocess.run(
        ["sh", "-c", f"trap '' HUP; exec {line}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"True\n"


def test_a_ctrl_c_in_the_terminal_comes_to_the_command_once(environment, until):
    """It is in the terminal's foreground itself."""
    # By default the terminal throws away, after the signal, what the command may have said to it already.
    start = """
import termios
modes = termios.tcgetattr(0)
modes[3] |= termios.NOFLSH
termios.tcsetattr(0, termios.TCSANOW, modes)
print("parent", os.getppid(), flush=True)
"""
    code = LISTENER.replace("print(os.getpid(), flush=True)\n", start)
    # A process in between has the terminal: to fork this one, which has threads, is asking for trouble.
    terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    process = subprocess.Popen(
        [sys.executable, "-c", terminal, *manage("run_locked", "backup", *python(code))],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    seen = b""

    def read_until(pattern):
        nonlocal seen
        while not (found := re.search(pattern, seen)):
            more = process.stdout.read(1000)
            assert more, seen
            seen += more
        return found[1]

    try:
        parent = int(read_until(rb"parent (\d+)\r\n"))
        # Only after the command has had its own: two at a time would be one.
        os.kill(parent, signal.SIGSTOP)
        process.stdin.write(b"\x03")
        read_until(rb"(SIGINT)\r\n")
        os.kill(parent, signal.SIGCONT)
        # Each of its threads may have got the signal, and does something about it before it sleeps again.
        until(lambda: states_of(parent) == {"S"})
        os.kill(parent, signal.SIGTERM)
        read_until(rb"(SIGTERM)\r\n")
        assert seen.count(b"SIGINT") == 1
        process.stdin.write(b"end\n")
        assert process.wait(60) == 3
    finally:
        process.kill()
        process.communicate()


def test_a_command_whose_lock_is_lost_is_told_by_sigterm(run_locked):
    process = run_locked("backup", "--using", "brisk", *python(LISTENER))
    process.stdout.readline()
    (row,) = ResourceLock.objects.filter(pk="backup")
    call_command("clear_lock", "backup", "--yes", "--reason", "tests", stdout=io.StringIO())
    assert process.stdout.readline() == "SIGTERM\n"
    assert process.poll() is None
    _, err = process.communicate("end\n", timeout=60)
    assert process.returncode == 3
    assert f"token {row.version}" in err
    assert "Traceback" not in err


def test_a_command_that_ends_well_after_its_lock_was_lost_is_not_a_success(run_locked):
    process = run_locked("backup", "--using", "brisk", *python(LISTENER.replace("_exit(3)", "_exit(0)")))
    process.stdout.readline()
    call_command("clear_lock", "backup", "--yes", "--reason", "tests", stdout=io.StringIO())
    assert process.stdout.readline() == "SIGTERM\n"
    _, err = process.communicate("end\n", timeout=60)
    assert process.returncode == 1
    assert "'backup' was lost" in err


def test_a_command_that_ended_well_is_a_success_though_the_key_could_not_be_given_back(monkeypatch, capfd):
    """The lease runs out by itself."""

    def fail(*args, **kwargs):
        raise LockBackendError("the database is away")

    with monkeypatch.context() as patch:
        patch.setattr(backends["brisk"], "release", fail)
        call_command("run_locked", "backup", using="brisk", command=["echo", "done"])
    out, err = capfd.readouterr()
    assert out == "done\n"
    assert "the database is away" in err
    monkeypatch.setattr(backends["brisk"], "acquire", fail)
    with pytest.raises(CommandError, match="away"):
        call_command("run_locked", "backup", using="brisk", command=["echo", "done"])


def test_it_can_be_called_from_code_too(capfd):
    call_command("run_locked", "backup", command=[sys.executable, "-c", "print('called')"])
    assert capfd.readouterr().out == "called\n"
    with pytest.raises(SystemExit) as caught:
        call_command("run_locked", "backup", command=["false"])
    assert caught.value.code == 1


# The recipes.


@pytest.mark.usefixtures("memory_locks")
def test_the_job_of_the_page_runs_once(page, frozen_lock_clock):
    assert page.nightly_report() == "sent"
    assert page.nightly_report() is None
    frozen_lock_clock.tick(61)
    assert page.nightly_report() == "sent"


def test_the_console_line_of_the_page(environment, tmp_path):
    (block,) = pages.blocks("how-to/schedules", "console")
    line = block.removeprefix("$ ").strip()
    assert line.startswith("manage.py run_locked ")
    tool = tmp_path / "pg_dump"
    tool.write_text("#!/bin/sh\necho dumped $@\n")
    tool.chmod(0o755)
    done = _shell(f"{sys.executable} {line}", {**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    assert (done.returncode, done.stdout) == (0, "dumped --file=shop.sql shop\n")


def test_the_line_for_cron_runs_once_on_hosts_that_are_a_little_late(environment, tmp_path):
    """As cron runs it: by sh, with almost no environment, and no terminal."""
    (block,) = pages.blocks("how-to/schedules", "cron")
    line = block.split("app", 1)[1].split("&&", 1)[1].strip()
    line = line.replace("python manage.py sync_stock", "echo synced").replace("python", sys.executable)
    names = [name for name in environment if name.startswith(("DLOCKS", "DJANGO"))]
    bare = {name: environment[name] for name in [*names, "HOME"] if name in environment} | {"PATH": "/usr/bin:/bin"}
    first, second = _shell(line, bare), _shell(line, bare)
    assert (first.returncode, first.stdout) == (0, "synced\n")
    assert (second.returncode, second.stdout) == (75, "")
    assert _shell(line + " || [ $? -eq 75 ]", bare).returncode == 0


def _shell(line, environment):
    return subprocess.run(
        ["sh", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_tasks_for_celery(page):
    from celery import Celery

    app = Celery("tests", broker="memory://", backend="cache+memory://")
    app.conf.task_always_eager = True
    assert page.cleanup.delay().get() == "cleaned"
    assert page.cleanup.delay().get() is None
    assert page.cleanup.name.endswith(".cleanup")
    assert page.recalculate.apply(args=[7]).get() == "recalculated 7"
    with held_elsewhere("account:7"):
        # An eager task tries again at once; when it gives up it is for the lock.
        result = page.recalculate.apply(args=[7])
        assert result.status == "FAILURE"
        with pytest.raises(LockTimeout, match="account:7") as caught:
            result.get()
        assert caught.value.holder.holder == "elsewhere:1:MainThread"
    abandoned("account:8")
    assert page.recalculate.apply(args=[8]).get() == "recalculated 8"


def test_the_task_for_django_tasks(page):
    assert page.make_thumbnails.enqueue(album=7).return_value == "thumbnails of 7"
    with held_elsewhere("thumbnails:7"):
        assert page.make_thumbnails.enqueue(album=7).return_value is None
        assert page.make_thumbnails.enqueue(album=8).return_value == "thumbnails of 8"
