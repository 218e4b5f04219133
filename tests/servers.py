"""Throwaway database servers with their own data, on a free port.

They touch nothing else on the machine, and they end together with the process that
started them. All of them but ZooKeeper, which writes no files and runs no programs for
its clients, ask for the password of the run.
"""

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
# The directory in which scripts/fetch_server.sh puts the servers that Debian does not
# package.
FETCHED = Path(__file__).resolve().parent.parent / ".servers"
# Whether to use the newest PostgreSQL and MariaDB instead of Debian's.
USE_NEWEST = os.environ.get("DLOCKS_TEST_SERVERS") == "newest"
# The password of all servers of a run. Without one, each user of the machine could run
# programs as the account of a server (COPY TO PROGRAM). The processes of the tests
# inherit it in their environment. It must not be on a command line, which every user
# can read. The module ``secrets`` would load OpenSSL before Oracle's client library
# loads a newer one (scripts/test_libmysqlclient.sh).
PASSWORD = os.environ.setdefault("DLOCKS_TEST_PASSWORD", os.urandom(16).hex())
# libpq and the client libraries of MySQL use these for a connection without a password.
os.environ["PGPASSWORD"] = os.environ["MYSQL_PWD"] = PASSWORD
# What the programs of MariaDB and MySQL say of an incomplete event in a binary log.
INCOMPLETE_EVENT = re.compile("truncated|empty file|reading the header")


def place_of(server: str) -> Path:
    """Return the directory into which scripts/fetch_server.sh has unpacked a server.

    It is elsewhere if the account of the server cannot enter this project, as in the
    home directory of root.
    """
    return (FETCHED / server).resolve()


class Server:
    """One server. tests/settings.py finds it through ``environment``."""

    engine: str
    accounts: tuple[str, ...]
    stop_signal: signal.Signals
    crash_signal = signal.SIGKILL
    # Additional environment variables of the server's process.
    environment_of_its_own: Mapping[str, str] = {}
    # Whether later servers copy the first one's initialized data, which takes less
    # processor time.
    copies_data = False

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix=f"dlocks-{self.engine}-"))
        self.data = self.directory / "data"
        self.log = self.directory / "log"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        # Servers do not run as root.
        self.account = (
            next((name for name in self.accounts if _exists(name)), None)
            if os.geteuid() == 0
            else None
        )
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
            if self.copies_data:
                self._copy_initialized_data()
            else:
                self.initialize()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    @classmethod
    def prepare(cls) -> None:
        """Initialize the data that the servers of this class copy.

        The servers of child processes copy it too.
        """
        name = cls._variable()
        if cls.copies_data and name not in os.environ:
            first = cls()
            atexit.register(first.__exit__)
            first.initialize()
            os.environ[name] = str(first.data)

    @classmethod
    def _variable(cls) -> str:
        return f"DLOCKS_TEST_DATA_{cls.__name__}"

    def _copy_initialized_data(self) -> None:
        self.prepare()
        self.data.rmdir()
        source = os.environ[self._variable()]
        subprocess.run(["cp", "-a", source, self.data], check=True)

    def __exit__(self, *exc: object) -> None:
        if self.process is not None:
            self.stop()
        release_port(self.port)
        shutil.rmtree(self.directory, ignore_errors=True)

    def initialize(self) -> None:
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        raise NotImplementedError

    def execute(self, sql: str) -> Any:
        """Return the rows of a statement, which is committed."""
        raise NotImplementedError

    def start(self, **environment: str) -> None:
        self.process = self._spawn(
            self.command(), **self.environment_of_its_own, **environment
        )
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self.is_ready():
            if (
                self.process is None
                or self.process.poll() is not None
                or time.monotonic() > deadline
            ):
                raise RuntimeError(
                    f"{self.engine} did not"
                    f" start:\n{self.log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.05)

    def stop(self) -> None:
        self._end(self.stop_signal)

    def crash(self) -> None:
        """End the server as a power cut would."""
        self._end(self.crash_signal)

    def restart(self) -> None:
        self.stop()
        self.start()

    def run(self, command: list[str], **environment: str) -> None:
        """Run a tool to its end, as the server's account."""
        process = self._spawn(command, **environment)
        if process.wait(START_SECONDS) != 0:
            raise RuntimeError(
                f"{command[0]} failed:\n{self.log.read_text(errors='replace')[-3000:]}"
            )

    def write_secret(self, name: str, text: str) -> Path:
        """Write a file that only the server's account can read, and return its path."""
        path = self.directory / name
        path.touch(mode=0o600)
        path.write_text(text)
        if self.account is not None:
            shutil.chown(path, self.account)
        return path

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
                    # A MariaDB that starts deletes the temporary tables of other
                    # servers that use the same directory.
                    "TMPDIR": str(self.directory),
                    **environment,
                },
                user=self.account,
                group=pwd.getpwnam(self.account).pw_gid if self.account else None,
                extra_groups=[] if self.account else None,
                # In a session of its own, the server does not receive Ctrl-C from a
                # terminal before the tests do.
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(self.stop_signal),
            )


