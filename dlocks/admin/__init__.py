"""The admin of locks and ended holds, and the live page."""

from dlocks.admin.locks import ResourceLockAdmin
from dlocks.admin.records import HoldRecordAdmin

__all__ = ["HoldRecordAdmin", "ResourceLockAdmin"]
