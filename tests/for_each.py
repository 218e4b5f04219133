"""A test that runs for several values of an argument, with one set-up.

pytest sets a parametrized test up again for each value, which takes longer than most
tests themselves.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from contextlib import contextmanager
from typing import Any

from asgiref.sync import sync_to_async
from django.db import connection

from dlocks.models import ResourceLock


@contextmanager
def _named(name, value):
    try:
        yield
    except BaseException as error:
        error.add_note(f"This was with {name}={value!r}.")
        raise


def for_each(name: str, values: Iterable[Any]):
    """Run the test for each value in turn, and delete the rows of locks in between."""

    def decorate(test):
        signature = inspect.signature(test)

        if inspect.iscoroutinefunction(test):

            async def run(**kwargs):
                for value in values:
                    with _named(name, value):
                        await test(**kwargs, **{name: value})
                    await sync_to_async(ResourceLock.objects.using("default").delete)()

        else:

            def run(**kwargs):
                for value in values:
                    with _named(name, value):
                        test(**kwargs, **{name: value})
                    ResourceLock.objects.using("default").delete()

        functools.update_wrapper(run, test)
        # pytest would find the arguments of the wrapped function.
        del run.__wrapped__
        run.__signature__ = signature.replace(
            parameters=[
                parameter
                for parameter in signature.parameters.values()
                if parameter.name != name
            ]
        )
        return run

    return decorate


# The strategies of the database backend, and the backends whose leases can expire, be
# cleared and be handed over.
ROWS = ["default", "optimistic", "insert"]
FAMILY = for_each("using", ROWS)
LEASES = for_each("using", [*ROWS, "memory"])
EVERY = (
    LEASES if connection.vendor == "sqlite" else for_each("using", [*ROWS, "session"])
)
