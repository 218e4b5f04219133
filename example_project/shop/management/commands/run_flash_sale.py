"""The process that runs a flash sale for the page.

It resumes the hold that the page has acquired, and sells.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import asdict

from django.core.management.base import BaseCommand
from django.db import OperationalError
from django.utils import timezone

from dlocks import resume_hold
from example_project.shop.crowd import Crowd, CrowdError
from example_project.shop.models import FlashSale
from example_project.shop.sale import Round, sell

# Seconds between two updates of the page.
TELL_EVERY = 0.2


class Command(BaseCommand):
    help = (
        "Run the flash sale that the page has started. The text of its hold is read"
        " from the standard input."
    )

    def add_arguments(self, parser):
        parser.add_argument("sale", type=int)

    def handle(self, *, sale, **options):
        with resume_hold(sys.stdin.readline().strip()):
            sale = FlashSale.objects.get(pk=sale)
            try:
                self._sell(sale)
            except CrowdError as error:
                # The last line of a traceback, without the class of the error.
                last = str(error).strip().splitlines()[-1]
                sale.trouble = (
                    f"The sale was aborted. {last.partition(': ')[2] or last}"
                )
            except BaseException:
                sale.trouble = "The sale was aborted."
                raise
            finally:
                sale.ended = timezone.now()
                sale.save()

    def _sell(self, sale: FlashSale) -> None:
        rounds: list[dict] = []
        told = 0.0

        def tell(one: Round) -> None:
            nonlocal told
            if (now := time.monotonic()) >= told + TELL_EVERY:
                told = now
                sale.rounds = [*rounds, asdict(one)]
                # If the database is busy, the next update shows this progress.
                with suppress(OperationalError):
                    sale.save(update_fields=["rounds"])

        with Crowd(min(sale.PROCESSES, sale.buyers)) as crowd:
            for one in sell(crowd, sale.locks, sale.stock, sale.buyers, tell):
                rounds.append(asdict(one))
                sale.rounds = list(rounds)
                sale.save(update_fields=["rounds"])
