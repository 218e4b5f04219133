"""The sale of one piece, with the same code under each lock and without one."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from django.db import OperationalError, connection, connections, transaction
from django.db.models import F

from dlocks import LockTimeout, db_lock
from dlocks.conf import backends
from example_project.shop.models import Product, Sale

# The alias of DLOCKS for each kind of lock, by the name of its backend.
ALIASES = {
    backends.settings[alias]
    .get("BACKEND", "PessimisticBackend")
    .rpartition(".")[2]
    .removesuffix("Backend")
    .lower(): alias
    for alias in ("default", "optimistic", "insert")
    if alias in backends.settings
}
USUAL = next(iter(ALIASES))
NO_LOCK = "none"
ROW = "row"
LOCKS = (NO_LOCK, *ALIASES, ROW)

# The least and the longest duration of a request to the payment service, in seconds.
# Meanwhile, another buyer may read the same stock.
PAYMENT_CHECK = (0.001, 0.002)

# Seconds. A lock's first pause between two attempts is longer, and acquiring a free key
# is quicker.
SHORTEST_WAIT = 0.004
LONGEST_JITTER = 0.05


class TooBusyError(Exception):
    """The error for a sale without a lock that was disturbed until its timeout."""


@dataclass(frozen=True, slots=True)
class Purchase:
    """The result of one attempt to buy.

    ``sold`` is false if no piece was left.
    """

    sold: bool
    # The number of retries because another buyer had written in between.
    conflicts: int = 0
    # Seconds until the lock was acquired.
    waited: float = 0.0

    @property
    def had_to_wait(self) -> bool:
        return self.waited >= SHORTEST_WAIT


def key_of(product_id: int) -> str:
    # The examples of the documentation use the key "stock:7".
    return f"shop:stock:{product_id}"


def buy(
    product_id: int, buyer: str, lock: str = USUAL, *, timeout: float = 30.0
) -> Purchase:
    """Sell one piece of a product.

    ``lock`` is one of LOCKS. ``"none"`` shows the problem. ``"row"`` takes no lock, but
    writes the product's row only if its version has not changed since it was read. If
    the sale is not possible within ``timeout`` seconds, raise LockTimeout, or
    TooBusyError without a lock.
    """
    if lock == NO_LOCK:
        return _sell(product_id, buyer, _write_what_was_read, timeout=timeout)
    if lock == ROW:
        return _sell(product_id, buyer, _write_where_unchanged, timeout=timeout)
    with db_lock(key_of(product_id), using=ALIASES[lock], timeout=timeout) as hold:
        return _sell(
            product_id, buyer, _write_what_was_read, timeout=timeout, waited=hold.waited
        )


def restock(product_id: int, pieces: int, *, timeout: float = 2.0) -> None:
    """Add pieces under a lock that ends with the transaction.

    Raise LockTimeout if another caller holds the lock, or LockNotAwaitable on SQLite,
    which has one writer.
    """
    with (
        transaction.atomic(),
        db_lock(key_of(product_id), using=ALIASES[USUAL], timeout=timeout),
    ):
        rows = Product.objects.filter(pk=product_id)
        rows.update(stock=F("stock") + pieces)


def let_clerks_meet() -> list[str]:
    """Let two threads acquire two keys in opposite orders.

    Return what each of them reports. One of them gets LockDeadlock.
    """
    met, reports = threading.Barrier(2), {}

    def work(name: str, first: str, second: str) -> None:
        try:
            with db_lock(first, using=ALIASES[USUAL]):
                met.wait(10)
                with db_lock(second, using=ALIASES[USUAL]):
                    reports[name] = f"{name} has had both keys."
        except LockTimeout as error:
            reports[name] = f"{name} has failed. {error}"
        finally:
            connections.close_all()

    clerks = [
        threading.Thread(target=work, args=arguments, name=arguments[0])
        for arguments in (
            ("Ada", "clerk:shelf", "clerk:till"),
            ("Bob", "clerk:till", "clerk:shelf"),
        )
    ]
    for clerk in clerks:
        clerk.start()
    for clerk in clerks:
        clerk.join()
    return [reports[clerk.name] for clerk in clerks]


def _sell(
    product_id: int,
    buyer: str,
    write: Callable[[Product], bool],
    *,
    timeout: float,
    waited: float = 0.0,
) -> Purchase:
    """Read the stock, check the payment, and write the remaining stock.

    If another buyer does the same meanwhile, both sell the same piece.
    """
    deadline = time.monotonic() + timeout
    conflicts = 0
    while True:
        product = Product.objects.get(pk=product_id)
        if product.stock < 1:
            return Purchase(False, conflicts, waited)
        _check_payment()
        product.stock -= 1
        try:
            with transaction.atomic():
                if write(product):
                    Sale.objects.create(product=product, buyer=buyer)
                    return Purchase(True, conflicts, waited)
        except OperationalError as error:
            if not _is_busy(error):
                raise
        conflicts += 1
        if time.monotonic() >= deadline:
            raise TooBusyError(
                f"{product} could not be sold to {buyer} in {timeout:g} s, after"
                f" {conflicts} tries."
            )
        time.sleep(
            random.uniform(0, min(0.002 * 2 ** min(conflicts, 10), LONGEST_JITTER))
        )


def _check_payment() -> None:
    time.sleep(random.uniform(*PAYMENT_CHECK))


def _write_what_was_read(product: Product) -> bool:
    # Not save(), which compares the version.
    Product.objects.filter(pk=product.pk).update(stock=product.stock)
    return True


def _write_where_unchanged(product: Product) -> bool:
    unchanged = Product.objects.filter(pk=product.pk, version=product.version)
    return unchanged.update(stock=product.stock) == 1


def _is_busy(error: OperationalError) -> bool:
    """Return whether SQLite's only write lock was held by others for too long."""
    return connection.vendor == "sqlite" and "locked" in str(error)
