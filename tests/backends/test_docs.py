"""The documentation of these backends: its examples, options and tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from django.db.backends.postgresql.base import DatabaseWrapper

from example_project.shop.models import Product
from tests import pages
from tests.internals import (
    QuorumBackend,
    RedisBackend,
    ZooKeeperBackend,
    backends,
    options_of,
)

EVERYWHERE = {"prefix", "ttl", "timeout", "grace", "slow_wait", "slow_hold"}


def settings_of(page):
    return [
        ast.literal_eval(code.removeprefix("DLOCKS = "))
        for code in pages.blocks(page)
        if code.startswith("DLOCKS = ")
    ]


def test_the_examples_on_redis(redis_server, settings):
    *_, sentinels = written = settings_of("how-to/redis")
    for one in written:
        settings.DLOCKS = one
        assert isinstance(backends["default"], RedisBackend)
    assert len(sentinels["default"]["OPTIONS"]["sentinels"]) == 3
    page = pages.run("how-to/redis")
    settings.DLOCKS = {
        "default": {
            **written[0]["default"],
            "OPTIONS": {"url": redis_server.url},
        }
    }
    assert page.build("north") < page.build("north")


@pytest.mark.django_db(transaction=True)
def test_the_examples_on_quorum(settings):
    (written,) = settings_of("how-to/quorum")
    settings.DLOCKS = written
    assert len(backends["default"].members()) == 5
    assert backends["redis1"].settle == backends["default"].ttl
    page = pages.run("how-to/quorum")
    memory = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
    settings.DLOCKS = {
        **dict.fromkeys(written, memory),
        "default": written["default"],
        "database": {"BACKEND": "dlocks.backends.database.PessimisticBackend"},
    }
    pages.check_refusals(backends["default"])
    assert page.build("north") == "report of north"
    lamp = Product.objects.create(name="Lamp", stock=2)
    page.sell(lamp.pk, Product)
    lamp.refresh_from_db()
    assert lamp.stock == 1


@pytest.mark.django_db(transaction=True)
def test_the_examples_on_galera():
    page = pages.run("how-to/galera")
    assert page.DATABASES["default"]["OPTIONS"] == {
        "init_command": "SET wsrep_sync_wait = 7"
    }
    lamp = Product.objects.create(name="Lamp", stock=2)
    page.sell(lamp.pk, Product)
    lamp.refresh_from_db()
    assert lamp.stock == 1


def test_the_examples_on_failover():
    there = pages.run("how-to/failover").DATABASES["default"]
    assert there["HOST"].count(",") == there["PORT"].count(",")
    connection = DatabaseWrapper(
        {
            **there,
            "USER": "",
            "PASSWORD": "",
            "TIME_ZONE": None,
            "CONN_HEALTH_CHECKS": False,
        }
    )
    assert connection.get_connection_params()["target_session_attrs"] == "read-write"


@pytest.mark.parametrize(
    ("page", "kind"), [("how-to/redis", RedisBackend), ("how-to/quorum", QuorumBackend)]
)
def test_pages_list_exactly_the_options_of_their_backend(page, kind):
    text = (pages.DOCS / f"{page}.md").read_text()
    _, _, table = text.partition("| Option | Meaning | Default |\n")
    rows = re.findall(r"^\| (.*?) \|", table.partition("\n\n")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named | EVERYWHERE == options_of(kind)


@pytest.mark.parametrize("kind", [RedisBackend, QuorumBackend, ZooKeeperBackend])
def test_the_table_of_these_backends_matches_their_flags(kind):
    assert pages.told_of(kind) == {flag: getattr(kind, flag) for flag in pages.TOLD_AS}
    assert (pages.tokens_of(kind) == "always") == kind.supports_fencing
    if kind is not QuorumBackend:
        pages.check_refusals(kind("default"))


def test_the_pages_name_existing_tests():
    root = Path(__file__).parent.parent.parent
    for page in ("redis", "quorum", "galera", "failover"):
        named = re.findall(
            r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`",
            (pages.DOCS / f"how-to/{page}.md").read_text(),
        )
        assert named
        for file, test in named:
            assert (
                f"def {test}(" in (root / file).read_text()
                if test
                else (root / file).exists()
            )
