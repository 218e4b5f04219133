"""The places at which tests of the database backends cause faults.

They are a backend of the ``DLOCKS`` setting, which derives from a public one, and
``execute_wrapper()`` of Django's connections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from dlocks.backends.database import PessimisticBackend


class WatchedBackend(PessimisticBackend):
    """A backend whose requests tests delay, answer or interrupt.

    ``around`` has the code that runs instead of a method, by the method's name. Its
    first argument is the method.
    """

    around: ClassVar[dict[str, Callable[..., Any]]] = {}

    def acquire(self, *arguments):
        return self._call("acquire", super().acquire, *arguments)

    def enqueue(self, *arguments):
        return self._call("enqueue", super().enqueue, *arguments)

    def poll(self, *arguments, **options):
        return self._call("poll", super().poll, *arguments, **options)

    def release(self, *arguments, **options):
        return self._call("release", super().release, *arguments, **options)

    def _call(self, name, method, *arguments, **options):
        if (code := self.around.get(name)) is None:
            return method(*arguments, **options)
        return code(method, *arguments, **options)
