"""The audit log, written to the logger ``dlocks.audit``.

Each line names an intervention, the operator and the reason.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
import unicodedata
from typing import Any, Literal

from django.db import connections, transaction
from django.utils.translation import gettext as _

logger = logging.getLogger("dlocks.audit")

What = Literal["clear", "force_release", "take_out"]

# The reason that an operator need not enter.
STALE = "stale"
# Characters of a reason, which fills one line of a log.
REASON_LENGTH = 200


def reason_of(text: str) -> str:
    """Return the reason that a user entered, stripped.

    Raise ValueError if it is empty, too long or not a single line.
    """
    reason = text.strip()
    if not any(
        character.isprintable() and not character.isspace() for character in reason
    ):
        raise ValueError(_("Enter a reason. It is kept in the log."))
    if len(reason) > REASON_LENGTH:
        raise ValueError(
            _("A reason can have at most %(most)d characters, not %(number)d.")
            % {"most": REASON_LENGTH, "number": len(reason)}
        )
    if any(
        unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}
        for character in reason
    ):
        raise ValueError(_("A reason must be one line without control characters."))
    return reason


def operator() -> str:
    """Return the system user and the host of this process."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError, ImportError):
        name = f"uid {os.getuid()}" if hasattr(os, "getuid") else "unknown"
    return f"{name}@{socket.gethostname()}"


def write(
    database: str, message: str, values: tuple[Any, ...], facts: dict[str, Any]
) -> None:
    """Write a line, with further facts, about a change in a database."""

    def log() -> None:
        logger.info(message, *values, extra=facts)

    if database and connections[database].in_atomic_block:
        # A change that is rolled back must not be logged.
        transaction.on_commit(log, using=database, robust=True)
    else:
        log()
