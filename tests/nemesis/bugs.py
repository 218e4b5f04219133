"""The mistakes of tests/mutations.toml that the nemesis has to find.

They are mistakes that were found in other locks. A harness that finds nothing proves
nothing until it has found known bugs.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests import mutations

_MUTATIONS = {one.name: one for one in mutations.read()}
# How each of them is found.
BUGS = {name: one.nemesis for name, one in _MUTATIONS.items() if one.nemesis}
# The checks that fail without any lock.
WITHOUT_A_LOCK = {"tokens", "exclusion", "updates"}


@contextlib.contextmanager
def package_with(bug: str) -> Iterator[Path]:
    """Yield a directory from which the package is imported with a bug."""
    with tempfile.TemporaryDirectory(prefix="dlocks-bug-") as directory:
        package = Path(shutil.copytree(mutations.PACKAGE, Path(directory, "dlocks")))
        _MUTATIONS[bug].make(package)
        yield Path(directory)
