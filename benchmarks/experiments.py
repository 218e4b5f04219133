"""The experiments: their measurements, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.crew import Cell

CONTENDED = [
    "dlocks-postgresql",
    "dlocks-postgresql-far",
    "dlocks-postgresql-session",
    "dlocks-mariadb",
    "dlocks-mariadb-far",
    "dlocks-mariadb-session",
    "dlocks-mysql",
    "dlocks-mysql-no-binlog",
    "dlocks-mysql-session",
    "dlocks-sqlite",
    "redis-py",
    "redis-py-5ms",
    "python-redis-lock",
    "kazoo",
    "advisory",
    "for-update",
]
UNCONTENDED = [
    "raw-postgresql",
    "raw-pair-postgresql",
    "django-postgresql",
    "dlocks-postgresql",
    "dlocks-postgresql-optimistic",
    "dlocks-postgresql-insert",
    "dlocks-postgresql-session",
    "django-row-postgresql",
    "dlocks-postgresql-transaction",
    "django-locked-postgresql",
    "dlocks-postgresql-guard",
    "dlocks-postgresql-1000-keys",
    "dlocks-postgresql-10000-keys",
    "db-mutex-postgresql",
    "pglock",
    "pgware",
    "raw-mariadb",
    "raw-pair-mariadb",
    "django-mariadb",
    "dlocks-mariadb",
    "dlocks-mariadb-optimistic",
    "dlocks-mariadb-insert",
    "dlocks-mariadb-session",
    "django-row-mariadb",
    "dlocks-mariadb-transaction",
    "db-mutex-mariadb",
    "raw-mysql",
    "raw-pair-mysql",
    "raw-named-lock-mysql",
    "dlocks-mysql",
    "dlocks-mysql-optimistic",
    "dlocks-mysql-session",
    "django-row-mysql",
    "dlocks-mysql-transaction",
    "raw-sqlite",
    "django-sqlite",
    "dlocks-sqlite",
    "dlocks-sqlite-optimistic",
    "redis-py",
    "redis-py-always",
    "python-redis-lock",
    "python-redis-lock-always",
    "kazoo",
]
# Contenders whose grants and waits are compared.
JUDGED = {
    "dlocks-postgresql",
    "dlocks-postgresql-session",
    "dlocks-mariadb",
    "dlocks-mysql",
    "dlocks-mysql-no-binlog",
    "dlocks-sqlite",
    "redis-py",
    "kazoo",
    "advisory",
}
# Pairs that take long. Each has a lock on many keys.
MANY_KEYS = {"dlocks-postgresql-1000-keys": 3.0, "dlocks-postgresql-10000-keys": 12.0}

DEFAULT = {"contended": CONTENDED, "uncontended": UNCONTENDED}


@dataclass(frozen=True)
class Step:
    """Measurements of several contenders that take turns: A B C A B C.

    Other load on the machine thus affects all of them.
    """

    rounds: int
    # The measurement of one contender.
    cell: Callable[[str], Cell]
    contenders: list[str]

    def __iter__(self) -> Iterator[tuple[int, Cell]]:
        cells = list(map(self.cell, self.contenders))
        for number in range(self.rounds):
            for cell in cells:
                yield number, cell

    def __len__(self) -> int:
        return self.rounds * len(self.contenders)


def contended(contenders: list[str], quick: bool) -> Iterator[Step]:
    """Yield measurements of 32 processes with one key and a hold of 1 ms."""

    def cell(contender: str) -> Cell:
        return Cell(
            experiment="contended",
            contender=contender,
            processes=32,
            hold=0.001,
            seconds=1.2 if quick else 3.0,
            warm_up=0.5,
        )

    # One stall of the disk delays all waiters, and is the p99 of its round. The
    # contenders that are compared therefore run more rounds.
    judged = [name for name in contenders if name in JUDGED]
    others = [name for name in contenders if name not in JUDGED]
    yield Step(2 if quick else 7, cell, judged)
    yield Step(2 if quick else 3, cell, others)


def uncontended(contenders: list[str], quick: bool) -> Iterator[Step]:
    """Yield measurements of acquire and release without contention."""

    def cell(contender: str) -> Cell:
        return Cell(
            experiment="uncontended",
            contender=contender,
            seconds=MANY_KEYS.get(contender, 0.35),
            warm_up=0.1,
        )

    # Many short rounds, since other load on the machine varies.
    short = [name for name in contenders if name not in MANY_KEYS]
    long = [name for name in contenders if name in MANY_KEYS]
    yield Step(3 if quick else 10, cell, short)
    yield Step(1 if quick else 3, cell, long)


EXPERIMENTS = {"contended": contended, "uncontended": uncontended}
