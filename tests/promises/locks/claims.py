"""Claims of other callers on the connection of the test, which need no thread."""

from __future__ import annotations

from tests.internals import Claim, backends


def is_taken(key, using="default"):
    """Return whether another caller finds the key held."""
    backend = backends[using]
    claim = Claim(key=f"{backend.prefix}{key}", ttl=30)
    return backend.acquire(claim) is None or not backend.release(claim)
