"""Which rows a transaction has locked, read without a lock on PostgreSQL.

``xmax`` of a row is the transaction that has locked, updated or deleted it. If several
have locked it, ``xmax`` is the number of a MultiXact, which no public function looks
up. Such a row counts as unlocked.
"""

from __future__ import annotations

from django.db.models import BigIntegerField, BooleanField
from django.db.models.expressions import RawSQL

# The 64 bits of a transaction whose number has 32, next to the current one.
_NOW = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_WHOLE = (
    f"GREATEST(3, {_NOW} + ((xmax::text::bigint - {_NOW} + 2147483648) & 4294967295) -"
    " 2147483648)"
)
# Whether a transaction that is in progress has locked the row. pg_xact_status() raises
# an error for a number that was not assigned yet, as that of a MultiXact may be.
IN_TRANSACTION = (
    "CASE WHEN xmax <> '0' AND age(xmax) > 0 THEN"
    f" COALESCE(pg_xact_status({_WHOLE}::text::xid8) = 'in progress', FALSE) ELSE FALSE"
    " END"
)
# The same as an expression, and the transaction that has locked the row.
IS_IN_TRANSACTION = RawSQL(IN_TRANSACTION, (), BooleanField())  # noqa: S611 (a constant)
LOCKED_BY = RawSQL("xmax::text::bigint", (), BigIntegerField())
