from __future__ import annotations

import pytest

from dlocks.models import LockClaim, ResourceLock


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
