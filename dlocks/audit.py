"""The audit log, written to the logger ``dlocks.audit``.

Each line names an intervention, the operator and the reason.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
from typing import Any, Literal

from django.db import connections, transaction

logger = logging.getLogger("dlocks.audit")

What = Literal["clear", "force_release", "take_out", "purge"]

# Reasons that an operator need not enter.
STALE, UNUSED = "stale", "unused"


def taken(
    what: What,
    *,
    kind: str,
    key: str,
    number: int,
    holder: str,
    owner_ip: str | None,
    reason: str,
    by: str,
    via: str,
    database: str,
) -> None:
    """Log that an operator ended a hold or a claim, or deleted a row.

    ``number`` is the token of a hold or the id of a claim. The owner is a secret.
    """
    # With %r a text can neither end the line nor imitate another field.
    _write(
        database,
        f"{what} {kind} %r, {'number' if kind == 'claim' else 'token'} %d, of %r (%s),"
        " by %r via %s: %r",
        (key, number, holder, owner_ip or "-", by, via, reason),
        {
            "audit_action": what,
            "audit_kind": kind,
            "audit_by": by,
            "audit_via": via,
            "audit_reason": reason,
            "lock_key": key,
            "lock_token": number,
            "lock_holder": holder,
            "lock_owner_ip": owner_ip,
        },
    )


def reaped(
    *,
    freed: int,
    deleted: int,
    forgotten: int,
    by: str,
    via: str,
    alias: str,
    database: str,
) -> None:
    """Log how many locks and rows one run of reap_locks cleared and deleted."""
    _write(
        database,
        "reap of %r: %d cleared, %d unused rows deleted, %d records deleted, by %r via"
        " %s",
        (alias, freed, deleted, forgotten, by, via),
        {
            "audit_action": "reap",
            "audit_by": by,
            "audit_via": via,
            "audit_freed": freed,
            "audit_deleted": deleted,
            "audit_forgotten": forgotten,
        },
    )


def operator() -> str:
    """Return the system user and the host of this process."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):
        name = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    return f"{name}@{socket.gethostname()}"


def _write(
    database: str, message: str, values: tuple[Any, ...], facts: dict[str, Any]
) -> None:
    def write() -> None:
        logger.info(message, *values, extra=facts)

    if connections[database].in_atomic_block:
        # A change that is rolled back must not be logged.
        transaction.on_commit(write, using=database, robust=True)
    else:
        write()
