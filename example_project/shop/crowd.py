"""Processes that buy at the same time, each with its own database connection."""

# Each process imports this module before Django is set up in it, so the module must not
# import Django.
from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Self

from example_project.shop.workers import Worker, WorkerError, WorkerPool

if TYPE_CHECKING:
    from example_project.shop.services import Purchase

CrowdError = WorkerError


class Crowd:
    """Buyer processes that run for the length of a ``with`` block."""

    def __init__(self, size: int) -> None:
        self._crew = WorkerPool(size, _serve)

    def __enter__(self) -> Self:
        self._crew.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._crew.__exit__(*exc)

    def buy(
        self, product_id: int, lock: str, buyers: list[str]
    ) -> Iterator[Purchase | None]:
        """Let each buyer buy one piece, and yield the purchases as they come.

        All processes start at the same time. The first value is None and marks the
        start.
        """
        crew = self._crew
        size = len(crew)
        crew.tell_each(
            [(product_id, lock, buyers[number::size]) for number in range(size)]
        )
        for number in range(size):
            crew.hear(number)
        crew.tell("go")
        yield None
        buying = dict(zip(crew.pipes, range(size), strict=True))
        while buying:
            for pipe in wait(list(buying)):
                purchase = crew.hear(buying[pipe])
                if purchase is None:
                    del buying[pipe]
                else:
                    yield purchase


def _serve(worker: Worker) -> None:
    """Serve the requests of one process until the parent closes the pipe."""
    from django.db import connection

    from example_project.shop.services import buy

    connection.ensure_connection()
    requests = iter(worker)
    for product_id, lock, buyers in requests:
        worker.say("ready")
        next(requests, None)
        for buyer in buyers:
            if worker.closed:
                return
            worker.say(buy(product_id, buyer, lock))
        worker.say(None)
