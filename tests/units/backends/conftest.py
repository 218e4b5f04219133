"""The servers of tests/promises/backends."""

from tests.promises.backends.conftest import *  # noqa: F403
