"""The documentation of these backends: its examples, options and tests."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from django.db.backends.postgresql.base import DatabaseWrapper

from dlocks.backends.quorum import QuorumBackend
from dlocks.backends.redis import RedisBackend
from dlocks.backends.zookeeper import ZooKeeperBackend
from example_project.shop.models import Product
from tests import pages
from tests.promises.backends.others import MEMORY, at, reported
from tests.servers import PASSWORD

KINDS = {"redis": RedisBackend, "quorum": QuorumBackend, "zookeeper": ZooKeeperBackend}


def settings_of(page):
    return [
        ast.literal_eval(code.removeprefix("DLOCKS = "))
        for code in pages.blocks(page)
        if code.startswith("DLOCKS = ")
    ]


def sells_a_lamp(page):
    """Return whether the example sells one of two lamps."""
    lamp = Product.objects.create(name="Lamp", stock=2)
    page.sell(lamp.pk, Product)
    lamp.refresh_from_db()
    return lamp.stock == 1


def test_the_examples_on_redis(redis_server, settings):
    for settings.DLOCKS in settings_of("how-to/redis"):
        assert reported("default") == []
    written, sentinels = settings_of("how-to/redis")
    assert len(sentinels["default"]["OPTIONS"]["sentinels"]) == 3
    written["default"]["OPTIONS"] |= {
        "url": f"redis://127.0.0.1:{redis_server.port}/0",
        "username": "default",
        "password": PASSWORD,
    }
    settings.DLOCKS = written
    page = pages.run("how-to/redis")
    assert page.build("north") < page.build("north")


def test_the_examples_on_zookeeper(zookeeper_server, root, settings):
    """The example in the documentation works with the address of this server."""
    (written,) = settings_of("how-to/zookeeper")
    options = written["default"]["OPTIONS"]
    assert (
        options["root"]
        == inspect.signature(ZooKeeperBackend).parameters["root"].default
    )
    options |= {"hosts": [at(zookeeper_server.port)], "root": root}
    settings.DLOCKS = written
    assert pages.run("how-to/zookeeper").build("north").startswith("north with token ")


@pytest.mark.django_db(transaction=True)
def test_the_examples_on_quorum(settings):
    (written,) = settings_of("how-to/quorum")
    settings.DLOCKS = written
    assert reported("default") == []
    assert len(written["default"]["OPTIONS"]["of"]) == 3
    page = pages.run("how-to/quorum")
    settings.DLOCKS = {
        **{name: {"BACKEND": MEMORY} for name in written},
        "default": written["default"],
    }
    assert page.build("north") == "report of north"


@pytest.mark.django_db(transaction=True)
def test_the_examples_on_galera():
    page = pages.run("how-to/galera")
    assert page.DATABASES["default"]["OPTIONS"] == {
        "init_command": "SET wsrep_sync_wait = 7"
    }
    assert sells_a_lamp(page)


def test_the_examples_on_failover():
    there = pages.run("how-to/failover").DATABASES["default"]
    assert there["HOST"].count(",") == there["PORT"].count(",")
    more = {"USER": "", "PASSWORD": "", "TIME_ZONE": None, "CONN_HEALTH_CHECKS": False}
    parameters = DatabaseWrapper({**there, **more}).get_connection_params()
    assert parameters["target_session_attrs"] == "read-write"


@pytest.mark.parametrize("name", KINDS)
def test_pages_list_exactly_the_options_of_their_backend(name):
    everywhere = {"prefix", "ttl", "timeout", "grace"}
    known = set(inspect.signature(KINDS[name]).parameters) - {"alias", "options"}
    assert pages.options_in(f"how-to/{name}") - everywhere == known


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_table_of_these_backends_matches_their_flags(kind):
    assert pages.told_of(kind) == {flag: getattr(kind, flag) for flag in pages.TOLD_AS}
    assert (pages.tokens_of(kind) == "always") == kind.supports_fencing
    if kind is not QuorumBackend:
        pages.check_refusals(kind("default"))


def test_the_pages_name_existing_tests():
    root = Path(__file__).parents[3]
    found = [
        named
        for page in (pages.DOCS / "how-to").glob("*.md")
        for named in re.findall(
            r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", page.read_text()
        )
    ]
    assert len(found) > 3
    for file, test in found:
        assert (f"def {test}(" if test else "") in (root / file).read_text()
