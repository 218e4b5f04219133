"""The experiments: their measurements, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.crew import Cell

MS = 0.001

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
GROWTH = ["dlocks-postgresql", "dlocks-mariadb", "dlocks-sqlite", "redis-py", "kazoo"]

DEFAULT = {"contended": CONTENDED, "uncontended": UNCONTENDED, "growth": GROWTH}

# The measurement to which the targets apply.
TARGET = {"processes": 32, "keys": 1, "hold": MS}
# Contenders whose grants and waits in that measurement are compared.
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


@dataclass(frozen=True)
class Step:
    """Measurements of several contenders that take turns: A B C A B C.

    Other load on the machine thus affects all of them.
    """

    rounds: int
    # The cells of one contender.
    cells: Callable[[str], list[Cell]]
    contenders: list[str]
    rows: int = 1000

    def __iter__(self) -> Iterator[tuple[int, Cell]]:
        columns = [self.cells(contender) for contender in self.contenders]
        for cells in zip(*columns, strict=True):
            for number in range(self.rounds):
                for cell in cells:
                    yield number, cell

    def __len__(self) -> int:
        return self.rounds * sum(
            len(self.cells(contender)) for contender in self.contenders
        )


def contended(contenders: list[str], quick: bool) -> Iterator[Step]:
    """Yield measurements of contention for one key, or for one of many."""

    def cell(
        contender: str, processes: int, keys: int, hold: float, seconds: float
    ) -> Cell:
        return Cell(
            experiment="contended",
            contender=contender,
            processes=processes,
            keys=keys,
            hold=hold,
            seconds=seconds,
            warm_up=0.2 if processes == 1 else 0.5,
        )

    def target(name: str) -> list[Cell]:
        return [cell(name, 32, 1, MS, 1.2 if quick else 3.0)]

    # One stall of the disk delays all waiters, and is the p99 of its round. The
    # contenders that are compared therefore run more rounds.
    yield Step(
        2 if quick else 7, target, [name for name in contenders if name in JUDGED]
    )
    yield Step(
        2 if quick else 3, target, [name for name in contenders if name not in JUDGED]
    )
    if quick:
        return
    seconds = {1: 0.4, 8: 1.0, 32: 1.5}
    others = [
        (processes, keys, hold)
        for processes in seconds
        for hold in (0.0, MS)
        for keys in (1, 1000)
        if {"processes": processes, "keys": keys, "hold": hold} != TARGET
    ]
    yield Step(
        2,
        lambda name: [
            cell(name, processes, keys, hold, seconds[processes])
            for processes, keys, hold in others
        ],
        contenders,
    )


def uncontended(contenders: list[str], quick: bool) -> Iterator[Step]:
    """Yield measurements of acquire and release without contention."""

    def cells(contender: str) -> list[Cell]:
        return [
            Cell(
                experiment="uncontended", contender=contender, seconds=0.35, warm_up=0.1
            )
        ]

    # Many short rounds, since other load on the machine varies.
    yield Step(3 if quick else 10, cells, contenders)


def growth(contenders: list[str], quick: bool) -> Iterator[Step]:
    """Yield measurements of the cost by waiters, processes, holds, keys and rows."""

    def waiters(contender: str) -> list[Cell]:
        return [
            Cell(
                experiment="waiters",
                contender=contender,
                processes=min(count, 20),
                threads=max(1, count // 20),
                hold=MS,
                seconds=1.5 if quick else 3.0,
                # Long enough for all waiters to have started.
                warm_up=max(1.0, count / 100),
            )
            for count in ((1, 20) if quick else (1, 10, 100, 1000))
        ]

    def processes(
        experiment: str, keys: int, hold: float
    ) -> Callable[[str], list[Cell]]:
        return lambda contender: [
            Cell(
                experiment=experiment,
                contender=contender,
                processes=count,
                keys=keys,
                hold=hold,
                seconds=0.7 if quick else 1.2,
                warm_up=0.5,
            )
            for count in ((1, 8) if quick else (1, 4, 16, 64))
        ]

    def held(contender: str) -> list[Cell]:
        return [
            Cell(
                experiment="held",
                contender=contender,
                held=count,
                seconds=0.4 if quick else 0.8,
            )
            for count in ((0, 100) if quick else (0, 9, 99, 999))
        ]

    def keys(experiment: str, processes: int, rows: int) -> Callable[[str], list[Cell]]:
        return lambda contender: [
            Cell(
                experiment=experiment,
                contender=contender,
                processes=processes,
                keys=rows,
                rows=max(rows, 1000),
                seconds=0.7 if quick else 1.5,
            )
        ]

    # SQLite has one writer and no queue for it. It is not meant for a thousand waiters.
    serving = [name for name in contenders if "sqlite" not in name]
    with_rows = [name for name in contenders if name.startswith("dlocks")]
    rounds = 1 if quick else 2
    yield Step(1, processes("processes, one key", 1, MS), serving)
    yield Step(1, processes("processes, own keys", 0, 0.0), contenders)
    yield Step(rounds, held, with_rows)
    yield Step(rounds, keys("keys", 8, 1), with_rows)
    for rows in (1000, 100_000) if quick else (1000, 10_000, 100_000, 1_000_000):
        yield Step(rounds, keys("rows", 1, rows), with_rows, rows)
        yield Step(rounds, keys("keys", 8, rows), with_rows, rows)
    yield Step(1, waiters, serving)


EXPERIMENTS = {"contended": contended, "uncontended": uncontended, "growth": growth}
