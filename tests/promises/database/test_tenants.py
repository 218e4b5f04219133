"""A schema for each tenant on PostgreSQL, with django-tenants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.db import connections

from dlocks.models import ResourceLock
from tests import pages

ROOT = Path(__file__).parent.parent.parent.parent

pytestmark = [
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]


@pytest.fixture
def project():
    """Return a function that runs a scenario of tests/tenants in its process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.tenants"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def call(situation):
            process.stdin.write(f"{situation}\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())
            assert "error" not in answer, answer["error"]
            return answer["result"]

        yield call
        process.stdin.close()


# What a tenant does, and what it finds with its search path.
SITUATIONS = {
    # The background thread renews the row that the tenant's thread has written.
    "renewed_for_longer_than_its_ttl": True,
    # Another connection creates its row in the schema of the transaction.
    "new_key_in_a_transaction": ["transaction"] * 3,
    "every_kind": [True] * 3,
    "without_the_public_schema": ["transaction", "held"],
    # The row in which a lock was granted guards. The tables that another alias would
    # find do not matter.
    "guarded_on_another_alias": ["stock:7", "permits"],
    "handed_over_to_another_tenant": [["acme", False, False], ["globex", True, False]],
    "seen_by_the_commands": [True] * 4,
    "recorded": 1,
    # Both tenants hold the same key, and the commands show each its own. A key is
    # locked, and there are two rows.
    "keys_of_each_tenant": [["acme:nightly", "globex:nightly"], [1, 1, 0], True, 2],
    "keys_of_each_tenant_in_a_coroutine": ["acme:nightly", True, "acme:nightly"],
    "resumed_in_another_tenant": "acme:handed",
}


def test_all_tenants_share_the_public_locks(project):
    """Every kind of lock, the commands and the history use the same tables.

    Without tables in the public schema, the first acquire raises an error with
    instructions. A check reports it too, and does not stop ``migrate_schemas``. After
    that, a prefix separates the keys of tenants. The tables of the tenants stay empty,
    whatever was locked, and may be missing.
    """
    said, checks = project("refused")
    assert len(set(said)) == 1
    for words in (
        "'acme', 'globex'",
        "SHARED_APPS",
        "migrate_schemas --shared --fake dlocks zero'",
        "migrate_schemas --shared'",
        '"$user", public',
    ):
        assert words in said[0]
    assert checks == [["dlocks.W008", said[0]]]
    assert project("tables") == {"public": None, "acme": [], "globex": []}
    for change, of_tenant in ("share", []), ("share_alone", None):
        project(change)
        for situation, expected in SITUATIONS.items():
            assert project(situation) == expected, (change, situation)
            tables = project("tables")
            found = [tables["acme"], tables["globex"]]
            assert found == [of_tenant] * 2, (change, situation)


def test_the_documented_tenant_settings_work(settings, monkeypatch):
    page = pages.run("how-to/tenants")
    settings.DLOCKS = page.DLOCKS
    for name in ("acme", "globex"):
        monkeypatch.setattr(connections["default"], "schema_name", name, raising=False)
        page.report(lambda: page.rebuild_index(lambda: None))
    assert set(ResourceLock.objects.values_list("pk", flat=True)) == {
        "acme:nightly-report",
        "globex:nightly-report",
        "index",
    }
