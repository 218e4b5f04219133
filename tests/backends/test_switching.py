"""The example shop runs on each engine with a change of settings only.

It never sells more than its stock.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import servers

ROOT = Path(__file__).parent.parent.parent

DATABASE = ("pessimistic", "optimistic", "insert")


@pytest.fixture(scope="module")
def postgresql():
    with servers.PostgreSQL() as server:
        yield f"postgresql://dlocks@127.0.0.1:{server.port}/postgres"


@pytest.fixture(scope="module")
def mariadb():
    with servers.MariaDB() as server:
        yield shop_on(server)


@pytest.fixture(scope="module")
def mysql():
    if (
        os.environ.get("DLOCKS_TEST_WITHOUT_MYSQL") == "1"
        and not (servers.FETCHED / "mysql").exists()
    ):
        pytest.skip(
            "MySQL could not be fetched, and DLOCKS_TEST_WITHOUT_MYSQL=1 allows that."
        )
    with servers.MySQL() as server:
        yield shop_on(server)


def shop_on(server):
    """Create a database for the shop on a MariaDB or MySQL. Return its URL."""
    import MySQLdb

    connection = MySQLdb.connect(host="127.0.0.1", port=server.port, user="root")
    connection.query("CREATE DATABASE shop CHARACTER SET utf8mb4")
    connection.close()
    return f"mysql://root@127.0.0.1:{server.port}/shop"


@pytest.fixture
def shop(tmp_path):
    """Return a function that runs a command of the shop with settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DLOCKS_", "DJANGO_", "SHOP_"))
    }
    usual = {
        "SHOP_DATABASE": str(tmp_path / "shop.sqlite3"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
    }

    def manage(settings, *arguments):
        finished = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env={**kept, **usual, **settings},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout
        return finished.stdout

    return manage


@pytest.fixture
def move(request, redis_server, zookeeper_server):
    """Return a function that returns the settings of an engine.

    It also returns the names of the engine's locks in the shop.
    """

    def to(engine):
        if engine in {"postgresql", "mariadb", "mysql"}:
            return {"SHOP_DATABASE": request.getfixturevalue(engine)}, DATABASE
        if engine == "redis":
            return {"SHOP_LOCKS": f"redis://127.0.0.1:{redis_server.port}/0"}, (
                "redis",
            )
        if engine == "zookeeper":
            return {"SHOP_LOCKS": f"zookeeper://127.0.0.1:{zookeeper_server.port}"}, (
                "zookeeper",
            )
        return {}, DATABASE

    return to


@pytest.mark.parametrize(
    "engine", ["sqlite", "postgresql", "mariadb", "mysql", "redis", "zookeeper"]
)
def test_the_shop_switches_engines_by_settings_alone(shop, move, engine):
    settings, locks = move(engine)
    shop(settings, "migrate", "--verbosity", "0")
    told = shop(
        settings, "flash_sale", "--stock", "5", "--buyers", "15", "--processes", "3"
    )
    assert "All locks held" in told
    sold = dict(re.findall(r"^ (\w[\w ]*?) +(\d+) +\d+ +\d+ ", told, re.MULTILINE))
    assert int(sold.pop("no lock")) > 5
    assert sold == dict.fromkeys([*locks, "optimistic row"], "5")


@pytest.mark.parametrize("engine", ["redis", "zookeeper"])
def test_lock_bench_measures_other_servers_too(shop, move, engine, tmp_path):
    settings, _ = move(engine)
    file = tmp_path / "bench.json"
    shop(
        settings,
        "lock_bench",
        "--seconds",
        "1",
        "--processes",
        "2",
        "--json",
        str(file),
    )
    result = json.loads(file.read_text())["aliases"]["default"]
    assert result["backend"].startswith(f"dlocks.backends.{engine}.")
    assert result["alone"]["pair_p50_us"] > 0
    assert result["together"]["grants_per_s"] > 0
    assert result["together"]["overlaps"] == 0


@pytest.mark.django_db(transaction=True)
def test_lock_bench_names_a_missing_server_and_no_password(redis_server):
    """Several Redis servers are compared although one is down.

    The output contains no password.
    """
    away, there = servers.free_port(), redis_server.port
    aliases = {
        "away": {
            "BACKEND": "dlocks.backends.redis.RedisBackend",
            "OPTIONS": {"url": f"redis://ada:secret-word@127.0.0.1:{away}/0"},
        },
        "there": {
            "BACKEND": "dlocks.backends.redis.RedisBackend",
            "OPTIONS": {"url": f"redis://127.0.0.1:{there}/0"},
        },
        "nowhere": {
            "BACKEND": "dlocks.backends.zookeeper.ZooKeeperBackend",
            "OPTIONS": {"hosts": f"127.0.0.1:{away}", "connect_timeout": 0.5},
        },
    }
    finished = subprocess.run(
        [
            sys.executable, "-m", "django", "lock_bench", "--seconds", "1",
                "--processes", "2",
            "--using", "away", "nowhere", "there",
        ],
        cwd=ROOT, env={**os.environ, "DLOCKS_TEST_ALIASES": json.dumps(aliases)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert finished.returncode == 1
    assert re.search(
        rf"^away: LockBackendError: .*'away'.*{away}", finished.stderr, re.MULTILINE
    )
    assert re.search(
        r"^nowhere: LockBackendError: .*'nowhere'", finished.stderr, re.MULTILINE
    )
    assert "there, 2 processes: " in finished.stdout
    assert "CommandError: 2 of 3 aliases failed. See above." in finished.stderr
    assert "secret-word" not in finished.stdout + finished.stderr
    assert "Traceback" not in finished.stderr