class PostgreSQL(Server):
    engine = "postgresql"
    copies_data = True
    accounts = ("postgres", "nobody")
    stop_signal = signal.SIGINT
    crash_signal = signal.SIGQUIT

    def initialize(self) -> None:
        # The tests open thousands of connections. SCRAM takes milliseconds for each.
        password = self.write_secret("password", PASSWORD)
        self.run(
            [str(self._tool("initdb")), "-D", str(self.data), "-U", "dlocks", "-A",
            "md5", f"--pwfile={password}", "-E", "UTF8", "--no-sync",
             "--locale=C.UTF-8"]
        )  # fmt: skip

    def command(self) -> list[str]:
        # The time zone is not UTC. Nothing is flushed to disk, since only crashes of
        # the server are tested, not of the machine.
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
        options = [
            word
            for name, value in settings.items()
            for word in ("-c", f"{name}={value}")
        ]
        return [str(self._tool("postgres")), "-D", str(self.data), *options]

    def is_ready(self) -> bool:
        return answers(self.port)

    def execute(self, sql: str) -> Any:
        import psycopg

        with psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user="dlocks",
            dbname="postgres",
            autocommit=True,
        ) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []

    @staticmethod
    def _tool(name: str) -> Path:
        if USE_NEWEST:
            return fetched("postgresql", name)
        found = sorted(
            Path("/usr/lib/postgresql").glob(f"*/bin/{name}"),
            key=lambda path: int(path.parts[4]),
        )
        if found:
            return found[-1]
        path = shutil.which(name)
        if path is None:
            raise FileNotFoundError(
                f"{name} is not installed: apt-get install postgresql"
            )
        return Path(path)


class Standby(PostgreSQL):
    """A standby of the PostgreSQL on ``port``. It can be promoted to a primary."""

    copies_data = False

    def __init__(self, port: int) -> None:
        super().__init__()
        self.primary = port

    def initialize(self) -> None:
        self.data.rmdir()
        self.run(
            [str(self._tool("pg_basebackup")), "-h", "127.0.0.1", "-p",
            str(self.primary), "-U", "dlocks", "-D",
             str(self.data), "--write-recovery-conf", "--checkpoint=fast", "--no-sync"],
            PGPASSWORD=PASSWORD,
        )  # fmt: skip

    def promote(self) -> None:
        self.execute("SELECT pg_promote()")


