"""Locks of the database's own sessions, such as ``pg_advisory_lock``."""

from dlocks.backends.session.backend import SessionBackend

__all__ = ["SessionBackend"]
