"""``manage.py run_locked KEY -- command args…``: run a program under a lock."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser

from dlocks.core.hold import Hold
from dlocks.core.lock import Lock
from dlocks.exceptions import LockBackendError, LockError, LockTimeout
from dlocks.management.base import add_duration, add_flag, add_using, seconds_of
from dlocks.schedules import BUSY

# Exit statuses as shells use them.
NOT_EXECUTABLE, NOT_FOUND, BY_SIGNAL = 126, 127, 128

PASSED_ON = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    if hasattr(signal, name)
)
# Signals that a terminal sends to the whole foreground process group. The command
# receives them without our help.
FROM_TERMINAL = {"SIGINT", "SIGQUIT"}


class Command(BaseCommand):
    help = (
        "Runs a command under a lock and exits with its status. The status is 75 if the"
        " lock is busy, and 128 + N if signal N ended the command. If the lock is lost,"
        " the command receives SIGTERM. With '-v 0' a busy lock prints nothing."
    )
    # The command does not depend on the checks of other apps.
    requires_system_checks = []
    stealth_options = ("command",)

    def create_parser(
        self, prog_name: str, subcommand: str, **kwargs: Any
    ) -> CommandParser:
        program = os.path.basename(prog_name)  # noqa: PTH119
        usage = f"{program} {subcommand} KEY [options] -- command [args …]"
        return super().create_parser(prog_name, subcommand, usage=usage, **kwargs)

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("key", metavar="KEY", help="The key to lock.")
        add_using(parser)
        for option, default, text in (
            ("--timeout", "0s", "How long to wait for the lock. Default: 0s."),
            ("--ttl", None, "How long the lock outlives a crash, such as 90s."),
            ("--max-hold", None, "How long the lock is held at most."),
            ("--min-hold", "0s", "How long the lock is held at least."),
        ):
            add_duration(parser, option, text, default=default)
        add_flag(
            parser,
            "--show-arguments",
            "Show the arguments of the command with the holder, not only its name.",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        # Split here, because argparse would remove the "--" of the command's own
        # arguments.
        split = argv.index("--") if "--" in argv else len(argv)
        self._command = argv[split + 1 :]
        super().run_from_argv(argv[:split])

    def handle(
        self, *args: Any, command: Sequence[str] | None = None, **options: Any
    ) -> None:
        command = list(command or getattr(self, "_command", []))
        if not command:
            raise CommandError(
                "The command is missing. Write it after '--': run_locked KEY -- command"
            )
        child = _Child(command)
        entered = False
        status = None
        try:
            with child.listening(), self._lock(child, options) as hold:
                entered = True
                # This process may have been paused since.
                hold.check()
                status = child.run()
        except LockTimeout as error:
            if entered:
                raise
            if options["verbosity"] == 0:
                # Cron would mail the message.
                sys.exit(BUSY)
            raise CommandError(str(error), returncode=BUSY) from error
        except LockBackendError as error:
            if status is None:
                raise CommandError(str(error)) from error
            # The command has ended in any case, and the lease will expire.
            self.stderr.write(self.style.WARNING(str(error)))
        except LockError as error:
            # The lock was lost, so the run is no success, whatever the command's own
            # status is.
            raise CommandError(str(error), returncode=status or 1) from error
        except (ImproperlyConfigured, RuntimeError, TypeError, ValueError) as error:
            # A backend refuses, for example, a key that is too long with its prefix.
            if entered:
                raise
            raise CommandError(str(error)) from error
        except OSError as error:
            raise CommandError(
                f"{command[0]!r} could not be run: {error.strerror}",
                returncode=(
                    NOT_FOUND
                    if isinstance(error, FileNotFoundError)
                    else NOT_EXECUTABLE
                ),
            ) from error
        if status:
            sys.exit(status)

    def _lock(self, child: _Child, options: dict[str, Any]) -> Lock:
        # The arguments may contain passwords.
        command = child.command
        shown = command if options["show_arguments"] else [Path(command[0]).name]
        policy = {name: options[name] for name in ("timeout", "max_hold", "min_hold")}
        if options["ttl"] is not None:
            policy["ttl"] = options["ttl"]
        for name, duration in policy.items():
            if duration is not None:
                policy[name] = seconds_of(f"--{name.replace('_', '-')}", duration)
        return Lock(
            key=options["key"],
            using=options["using"],
            scope="lease",
            release_at="exit",
            on_lost=child.lost,
            note=f"run_locked {shlex.join(shown)}",
            **policy,
        )


class _Child:
    """The child process, and the signals for it."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self._process: subprocess.Popen[bytes] | None = None
        # Whether a signal is meant for the command rather than for this process alone.
        self._runs = False
        # Signal handlers and the keeper append to it. A deque needs no lock, for which
        # either would have to wait.
        self._signals: deque[int] = deque()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch signals that this process does not ignore.

        The command must ignore the others as well.
        """
        before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in PASSED_ON:
                if signal.getsignal(number) not in {signal.SIG_IGN, None}:
                    before[number] = signal.signal(number, self._caught)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def run(self) -> int:
        """Run the command, and return its exit status as shells report it."""
        self._runs = True
        try:
            # The command runs in this process group, so that it can use the terminal.
            with subprocess.Popen(self.command) as self._process:  # noqa: S603 (the command of the caller)
                try:
                    self._pass_on()
                    # A signal that arrives just before a wait is handled after it.
                    while True:
                        if self._process.poll() is not None:
                            break
                        with suppress(subprocess.TimeoutExpired):
                            self._process.wait(0.5)
                except BaseException:
                    # The command must not run without the lock.
                    with suppress(OSError):
                        self._process.kill()
                    raise
        finally:
            # Reset only now. A signal sent to another thread before the end of the
            # command is handled when this thread continues.
            self._runs = False
        status = self._process.returncode
        return BY_SIGNAL - status if status < 0 else status

    def lost(self, hold: Hold) -> None:
        self._signals.append(signal.SIGTERM)
        self._pass_on()

    def _caught(self, number: int, frame: object) -> None:
        if not self._runs:
            # The command has not started yet, or has ended. The signal interrupts
            # acquiring or releasing the lock.
            sys.exit(BY_SIGNAL + number)
        if signal.Signals(number).name in FROM_TERMINAL and _in_foreground():
            return
        self._signals.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._process is not None and self._signals:
            # The other thread may have taken the last signal. The command may have
            # ended, or run as another user.
            with suppress(IndexError, OSError):
                self._process.send_signal(self._signals.popleft())


def _in_foreground() -> bool:
    """Return whether this process is in the foreground of its terminal.

    If so, the command has received a Ctrl-C itself.
    """
    if not hasattr(os, "tcgetpgrp"):
        # On Windows, Ctrl-C is sent to all processes of the console.
        return True
    try:
        with Path(os.ctermid()).open("rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
