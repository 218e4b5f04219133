"""The example shop on other servers, with a change of settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests import servers
from tests.scripts import ROOT

DATABASE = ("pessimistic", "optimistic", "insert")
SALE = """
from django.core.management import execute_from_command_line as manage
manage(["manage.py", "migrate", "--verbosity", "0"])
manage("manage.py flash_sale --stock 5 --buyers 15 --processes 2".split())
"""


@pytest.fixture
def move(start, redis_server, zookeeper_server):
    """Return a function that returns the settings of an engine.

    It also returns the names of the engine's locks in the shop.
    """

    def to(engine):
        if engine == "postgresql":
            port = start(servers.PostgreSQL()).port
            url = f"postgresql://dlocks@127.0.0.1:{port}/postgres"
            return {"SHOP_DATABASE": url}, DATABASE
        if engine == "mariadb":
            server = start(servers.MariaDB())
            server.execute("CREATE DATABASE shop")
            url = f"mysql://root@127.0.0.1:{server.port}/shop"
            return {"SHOP_DATABASE": url}, DATABASE
        urls = {
            "redis": redis_server.url,
            "zookeeper": f"zookeeper://127.0.0.1:{zookeeper_server.port}",
        }
        return {"SHOP_LOCKS": urls[engine]}, (engine,)

    return to


# SQLite is tested in tests/project/test_example.py. The URL of a MySQL is that of a
# MariaDB.
@pytest.mark.parametrize("engine", ["postgresql", "mariadb", "redis", "zookeeper"])
def test_the_shop_switches_engines_by_settings_alone(move, engine, tmp_path):
    """The shop never sells more than its stock."""
    settings, locks = move(engine)
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DLOCKS_", "DJANGO_", "SHOP_"))
    } | {
        "DJANGO_SETTINGS_MODULE": "example_project.settings",
        "SHOP_DATABASE": str(tmp_path / "shop.sqlite3"),
        "COLUMNS": "100",
        "NO_COLOR": "1",
        **settings,
    }
    finished = subprocess.run(
        [sys.executable, "-c", SALE], cwd=ROOT, env=environment, timeout=100,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, check=False,
    )  # fmt: skip
    told = finished.stdout
    assert finished.returncode == 0, told
    assert "All locks held" in told
    sold = dict(re.findall(r"^ (\w[\w ]*?) +(\d+) +\d+ +\d+ ", told, re.MULTILINE))
    assert int(sold.pop("no lock")) > 5
    assert sold == dict.fromkeys([*locks, "optimistic row"], "5")
