"""Throwaway database servers: own data, free port, nothing of the machine's touched; gone when their starter is."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

START_SECONDS = 60.0


class Server:
    """One server. ``environment`` is what tests/settings.py needs to find it."""

    engine: str
    accounts: tuple[str, ...]
    stop_signal: signal.Signals
    crash_signal = signal.SIGKILL
    # What it is started with besides.
    environment_of_its_own: Mapping[str, str] = {}

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
        give_back(self.port)
        shutil.rmtree(self.directory, ignore_errors=True)

    def initialize(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def start(self, **environment: str) -> None:
        self.process = self._spawn(self.command(), **self.environment_of_its_own, **environment)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
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
                env={
                    "PATH": os.environ["PATH"],
                    "LC_ALL": "C.UTF-8",
                    "HOME": str(self.directory),
                    # A MariaDB that starts deletes the temporary tables that others have in a directory they share.
                    "TMPDIR": str(self.directory),
                    **environment,
                },
                user=self.account,
                group=pwd.getpwnam(self.account).pw_gid if self.account else None,
                extra_groups=[] if self.account else None,
                # A group of its own, so that Ctrl-C in a terminal reaches the tests first.
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(self.stop_signal),
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
        return answers(self.port)

    def execute(self, sql: str) -> Any:
        """Return the rows of a statement."""
        import psycopg

        with psycopg.connect(
            host="127.0.0.1", port=self.port, user="dlocks", dbname="postgres", autocommit=True
        ) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    @staticmethod
    def _tool(name: str) -> Path:
        found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[4]))
        if found:
            return found[-1]
        path = shutil.which(name)
        if path is None:
            raise FileNotFoundError(f"{name} is not installed: apt-get install postgresql")
        return Path(path)


class Standby(PostgreSQL):
    """A copy of a PostgreSQL on ``port``, from where it is sent what is written; it can become one of its own."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.primary = port

    def initialize(self) -> None:
        self.data.rmdir()
        self.run(
            [str(self._tool("pg_basebackup")), "-h", "127.0.0.1", "-p", str(self.primary), "-U", "dlocks", "-D",
             str(self.data), "--write-recovery-conf", "--checkpoint=fast", "--no-sync"]
        )  # fmt: skip

    def promote(self) -> None:
        self.execute("SELECT pg_promote()")


class PgBouncer(Server):
    """A pooler before a PostgreSQL on ``behind``: by ``mode`` each transaction, or each client, has a session."""

    engine = "pgbouncer"
    accounts = ("postgres", "nobody")
    stop_signal = signal.SIGTERM

    def __init__(self, behind: int, *, sessions: int = 20, mode: str = "transaction") -> None:
        super().__init__()
        self.behind = behind
        self.sessions = sessions
        self.mode = mode

    @property
    def environment(self) -> dict[str, str]:
        return {"DLOCKS_TEST_ENGINE": "postgresql", "DLOCKS_TEST_PORT": str(self.port)}

    def initialize(self) -> None:
        (self.directory / "users").write_text('"dlocks" ""\n')
        (self.directory / "pgbouncer.ini").write_text(
            f"""
            [databases]
            * = host=127.0.0.1 port={self.behind}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = trust
            auth_file = {self.directory}/users
            pool_mode = {self.mode}
            default_pool_size = {self.sessions}
            max_client_conn = 500
            """.replace("\n            ", "\n")
        )

    def command(self) -> list[str]:
        pooler = shutil.which("pgbouncer", path=_SYSTEM_PATH)
        if pooler is None:
            raise FileNotFoundError("pgbouncer is not installed: apt-get install pgbouncer")
        return [pooler, "-q", str(self.directory / "pgbouncer.ini")]

    def is_ready(self) -> bool:
        return answers(self.port)


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

    # More words for its command line.
    options: tuple[str, ...] = ()

    def command(self) -> list[str]:
        server = shutil.which("mariadbd", path=_SYSTEM_PATH) or "mariadbd"
        return [
            server, "--no-defaults", f"--datadir={self.data}", f"--port={self.port}", "--bind-address=127.0.0.1",
            # Its own: a server that starts removes the temporary files of the others from the usual one.
            f"--tmpdir={self.directory}",
            f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid", "--skip-name-resolve",
            "--innodb-flush-log-at-trx-commit=2", "--default-time-zone=+05:30", "--max-connections=200",
            "--innodb-buffer-pool-size=256M", "--character-set-server=utf8mb4",
            # By default a DROP waits a day for a transaction that has seen the table.
            "--lock-wait-timeout=60", *self.options,
        ]  # fmt: skip

    def is_ready(self) -> bool:
        import MySQLdb

        try:
            MySQLdb.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=3).close()
        except MySQLdb.OperationalError:
            return False
        return True