class PgBouncer(Server):
    """A PgBouncer in front of the PostgreSQL on ``behind``.

    ``mode`` is PgBouncer's pool mode. A session belongs to one transaction, or to one
    client.
    """

    engine = "pgbouncer"
    accounts = ("postgres", "nobody")
    stop_signal = signal.SIGTERM

    def __init__(
        self, behind: int, *, sessions: int = 20, mode: str = "transaction"
    ) -> None:
        super().__init__()
        self.behind = behind
        self.sessions = sessions
        self.mode = mode

    @property
    def environment(self) -> dict[str, str]:
        return {"DLOCKS_TEST_ENGINE": "postgresql", "DLOCKS_TEST_PORT": str(self.port)}

    def initialize(self) -> None:
        users = self.write_secret("users", f'"dlocks" "{PASSWORD}"\n')
        (self.directory / "pgbouncer.ini").write_text(
            f"""
            [databases]
            * = host=127.0.0.1 port={self.behind}
            [pgbouncer]
            listen_addr = 127.0.0.1
            listen_port = {self.port}
            unix_socket_dir =
            auth_type = md5
            auth_file = {users}
            pool_mode = {self.mode}
            default_pool_size = {self.sessions}
            max_client_conn = 500
            """.replace("\n            ", "\n")
        )

    def command(self) -> list[str]:
        pooler = shutil.which("pgbouncer", path=_SYSTEM_PATH)
        if pooler is None:
            raise FileNotFoundError(
                "pgbouncer is not installed: apt-get install pgbouncer"
            )
        return [pooler, "-q", str(self.directory / "pgbouncer.ini")]

    def is_ready(self) -> bool:
        return answers(self.port)


class MariaDB(Server):
    engine = "mariadb"
    copies_data = True
    accounts = ("mysql", "nobody")
    stop_signal = signal.SIGTERM
    program = "mariadbd"
    binary_log_reader = "mariadb-binlog"
    # The directory of an unpacked server, or None for the installed one.
    unpacked: ClassVar[Path | None] = place_of("mariadb") if USE_NEWEST else None
    # Additional command line options.
    options: tuple[str, ...] = ()

    def initialize(self) -> None:
        install = [self._tool("mariadb-install-db"), "--no-defaults"]
        if self.unpacked is not None:
            install.append(f"--basedir={self.unpacked}/usr")
        # The tables of accounts are not in use yet, so ALTER USER would be refused.
        secret = self.write_secret(
            "password.sql",
            "UPDATE mysql.global_priv SET priv = JSON_SET(priv, '$.plugin',"
            " 'mysql_native_password', '$.authentication_string',"
            f" PASSWORD('{PASSWORD}')) WHERE user = 'root';\n",
        )
        self.run(
            [*install, f"--datadir={self.data}",
            "--auth-root-authentication-method=normal", "--skip-test-db",
             "--skip-name-resolve", f"--extra-file={secret}"]
        )  # fmt: skip

    def command(self) -> list[str]:
        places = []
        if self.unpacked is not None:
            root = self.unpacked / "usr"
            messages = root / "share" / self.engine
            places = [
                f"--basedir={root}",
                f"--plugin-dir={root}/lib/mysql/plugin",
                f"--lc-messages-dir={messages}",
            ]
        return [
            self._tool(self.program), "--no-defaults", *places,
                f"--datadir={self.data}",
            f"--port={self.port}", "--bind-address=127.0.0.1",
            # Each server has its own. A server that starts removes the temporary files
            # of other servers in a common directory.
            f"--tmpdir={self.directory}",
            f"--socket={self.directory}/socket", f"--pid-file={self.directory}/pid",
            "--skip-name-resolve",
            "--innodb-flush-log-at-trx-commit=2", "--default-time-zone=+05:30",
            "--max-connections=200",
            "--innodb-buffer-pool-size=256M", "--character-set-server=utf8mb4",
            # By default, DROP waits for a day for a transaction that has read the
            # table.
            "--lock-wait-timeout=60", *self.options,
        ]  # fmt: skip

    def is_ready(self) -> bool:
        import MySQLdb

        try:
            self.connect().close()
        except MySQLdb.OperationalError:
            return False
        return True

    def connect(self) -> Any:
        """Return a connection of root, which commits each statement."""
        import MySQLdb

        return MySQLdb.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            connect_timeout=3,
            autocommit=True,
        )

    def execute(self, sql: str) -> Any:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(sql)
            return cursor.fetchall()

    def read_binary_log(self, *files: str) -> str:
        """Return the row changes in binary log files as text.

        A server that was killed may leave an incomplete event at the end of a file,
        even the first one, whose change was not committed. The program stops there, so
        it reads each file by itself.
        """
        changes = []
        for file in files:
            command = [
                self._tool(self.binary_log_reader),
                "--base64-output=decode-rows",
                "--verbose",
                file,
            ]
            read = subprocess.run(command, capture_output=True, text=True)
            if read.returncode and not INCOMPLETE_EVENT.search(read.stderr):
                read.check_returncode()
            changes.append(read.stdout)
        return "".join(changes)

    def _tool(self, name: str) -> str:
        if self.unpacked is not None:
            return str(fetched(self.unpacked.name, name))
        path = shutil.which(name, path=_SYSTEM_PATH)
        if path is None:
            raise FileNotFoundError(
                f"{name} is not installed: apt-get install mariadb-server"
                " mariadb-client"
            )
        return path


