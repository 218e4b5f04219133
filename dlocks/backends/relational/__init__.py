"""Locks as rows of one table, in the project's own database.

This is the successor of ``dlocks.backends.database``, which nothing uses yet.
"""

from dlocks.backends.relational.backend import DatabaseBackend
from dlocks.backends.relational.strategies import (
    InsertBackend,
    OptimisticBackend,
    PessimisticBackend,
)

__all__ = [
    "DatabaseBackend",
    "InsertBackend",
    "OptimisticBackend",
    "PessimisticBackend",
]