class GaleraNode(MariaDB):
    """
    One server of a Galera cluster.

    It begins with a copy of the data of the first and is sent only what was written since: for that no tools are
    needed but a script that tells a node where it stands.
    """

    provider = "/usr/lib/galera/libgalera_smm.so"
    # Sooner than by default, a node of which nothing is heard is taken for lost.
    patience: ClassVar[dict[str, str]] = {
        "evs.keepalive_period": "PT0.5S",
        "evs.suspect_timeout": "PT3S",
        "evs.inactive_timeout": "PT6S",
        "evs.install_timeout": "PT6S",
    }

    def __init__(self, first: GaleraNode | None = None, **environment: str) -> None:
        super().__init__()
        self.first = first
        self.group, self.transfer = free_port(), free_port()
        self.environment_of_its_own = {"PATH": f"{self.directory}:{os.environ['PATH']}", **environment}
        # Whom it asks to be let in; nobody: it is a cluster of one.
        self.members: list[GaleraNode] = [] if first is None else [first]
        self.position: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {**super().environment, "DLOCKS_TEST_NAME": "dlocks"}

    def initialize(self) -> None:
        if not Path(self.provider).exists():
            raise FileNotFoundError("Galera is not installed: apt-get install galera-4")
        script = self.directory / "wsrep_sst_position"
        script.write_text(_POSITION)
        script.chmod(0o755)
        if self.first is not None:
            self.data.rmdir()
            self.run(["cp", "-a", str(self.first.directory / "copy"), str(self.data)])
            return
        super().initialize()
        (self.data / "grastate.dat").write_text(
            f"# GALERA saved state\nversion: 2.1\nuuid: {uuid.uuid4()}\nseqno: 0\nsafe_to_bootstrap: 1\n"
        )
        if self.account is not None:
            shutil.chown(self.data / "grastate.dat", self.account)
        # Only once it has been in a cluster, the data say where in its history they are.
        self.start()
        self.execute("CREATE DATABASE dlocks CHARACTER SET utf8mb4")
        self.stop()
        self.run(["cp", "-a", str(self.data), str(self.directory / "copy")])

    def command(self) -> list[str]:
        settings = {
            **self.patience,
            "base_host": "127.0.0.1",
            "base_port": self.group,
            "gmcast.listen_addr": f"tcp://127.0.0.1:{self.group}",
            "ist.recv_addr": f"127.0.0.1:{self.transfer}",
            "gcache.size": "16M",
            "pc.recovery": "FALSE",
        }
        members = ",".join(f"127.0.0.1:{member.group}" for member in self.members)
        self.options = (
            "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M", "--performance-schema=OFF",
            "--binlog-format=ROW", "--innodb-autoinc-lock-mode=2", "--wsrep-on=ON", "--wsrep-slave-threads=4",
            f"--wsrep-provider={self.provider}", "--wsrep-cluster-name=dlocks", "--wsrep-node-address=127.0.0.1",
            f"--wsrep-cluster-address=gcomm://{members}", "--wsrep-sst-method=position",
            f"--wsrep-provider-options={';'.join(f'{name}={value}' for name, value in settings.items())}",
            *(["--wsrep-new-cluster"] if not members else []),
            *([f"--wsrep-start-position={self.position}"] if self.position else []),
        )  # fmt: skip
        return super().command()

    def is_ready(self) -> bool:
        return self.status("wsrep_ready") == "ON" and self.status("wsrep_local_state_comment") == "Synced"

    def come_back(self, *members: GaleraNode) -> None:
        """Start again after a crash, and be let in by members that are there."""
        self.run([*self.command(), "--wsrep-recover"])
        *_, self.position = re.findall(r"Recovered position: ?(\S+)", self.log.read_text(errors="replace"))
        self.members = list(members)
        self.start()

    def catch_up(self) -> None:
        """Wait until it has what the others have written."""
        self.execute("SET STATEMENT wsrep_sync_wait = 15 FOR SELECT 1")

    def status(self, name: str) -> str | None:
        """Return one of the things that the node says about itself; None when it is not to be reached."""
        import MySQLdb

        try:
            ((_, value),) = self.execute(f"SHOW GLOBAL STATUS LIKE '{name}'")
        except (MySQLdb.Error, ValueError):
            return None
        return str(value)

    def execute(self, sql: str) -> Any:
        import MySQLdb

        connection = MySQLdb.connect(host="127.0.0.1", port=self.port, user="root", connect_timeout=3, autocommit=True)
        try:
            cursor = connection.cursor()
            cursor.execute(sql)
            return cursor.fetchall()
        finally:
            connection.close()

    def __exit__(self, *exc: object) -> None:
        # Nothing of it is needed any more.
        if self.process is not None:
            self.crash()
        give_back(self.group, self.transfer)
        super().__exit__()


