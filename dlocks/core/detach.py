"""Detaching a hold, whose key then belongs to a signed text."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from typing import TYPE_CHECKING

from django.core import signing

from dlocks.exceptions import LockError
from dlocks.runtime import clock
from dlocks.runtime.clock import FOREVER
from dlocks.values import Duration, seconds

if TYPE_CHECKING:
    from dlocks.protocols import DetachedHold

SALT = "dlocks.handover"


def detach(hold: DetachedHold, *, within: Duration | None = None) -> str:
    """Detach a hold and return the text by which a process resumes it.

    ``resume_hold()`` resumes it once, in any process. The hold can no longer be used
    here, and its ``with`` block does not release the key. Until it is resumed, nothing
    renews the lease. It lasts for ``within``, by default for its ttl. The text is
    signed with SECRET_KEY but not encrypted. Any process with the text can resume the
    hold.

    Raise LockLost if the hold is no longer held. Raise RuntimeError in transaction
    scope, for a shared hold, for one that was entered more than once, and if the
    backend cannot hand over. Inside a transaction, send the text from ``on_commit()``.
    """
    if within is not None:
        within = seconds("within", within, above_zero=True)
        refusal, claim = hold.backend.refusal, hold.claim
        why = refusal(dataclasses.replace(claim, ttl=within))
        if why is not None and refusal(claim) is None:
            raise ValueError(f"{hold.key!r} cannot be detached. {why}")
    was_over = hold.is_over
    try:
        return _detached(hold, hold.claim.ttl if within is None else within)
    except BaseException:
        if hold.is_over and not was_over:
            # Interrupted, so no process will ever receive the text.
            with suppress(LockError):
                hold.release_again()
        raise


def _detached(hold: DetachedHold, ttl: float) -> str:
    lock = hold.lock
    min_hold, max_hold = hold.transfer(ttl)
    data = {
        # The rest of max_hold counts from here, in any process.
        "at": clock.wall_now(),
        "key": lock.key,
        "claimed": hold.claim.key,
        "using": lock.using,
        "owner": hold.owner,
        "token": hold.token,
        "policy": {
            "ttl": hold.claim.ttl,
            "renew": lock.renew,
            "reentrant": lock.reentrant,
            "release_at": lock.release_at,
            # min_hold is counted from the reply, and max_hold from the request.
            "min_hold": min(min_hold, max_hold),
            "max_hold": None if max_hold == FOREVER else max_hold,
        },
    }
    return signing.dumps(data, salt=SALT)
