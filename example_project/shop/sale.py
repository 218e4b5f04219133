"""A flash sale: a stock sold to many buyers, once under each lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from example_project.shop.crowd import Crowd
from example_project.shop.models import FLASH_SALE, Product
from example_project.shop.services import ALIASES, NO_LOCK, ROW, Purchase

TITLES = {NO_LOCK: "no lock", **{name: name for name in ALIASES}, ROW: "optimistic row"}

# What the name of each round means.
MEANINGS = {
    NO_LOCK: "each buyer reads the stock, subtracts one and writes the result",
    "pessimistic": "with db_lock(key), the default: one buyer at a time, in a queue",
    "optimistic": "the same lock, which compares a version instead of locking its row",
    "insert": "the same lock, which inserts its row and deletes it",
    ROW: "a write succeeds only if the product's version is unchanged",
}
WHY_SLOWER = (
    "With a lock fewer are sold per second, because one buyer at a time pays, and then"
    " hands the key to the next. Without one, payments overlap, and so do mistakes."
)

# Attempts without a lock, since overselling happens by chance.
LOCKLESS_TRIES = 5

# Seconds between two records of a round's progress.
NOTE_EVERY = 0.1


@dataclass
class Round:
    """One sale of the whole stock, and its result."""

    lock: str
    stock: int
    buyers: int
    sold: int = 0
    left: int = 0
    confirmed: int = 0
    refused: int = 0
    conflicts: int = 0
    waits: int = 0
    waited: float = 0.0
    seconds: float = 0.0
    # Points of the progress: seconds, pieces sold, and pieces left according to the
    # product.
    course: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def title(self) -> str:
        return TITLES[self.lock]

    @property
    def served(self) -> int:
        return self.confirmed + self.refused

    @property
    def oversold(self) -> int:
        return max(0, self.sold - self.stock)

    @property
    def is_exact(self) -> bool:
        return self.served >= self.buyers and self.sold == self.stock and not self.left

    @property
    def mean_wait(self) -> float:
        """The mean wait of the buyers that had to wait, in milliseconds."""
        return 1000 * self.waited / self.waits if self.waits else 0.0

    @property
    def complaint(self) -> str | None:
        """A description of what is wrong with the result, or None."""
        if self.sold != self.confirmed or self.confirmed + self.refused != self.buyers:
            return (
                f"{self.title}: {self.sold} sales are in the database, but"
                f" {self.confirmed} buyers received a confirmation"
            )
        if self.lock == NO_LOCK:
            return (
                None
                if self.oversold
                else f"{self.title}: nothing was oversold, in {LOCKLESS_TRIES} tries"
            )
        if self.sold != self.stock or self.left:
            return (
                f"{self.title}: {self.sold} were sold of a stock of {self.stock}, and"
                f" the product shows {self.left} left"
            )
        return None

    def add(self, purchase: Purchase) -> None:
        self.confirmed += purchase.sold
        self.refused += not purchase.sold
        self.conflicts += purchase.conflicts
        if purchase.had_to_wait:
            self.waits += 1
            self.waited += purchase.waited

    def look(self, product: Product, seconds: float) -> None:
        """Record the numbers in the database."""
        product.refresh_from_db()
        self.seconds, self.left, self.sold = (
            seconds,
            product.stock,
            product.sales.count(),
        )
        self.course.append((round(seconds, 3), self.sold, self.left))


def sell(
    crowd: Crowd,
    locks: Sequence[str],
    stock: int,
    buyers: int,
    tell: Callable[[Round], None],
) -> Iterator[Round]:
    """Sell the stock under each lock in turn.

    Yield each round at its end. Call ``tell`` at its start and after each purchase.
    """
    names = [f"buyer {number}" for number in range(1, buyers + 1)]
    for lock in locks:
        for _ in range(LOCKLESS_TRIES if lock == NO_LOCK else 1):
            one = _round(crowd, lock, stock, names, tell)
            if lock != NO_LOCK or one.oversold:
                break
        yield one


def _round(
    crowd: Crowd, lock: str, stock: int, names: list[str], tell: Callable[[Round], None]
) -> Round:
    product, _ = Product.objects.update_or_create(
        name=f"{FLASH_SALE}{TITLES[lock]}", defaults={"stock": stock}
    )
    product.sales.all().delete()
    one = Round(lock, stock, len(names), left=stock, course=[(0.0, 0, stock)])
    tell(one)
    began = noted = time.monotonic()
    for purchase in crowd.buy(product.pk, lock, names):
        if purchase is None:
            began = noted = time.monotonic()
            continue
        one.add(purchase)
        if (now := time.monotonic()) >= noted + NOTE_EVERY:
            noted = now
            one.look(product, now - began)
        tell(one)
    one.look(product, time.monotonic() - began)
    return one