# What a node is sent when it joins is its own position: the donor then sends what was written since. A node that would
# need all the data is refused.
_POSITION = """#!/bin/sh
role= address= data= gtid= bypass=
while [ $# -gt 0 ]; do
    case $1 in
    --role) role=$2; shift ;;
    --address) address=$2; shift ;;
    --datadir) data=${2%/}; shift ;;
    --gtid) gtid=$2; shift ;;
    --bypass) bypass=yes ;;
    esac
    shift
done
case $role in
joiner)
    rm -f "$data/position"
    echo "ready 127.0.0.1:1$data/position"
    until [ -s "$data/position" ]; do sleep 0.05; done
    cat "$data/position"
    ;;
donor)
    [ -n "$bypass" ] || exit 125
    echo continue
    file=/${address#*/}
    echo "$gtid" >"$file.new"
    mv "$file.new" "$file"
    echo "done $gtid"
    ;;
esac
"""


class Galera:
    """A cluster of three nodes."""

    def __init__(self, *environments: dict[str, str]) -> None:
        self._stack = contextlib.ExitStack()
        self._environments = [*environments, *({} for _ in range(3 - len(environments)))]

    def __enter__(self) -> Self:
        with self._stack as stack:
            first = stack.enter_context(GaleraNode(**self._environments[0]))
            # One after another: each lets the next one in.
            others = [stack.enter_context(GaleraNode(first, **one)) for one in self._environments[1:]]
            self._stack = stack.pop_all()
        self.nodes = [first, *others]
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


class Redis(Server):
    engine = "redis"
    accounts = ("redis", "nobody")
    stop_signal = signal.SIGTERM
    # Nothing survives a restart, unless told otherwise.
    settings: ClassVar[dict[str, str]] = {"appendonly": "no"}

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.options = {**self.settings, **settings}

    def initialize(self) -> None:
        server = shutil.which("redis-server", path=_SYSTEM_PATH)
        if server is None:
            # The same binary, which looks at the name that it was called by.
            tool = shutil.which("redis-check-rdb", path=_SYSTEM_PATH)
            if tool is None:
                raise FileNotFoundError("redis-server is not installed: apt-get install redis-tools")
            server = str(self.directory / "redis-server")
            Path(server).symlink_to(tool)
        self.server = server

    def command(self) -> list[str]:
        settings = {"port": self.port, "bind": "127.0.0.1", "dir": self.data, "save": "", **self.options}
        return [self.server, *(word for name, value in settings.items() for word in (f"--{name}", str(value)))]

    def is_ready(self) -> bool:
        # One that wants a password first is there too.
        return asked(self.port, b"PING\r\n").startswith((b"+PONG", b"-NOAUTH"))


class Sentinel(Redis):
    """Watches over a Redis on ``watched``, and makes a replica of it the master when it is gone."""

    engine = "sentinel"

    def __init__(self, watched: int, **settings: object) -> None:
        super().__init__(**settings)
        self.watched = watched

    def initialize(self) -> None:
        super().initialize()
        self.file = self.directory / "sentinel.conf"
        self.file.write_text(
            "".join(f"{name} {value}\n" for name, value in self.options.items() if name != "appendonly")
            + f"port {self.port}\nbind 127.0.0.1\ndir {self.data}\n"
            f"sentinel monitor dlocks 127.0.0.1 {self.watched} 1\n"
            # Long enough that a machine which stands still for a moment is not taken for a master that died.
            "sentinel down-after-milliseconds dlocks 3000\nsentinel failover-timeout dlocks 2000\n"
        )
        if self.account is not None:
            shutil.chown(self.file, self.account)

    def command(self) -> list[str]:
        return [self.server, str(self.file), "--sentinel"]