class MySQL(MariaDB):
    """The server that scripts/fetch_server.sh has unpacked."""

    engine = "mysql"
    program = "mysqld"
    binary_log_reader = "mysqlbinlog"
    unpacked = place_of("mysql")

    def initialize(self) -> None:
        # Without name resolution, root@localhost has no access over TCP.
        init = self.write_secret(
            "init.sql",
            f"ALTER USER root@localhost IDENTIFIED BY '{PASSWORD}';\n"
            f"CREATE USER root@'127.0.0.1' IDENTIFIED BY '{PASSWORD}';\n"
            "GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n",
        )
        self.run([*self.command(), "--initialize-insecure", f"--init-file={init}"])

    def command(self) -> list[str]:
        # Debian's default directory for exported files does not exist here. The X
        # protocol would use the fixed port 33060. The binary log, which is on by
        # default, is flushed as rarely as MariaDB's redo log above.
        return [
            *super().command(),
            "--secure-file-priv=NULL",
            "--mysqlx=OFF",
            "--sync-binlog=0",
        ]


class GaleraNode(MariaDB):
    """One server of a Galera cluster.

    It starts with a copy of the first node's data, and receives only the later writes.
    This needs no tools except a script that passes the node's position.
    """

    copies_data = False
    provider = "/usr/lib/galera/libgalera_smm.so"
    # A node that sends nothing is considered lost sooner than by default.
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
        self.environment_of_its_own = {
            "PATH": f"{self.directory}:{os.environ['PATH']}",
            **environment,
        }
        # The nodes that it joins. Without any, it is a cluster of one.
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
            f"# GALERA saved state\nversion: 2.1\nuuid: {uuid.uuid4()}\nseqno:"
            " 0\nsafe_to_bootstrap: 1\n"
        )
        if self.account is not None:
            shutil.chown(self.data / "grastate.dat", self.account)
        # The data contain a position in the cluster's history only after the node has
        # been in a cluster.
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
        options = ";".join(f"{name}={value}" for name, value in settings.items())
        self.options = (
            "--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M",
            "--performance-schema=OFF",
            "--binlog-format=ROW", "--innodb-autoinc-lock-mode=2", "--wsrep-on=ON",
            "--wsrep-slave-threads=4",
            f"--wsrep-provider={self.provider}", "--wsrep-cluster-name=dlocks",
            "--wsrep-node-address=127.0.0.1",
            f"--wsrep-cluster-address=gcomm://{members}", "--wsrep-sst-method=position",
            f"--wsrep-provider-options={options}",
            *(["--wsrep-new-cluster"] if not members else []),
            *([f"--wsrep-start-position={self.position}"] if self.position else []),
        )  # fmt: skip
        return super().command()

    def is_ready(self) -> bool:
        return (
            self.status("wsrep_ready") == "ON"
            and self.status("wsrep_local_state_comment") == "Synced"
        )

    def come_back(self, *members: GaleraNode) -> None:
        """Start again after a crash, and join these members."""
        self.run([*self.command(), "--wsrep-recover"])
        *_, self.position = re.findall(
            r"Recovered position: ?(\S+)", self.log.read_text(errors="replace")
        )
        self.members = list(members)
        self.start()

    def catch_up(self) -> None:
        """Wait until the node has applied the writes of the other nodes."""
        self.execute("SET STATEMENT wsrep_sync_wait = 15 FOR SELECT 1")

    def status(self, name: str) -> str | None:
        """Return a status variable of the node, or None if it cannot be reached."""
        import MySQLdb

        try:
            ((_, value),) = self.execute(f"SHOW GLOBAL STATUS LIKE '{name}'")
        except (MySQLdb.Error, ValueError):
            return None
        return str(value)

    def __exit__(self, *exc: object) -> None:
        # Its data are no longer needed.
        if self.process is not None:
            self.crash()
        release_port(self.group, self.transfer)
        super().__exit__()


