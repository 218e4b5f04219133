"""Locks that a majority of other backends grants, as in Redlock."""

from dlocks.backends.quorum.backend import QuorumBackend

__all__ = ["QuorumBackend"]