class ZooKeeper(Server):
    engine = "zookeeper"
    accounts = ("zookeeper", "nobody")
    stop_signal = signal.SIGTERM
    main = "ZooKeeperServerMain"

    def __init__(self, *, java: Sequence[str] = (), **settings: object) -> None:
        super().__init__()
        self.java = ["-Xmx512m", *java]
        self.settings = settings

    def initialize(self) -> None:
        if not Path(_ZOOKEEPER).exists() or shutil.which("java") is None:
            raise FileNotFoundError(
                "ZooKeeper is not installed: apt-get install libzookeeper-java default-jre-headless"
            )
        text = "".join(f"{name}={value}\n" for name, value in self.configuration().items())
        (self.directory / "zoo.cfg").write_text(text)
        (self.directory / "log4j.properties").write_text("log4j.rootLogger=OFF\n")

    def configuration(self) -> dict[str, object]:
        return {
            "dataDir": self.data,
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "tickTime": 2000,
            # As many clients of one address as the others take.
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "srvr,mntr",
            **self.settings,
        }

    def command(self) -> list[str]:
        return [
            "java", "-cp", f"{self.directory}:{_ZOOKEEPER}", *self.java,
            f"org.apache.zookeeper.server.{self.main}", str(self.directory / "zoo.cfg"),
        ]  # fmt: skip

    def is_ready(self) -> bool:
        return b"Mode: " in asked(self.port, b"srvr")


# Sessions of a ZooKeeper that end soon; nothing is flushed to disk, since no machine crashes here.
BRISK: dict[str, Any] = {
    "java": ("-Xmx128m", "-Dzookeeper.forceSync=no", "-Dznode.container.checkIntervalMs=300"),
    "tickTime": 200,
    "maxSessionTimeout": 60000,
}


class ZooKeeperMember(ZooKeeper):
    """One of the servers of an ensemble."""

    main = "quorum.QuorumPeerMain"
    number: int

    def initialize(self) -> None:
        super().initialize()
        (self.data / "myid").write_text(str(self.number))
        if self.account is not None:
            shutil.chown(self.data / "myid", self.account)

    @classmethod
    @contextlib.contextmanager
    def ensemble(cls, number: int = 3) -> Iterator[list[ZooKeeperMember]]:
        """Start so many servers together, since none is ready without the others."""
        settings: dict[str, Any] = {**BRISK, "initLimit": 50, "syncLimit": 10}
        with contextlib.ExitStack() as stack:
            for one in range(1, number + 1):
                ports = free_port(), free_port()
                stack.callback(give_back, *ports)
                settings[f"server.{one}"] = "127.0.0.1:{}:{}".format(*ports)
            members = [cls(**settings) for _ in range(number)]
            for one, member in enumerate(members):
                stack.callback(member.__exit__)
                member.number = one + 1
                member.initialize()
                member.process = member._spawn(member.command())
            for member in members:
                member.wait_until_ready()
            yield members


_ZOOKEEPER = "/usr/share/java/zookeeper.jar"
_SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/sbin"

SERVERS: dict[str, type[Server]] = {"postgresql": PostgreSQL, "mariadb": MariaDB}


def free_port() -> int:
    """
    Return a port that nobody else is given until ``give_back()``, or the end of this process.

    A socket is bound to it that never listens. So the system has it neither for those who ask for any port, nor for
    those who connect from any; but a server that reuses addresses, as all of these do, listens on it all the same, and
    again after a restart.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    _given[port] = probe
    return port


def give_back(*ports: int) -> None:
    for port in ports:
        if (probe := _given.pop(port, None)) is not None:
            probe.close()


_given: dict[int, socket.socket] = {}
# An interpreter warns of sockets that it finds open at its end.
atexit.register(lambda: give_back(*_given))


def answers(port: int) -> bool:
    """Return whether a PostgreSQL, or what passes for one, is to be reached."""
    import psycopg

    try:
        psycopg.connect(host="127.0.0.1", port=port, user="dlocks", dbname="postgres", connect_timeout=3).close()
    except psycopg.OperationalError:
        return False
    return True


def asked(port: int, request: bytes) -> bytes:
    """Return the beginning of what a server says to a request, or nothing when it is not there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
        connection.settimeout(3)
        connection.sendall(request)
        return connection.recv(4096)
    return b""


def _exists(account: str) -> bool:
    try:
        pwd.getpwnam(account)
    except KeyError:
        return False
    return True


def die_with_parent(number: signal.Signals) -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number))
