"""A command that sells a product to many buyers, without and with each lock."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack

from django.core.management.base import BaseCommand, CommandError
from django.db import connection

from example_project.shop.crowd import Crowd, CrowdError
from example_project.shop.models import Product
from example_project.shop.sale import MEANINGS, TITLES, WHY_SLOWER, Round, sell
from example_project.shop.services import LOCKS


class Command(BaseCommand):
    help = (
        "Sell a stock to many buyers in several processes, first without a lock and"
        " then with each lock. The exit status is 0 if more than the stock was sold"
        " without a lock, and exactly the stock with each lock."
    )

    def add_arguments(self, parser):
        parser.add_argument(
            "--buyers",
            type=_number(2, 10_000),
            default=240,
            help="number of buyers (240)",
        )
        parser.add_argument(
            "--processes",
            type=_number(2, 64),
            default=8,
            help="number of processes (8)",
        )
        parser.add_argument(
            "--stock",
            type=_number(1, 9_999),
            default=100,
            help="pieces in stock (100)",
        )

    def handle(self, *, buyers, processes, stock, **options):
        if buyers <= stock:
            raise CommandError(
                f"--buyers ({buyers}) must be more than --stock ({stock})."
            )
        if processes > buyers:
            raise CommandError(
                f"--processes ({processes}) cannot be more than --buyers ({buyers})."
            )
        if Product._meta.db_table not in connection.introspection.table_names():
            raise CommandError(
                "The shop has no tables yet. Run 'manage.py migrate' first."
            )
        try:
            from rich.console import Console
        except ImportError as error:
            raise CommandError(
                "flash_sale needs the package rich: run 'pip install rich' or 'pip"
                " install --group demo'."
            ) from error
        console = Console(file=options.get("stdout") or sys.stdout, highlight=False)
        try:
            rounds = self._sell(console, buyers, processes, stock)
        except CrowdError as error:
            raise CommandError(f"The sale was aborted. {error}") from error
        except KeyboardInterrupt:
            console.print("Interrupted: the sale was aborted.", style="red")
            sys.exit(130)
        console.print(_table(rounds))
        for one in rounds:
            # A project may use other backends.
            if one.lock in MEANINGS:
                console.print(f"{one.title}: {MEANINGS[one.lock]}")
        console.print(f"{WHY_SLOWER}\n")
        complaints = [
            complaint for one in rounds if (complaint := one.complaint) is not None
        ]
        if complaints:
            console.print(f"FAILED: {'; '.join(complaints)}.", style="bold red")
            sys.exit(1)
        console.print(
            f"All locks held. Of a stock of {stock}, {rounds[0].sold} were sold without"
            f" a lock, and exactly {stock} with each lock and with optimistic locking"
            " on the row.",
            style="bold green",
        )

    def _sell(self, console, buyers, processes, stock):
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        console.print(
            f"Flash sale: {stock} pieces, {buyers} buyers in {processes} processes."
        )
        columns = [
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        ]
        with ExitStack() as stack:
            with console.status("Starting the processes …"):
                crowd = stack.enter_context(Crowd(processes))
            progress = stack.enter_context(Progress(*columns, console=console))
            tasks = {
                lock: progress.add_task(TITLES[lock], total=buyers, start=False)
                for lock in LOCKS
            }

            def tell(one: Round) -> None:
                if one.served == 0:
                    # This may be a further attempt.
                    progress.reset(tasks[one.lock])
                progress.update(tasks[one.lock], completed=one.served)

            rounds = []
            for one in sell(crowd, LOCKS, stock, buyers, tell):
                progress.stop_task(tasks[one.lock])
                rounds.append(one)
        return rounds


def _table(rounds: list[Round]):
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("lock", no_wrap=True)
    for heading in (
        "sold",
        "oversold",
        "refused",
        "conflicts\nretried",
        "waits",
        "sales per\nsecond",
        "seconds",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in rounds:
        wrong = "red" if one.oversold else None
        table.add_row(
            one.title,
            str(one.sold),
            str(one.oversold),
            str(one.refused),
            str(one.conflicts),
            str(one.waits),
            f"{one.sold / one.seconds:.0f}",
            f"{one.seconds:.1f}",
            style=wrong,
        )
    return table


def _number(least: int, most: int) -> Callable[[str], int]:
    """Return a function that parses an argument as a whole number within limits.

    It raises ArgumentTypeError for other arguments.
    """

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a whole number."
            ) from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"{text} is not between {least} and {most}."
            )
        return value

    return number
