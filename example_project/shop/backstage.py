"""The start of a flash sale, which runs in a process of its own.

Only one sale runs at a time. It goes on when the visitor leaves the page.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from dlocks import db_lock
from example_project.shop.models import FlashSale

MANAGE = Path(__file__).resolve().parent.parent.parent / "manage.py"

# A second visitor gets a reply at once instead of waiting.
ONE_AT_A_TIME = db_lock("flash-sale", timeout=0)


def begin(*, locks: list[str], stock: int, buyers: int) -> FlashSale:
    """Start a sale, or raise LockTimeout if one is running."""
    with ONE_AT_A_TIME as hold:
        sale = FlashSale.objects.create(locks=locks, stock=stock, buyers=buyers)
        process = subprocess.Popen(  # noqa: S603 (nothing in it is the visitor's)
            [sys.executable, str(MANAGE), "run_flash_sale", str(sale.pk)],
            stdin=subprocess.PIPE,
            text=True,
        )
        # Reap the process when it has ended.
        threading.Thread(target=process.wait, daemon=True).start()
        # Hand the hold over to the process. The key is not free in between.
        with process.stdin as theirs:
            theirs.write(hold.detach())
    return sale


def is_going_on(sale: FlashSale) -> bool:
    """Return whether the process of the sale is running.

    If it died, it no longer holds the lock.
    """
    return sale.ended is None and ONE_AT_A_TIME.locked()
