"""The users of the admin."""

import logging

import pytest

from tests.promises.admin.pages import person


@pytest.fixture
def viewer(db):
    return person("viewer", "view_resourcelock")


@pytest.fixture
def clearer(db):
    return person("clearer", "view_resourcelock", "clear_resourcelock")


@pytest.fixture
def releaser(db):
    return person("releaser", "view_resourcelock", "force_release_resourcelock")


@pytest.fixture
def boss(db):
    return person("boss", is_superuser=True)


@pytest.fixture
def historian(db):
    return person("historian", "view_resourcelock", "view_holdrecord")


@pytest.fixture
def with_history(settings):
    settings.DLOCKS = {**settings.DLOCKS, "default": settings.DLOCKS["recorded"]}


@pytest.fixture
def audited(caplog):
    """Return a function that returns the audit records so far."""
    caplog.set_level(logging.INFO, logger="dlocks.audit")
    return lambda: [one for one in caplog.records if one.name == "dlocks.audit"]