# A joining node receives its own position instead of a full copy. The donor then sends
# the later writes. A node that needs a full copy is refused.
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
        self._environments = [
            *environments,
            *({} for _ in range(3 - len(environments))),
        ]

    def __enter__(self) -> Self:
        with self._stack as stack:
            first = stack.enter_context(GaleraNode(**self._environments[0]))
            # One after another, because each node joins a running cluster.
            others = [
                stack.enter_context(GaleraNode(first, **one))
                for one in self._environments[1:]
            ]
            self._stack = stack.pop_all()
        self.nodes = [first, *others]
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


class Redis(Server):
    engine = "redis"
    accounts = ("redis", "nobody")
    stop_signal = signal.SIGTERM
    # By default, nothing survives a restart.
    settings: ClassVar[dict[str, str]] = {"appendonly": "no"}
    # A replica logs in to its master with the same password.
    protection: ClassVar[dict[str, str]] = {
        "requirepass": PASSWORD,
        "masterauth": PASSWORD,
    }

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.options = {**self.protection, **self.settings, **settings}

    @property
    def url(self) -> str:
        """Return the address of database 0, with the password."""
        return redis_url(self.port, self.options["requirepass"])

    def client(self, **options: Any) -> Any:
        """Return a client of redis-py."""
        import redis

        return redis.Redis.from_url(self.url, **options)

    def initialize(self) -> None:
        server = shutil.which("redis-server", path=_SYSTEM_PATH)
        if server is None:
            # This is the same binary. It acts according to the name by which it is
            # called.
            tool = shutil.which("redis-check-rdb", path=_SYSTEM_PATH)
            if tool is None:
                raise FileNotFoundError(
                    "redis-server is not installed: apt-get install redis-tools"
                )
            server = str(self.directory / "redis-server")
            Path(server).symlink_to(tool)
        self.server = server
        self.file = self.write_secret(f"{self.engine}.conf", self.configuration())

    def configuration(self) -> str:
        settings = {
            "port": self.port,
            "bind": "127.0.0.1",
            "dir": self.data,
            "save": '""',
            **self.options,
        }
        return "".join(f"{name} {value}\n" for name, value in settings.items())

    def command(self) -> list[str]:
        return [self.server, str(self.file)]

    def is_ready(self) -> bool:
        login = f"AUTH {self.options['requirepass']}\r\nPING\r\n"
        return b"+PONG" in asked(self.port, login.encode())


