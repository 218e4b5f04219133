"""Finalizers that strike at a given moment."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from dlocks import LockBackendError


def by_finalizer(function: Callable[[], object]) -> Callable[[], None]:
    """Return a function that lets the garbage collector call a ``__del__()``."""

    class Garbage:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            function()

    def strike() -> None:
        Garbage()
        gc.collect()

    return strike


def noting(answers: list[Any], ask: Callable[[], Any]) -> Callable[[], None]:
    """Return a function that adds the answer to a request, or the text of its error."""

    def note() -> None:
        try:
            answers.append(ask())
        except LockBackendError as error:
            answers.append(str(error))

    return note
