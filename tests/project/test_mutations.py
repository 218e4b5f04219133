"""The mistakes that the suite catches. ``python -m tests.mutations`` makes them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from tests import mutations
from tests.nemesis.bugs import BUGS

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]

MUTATIONS, NOT_A_TEXT = mutations.read()


def test_each_mistake_is_still_a_change_of_the_code():
    """A mistake of the list can be made in the package as it is today."""
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in MUTATIONS:
        # This raises an error that names the mistake and the file.
        mutation.applied()


def test_the_tests_that_catch_a_mistake_exist():
    """No mistake stays unnoticed because its test was renamed or deleted."""
    read = functools.cache(Path.read_text)
    paths = (mutations.ROOT / "tests/contract").glob("*.py")
    shared = "".join(map(read, paths))
    for mutation in MUTATIONS:
        assert mutation.tests, mutation.name
        for test in mutation.tests:
            file, *names = test.partition("[")[0].split("::")
            text = read(mutations.ROOT / file)
            *classes, name = names
            for kind in classes:
                assert re.search(rf"^class {kind}\(", text, re.MULTILINE), test
            assert f"def {name}(" in (text + shared if classes else text), test


def test_each_seeded_bug_of_the_nemesis_is_also_a_mistake():
    """The suite catches what the nemesis finds, except what no text can show."""
    names = {mutation.name for mutation in MUTATIONS}
    assert set(BUGS) == set(BUGS) & names | set(NOT_A_TEXT)
    assert not names & set(NOT_A_TEXT)
    assert all(NOT_A_TEXT.values())