class Sentinel(Redis):
    """A Redis Sentinel for the Redis on ``watched``.

    It promotes a replica when the master fails.
    """

    engine = "sentinel"
    settings: ClassVar[dict[str, str]] = {}
    protection: ClassVar[dict[str, str]] = {"requirepass": PASSWORD}

    def __init__(self, watched: int, **settings: object) -> None:
        super().__init__(**settings)
        self.watched = watched

    def configuration(self) -> str:
        return (
            "".join(f"{name} {value}\n" for name, value in self.options.items())
            + f"port {self.port}\nbind 127.0.0.1\ndir {self.data}\n"
            f"sentinel monitor dlocks 127.0.0.1 {self.watched} 1\n"
            f"sentinel auth-pass dlocks {PASSWORD}\n"
            # Long enough that a machine which stalls for a moment is not taken for a
            # dead master.
            "sentinel down-after-milliseconds dlocks 3000\nsentinel failover-timeout"
            " dlocks 2000\n"
        )

    def command(self) -> list[str]:
        return [*super().command(), "--sentinel"]


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
                "ZooKeeper is not installed: apt-get install libzookeeper-java"
                " default-jre-headless"
            )
        text = "".join(
            f"{name}={value}\n" for name, value in self.configuration().items()
        )
        (self.directory / "zoo.cfg").write_text(text)
        (self.directory / "log4j.properties").write_text("log4j.rootLogger=OFF\n")

    def configuration(self) -> dict[str, object]:
        return {
            "dataDir": self.data,
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "tickTime": 2000,
            # No limit on the clients of one address, as on the other servers.
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


# ZooKeeper settings for sessions that expire soon. Nothing is flushed to disk, since no
# machine crashes here.
BRISK: dict[str, Any] = {
    "java": (
        "-Xmx128m",
        # Code that runs for seconds need not be optimized.
        "-XX:TieredStopAtLevel=1",
        "-Dzookeeper.forceSync=no",
    ),
    "tickTime": 200,
    "maxSessionTimeout": 60000,
}


class ZooKeeperMember(ZooKeeper):
    """One server of an ensemble."""

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
        """Start several servers together, since none is ready without the others."""
        settings: dict[str, Any] = {**BRISK, "initLimit": 50, "syncLimit": 10}
        with contextlib.ExitStack() as stack:
            for one in range(1, number + 1):
                ports = free_port(), free_port()
                stack.callback(release_port, *ports)
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

SERVERS: dict[str, type[Server]] = {
    "postgresql": PostgreSQL,
    "mariadb": MariaDB,
    "mysql": MySQL,
}


def fetched(server: str, program: str) -> Path:
    """Return the path of a program that scripts/fetch_server.sh has unpacked."""
    path = place_of(server) / "bin" / program
    if not path.exists():
        raise FileNotFoundError(
            f"{program} is not installed: sh scripts/fetch_server.sh {server}"
        )
    return path


def free_port() -> int:
    """Reserve a port until ``release_port()`` or the end of this process.

    A socket that never listens is bound to it. The system therefore assigns the port
    neither to a socket that asks for any free port, nor to an outgoing connection. A
    server that reuses addresses, as all of these do, can still listen on it, also after
    a restart.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port = int(probe.getsockname()[1])
    _reserved[port] = probe
    return port


def release_port(*ports: int) -> None:
    for port in ports:
        if (probe := _reserved.pop(port, None)) is not None:
            probe.close()


_reserved: dict[int, socket.socket] = {}
# The interpreter warns of sockets that are still open when it exits.
atexit.register(lambda: release_port(*_reserved))


def answers(port: int) -> bool:
    """Return whether a PostgreSQL or a pooler accepts connections on the port."""
    try:
        import psycopg as driver
    except ImportError:
        # "make test-psycopg2" runs without psycopg 3, which Django would prefer.
        import psycopg2 as driver

    try:
        driver.connect(
            host="127.0.0.1",
            port=port,
            user="dlocks",
            dbname="postgres",
            connect_timeout=3,
        ).close()
    except driver.OperationalError:
        return False
    return True


def redis_url(port: int, password: object = PASSWORD) -> str:
    """Return the address of database 0 of a Redis."""
    return f"redis://:{password}@127.0.0.1:{port}/0"


def asked(port: int, request: bytes) -> bytes:
    """Return the beginning of a server's reply, or nothing if it is not running."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=3) as connection,
    ):
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
