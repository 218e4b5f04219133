"""Fixtures for pytest, available once dlocks is installed.

No other module of dlocks is imported before a test uses a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dlocks.testing import FrozenClock


@pytest.fixture
def memory_locks() -> Iterator[None]:
    """Use locks in the memory of the process, empty for each test."""
    from dlocks.testing import override_locks

    with override_locks("memory"):
        yield


@pytest.fixture
def dummy_locks() -> Iterator[None]:
    """Use locks that exclude no other caller."""
    from dlocks.testing import override_locks

    with override_locks("dummy"):
        yield


@pytest.fixture
def frozen_lock_clock() -> Iterator[FrozenClock]:
    """Freeze the clock of the locks. ``tick(seconds)`` advances it."""
    from dlocks.testing import frozen_clock

    with frozen_clock() as clock:
        yield clock


@pytest.fixture
def lock_held_elsewhere(
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., None]]:
    """Return a function that holds a key as another process would.

    The key is released at the end of the test.
    """
    from dlocks.testing import held_elsewhere

    for name in {"db", "transactional_db"}.intersection(request.fixturenames):
        # The database must be accessible until the release, whatever the order of the
        # test's arguments is.
        request.getfixturevalue(name)
    with ExitStack() as stack:

        def hold(key: str, **options: Any) -> None:
            stack.enter_context(held_elsewhere(key, **options))

        yield hold
