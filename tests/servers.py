"""Throwaway database servers: own data, free port, nothing of the machine's touched; gone when their starter is."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

START_SECONDS = 60.0


class Server:
    """One server. ``environment`` is what tests/settings.py needs to find it."""

    engine: str
    accounts: tuple[str, ...]
    stop_signal: signal.Signals
    crash_signal = signal.SIGKILL

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"dlocks-{self.engine}-"))
        self.data = self.directory / "data"
        self.log = self.directory / "log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        # Neither server runs as root.
        self.account = next((name for name in self.accounts if _exists(name)), None) if os.geteuid() == 0 else None
        if self.account is not None:
            shutil.chown(self.directory, self.account)
        self.data.mkdir()
        if self.account is not None:
            shutil.chown(self.data, self.account)

    @property
    def environment(self) -> dict[str, str]:
        return {"DLOCKS_TEST_ENGINE": self.engine, "DLOCKS_TEST_PORT": str(self.port)}

    def __enter__(self) -> Self:
        try:
            self.initialize()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def initialize(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def start(self, **environment: str) -> None:
        self.process = self._spawn(self.command(), **environment)
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.engine} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._end(self.stop_signal)

    def crash(self) -> None:
        """End it as a power cut would."""
        self._end(self.crash_signal)

    def restart(self) -> None:
        self.stop()
        self.start()

    def run(self, command: list[str]) -> None:
        """Run a tool to its end, as the server's account."""
        process = self._spawn(command)
        if process.wait(START_SECONDS) != 0:
            raise RuntimeError(f"{command[0]} failed:\n{self.log.read_text(errors='replace')[-3000:]}")

    def _end(self, number: signal.Signals) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self.process = None

    def _spawn(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": str(self.directory), **environment},
                user=self.account,
                group=pwd.getpwnam(self.account).pw_gid if self.account else None,
                extra_groups=[] if self.account else None,
                # A group of its own, so that Ctrl-C in a terminal reaches the tests first.
                start_new_session=True,
                preexec_fn=lambda: _die_with_parent(self.stop_signal),
            )


class PostgreSQL(Server):
    engine = "postgresql"
    accounts = ("postgres", "nobody")
    stop_signal = signal.SIGINT
    crash_signal = signal.SIGQUIT

    def initialize(self) -> None:
        self.run(
            [str(self._tool("initdb")), "-D", str(self.data), "-U", "dlocks", "-A", "trust", "-E", "UTF8", "--no-sync",
             "--locale=C.UTF-8"]
        )  # fmt: skip

    def command(self) -> list[str]:
        # A zone that is not UTC, and no flush to disk: a crash of the server is tested here, not one of the machine.
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "max_connections": 200,
            "timezone": "Asia/Kolkata",
            "log_min_messages": "fatal",
            "log_min_error_statement": "panic",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self._tool("postgres")), "-D", str(self.data), *options]

    def is_ready(self) -> bool:
        import psycopg

        try:
            psycopg.connect(
                host="127.0.0.1", port=self.port, user="dlocks", dbname="postgres", connect_timeout=3
            ).close()
        except psycopg.OperationalError:
            return False
        return True

    @staticmethod
    def _tool(name: str) -> Path:
        found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
        if found:
            return found[-1]
        path = shutil.which(name)
        if path is None:
            raise FileNotFoundError(f"{name} is not installed: apt-get install postgresql")
        return Path(path)


class MariaDB(Server):
    engine = "mariadb"
    accounts = ("mysql", "nobody")
    stop_signal = signal.SIGTERM

    def initialize(self) -> None:
        install = shutil.which("mariadb-install-db", path=_SYSTEM_PATH)
        if install is None:
            raise FileNotFoundError("mariadb-install-db is not installed: apt-get install mariadb-server")
        self.run(
            [install, "--no-defaults", f"--datadir={self.data}", "--auth-root-authentication-method=normal",
             "--skip-test-db", "--skip-name-resolve"]
        )  # fmt: skip

    def command(self) -> list[str]:
        server = shutil.which("mariadbd", path=_SYSTEM_PATH) or "mariadbd"
        return [
            server, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}", "--bind-address=127.0.0.1",
            f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid", "--skip-name-resolve",
            "--innodb-flush-log-at-trx-commit=2", "--default-time-zone=+05:30", "--max-connections=200",
            "--innodb-buffer-pool-size=256M", "--character-set-server=utf8mb4",
        ]  # fmt: skip

    def is_ready(self) -> bool:
        import MySQLdb

        try:
            MySQLdb.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=3).close()
        except MySQLdb.OperationalError:
            return False
        return True


_SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"

SERVERS: dict[str, type[Server]] = {"postgresql": PostgreSQL, "mariadb": MariaDB}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _exists(account: str) -> bool:
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


def _die_with_parent(number: signal.Signals) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number))
