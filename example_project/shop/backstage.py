"""How the page begins a flash sale: one at a time, in a process of its own that goes on when the page is left."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from dlocks import db_lock
from example_project.shop.models import FlashSale

MANAGE = Path(__file__).resolve().parent.parent.parent / "manage.py"

# Whoever comes second is told so at once.
ONE_AT_A_TIME = db_lock("flash-sale", timeout=0)


def begin(*, locks: list[str], stock: int, buyers: int) -> FlashSale:
    """Begin a sale; raise LockTimeout when one is going on."""
    with ONE_AT_A_TIME as hold:
        sale = FlashSale.objects.create(locks=locks, stock=stock, buyers=buyers)
        process = subprocess.Popen(  # noqa: S603 (nothing in it is the visitor's)
            [sys.executable, str(MANAGE), "run_flash_sale", str(sale.pk)], stdin=subprocess.PIPE, text=True
        )
        # To bury it when it has ended.
        threading.Thread(target=process.wait, daemon=True).start()
        # From here on the key is that process's: nobody else can have it in between.
        with process.stdin as theirs:
            theirs.write(hold.detach())
    return sale


def is_going_on(sale: FlashSale) -> bool:
    """Tell whether its process is at work: one that died has the lock no longer."""
    return sale.ended is None and ONE_AT_A_TIME.locked()
