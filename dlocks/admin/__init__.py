"""The admin of locks, and its live page."""

from dlocks.admin.locks import ResourceLockAdmin

__all__ = ["ResourceLockAdmin"]
