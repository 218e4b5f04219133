from __future__ import annotations

import pytest
from django.test import override_settings

from dlocks.models import LockClaim, ResourceLock
from tests.promises.database.seams import WatchedBackend


@pytest.fixture
def no_claim_left(transactional_db, has_failed):
    """Check after the test that no claim is left and all counters are zero."""
    yield
    if has_failed():
        return
    assert not LockClaim.objects.values_list("key_resource", "holder", "version")
    assert not ResourceLock.objects.exclude(waiters=0, shares=0).values_list(
        "key_resource", "waiters", "shares"
    )


@pytest.fixture
def around(transactional_db, settings):
    """Return a function that runs code around a method of pessimistic backends."""
    watched = {"BACKEND": f"{WatchedBackend.__module__}.{WatchedBackend.__name__}"}
    aliases = {
        alias: conf | watched
        if conf["BACKEND"].endswith("PessimisticBackend")
        else conf
        for alias, conf in settings.DLOCKS.items()
    }
    with override_settings(DLOCKS=aliases):
        yield WatchedBackend.around.__setitem__
    WatchedBackend.around.clear()
