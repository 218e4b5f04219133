"""The mistakes that the suite catches. ``python -m tests.mutations`` makes them."""

from __future__ import annotations

import functools
import re
from collections import Counter
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


def test_each_promise_is_broken_by_four_mistakes():
    """Each of the promises of docs/safety.md has tests that notice when it breaks.

    A mistake that breaks none of them names the page of the feature that it breaks.
    """
    docs = mutations.ROOT / "docs"
    promised = (docs / "safety.md").read_text().partition("\n## What is not")[0]
    numbers = {
        int(number) for number in re.findall(r"^(\d+)\. ", promised, re.MULTILINE)
    }
    broken = Counter(mutation.promise for mutation in MUTATIONS if not mutation.page)
    assert set(broken) == numbers
    assert min(broken.values()) >= 4, broken
    for mutation in MUTATIONS:
        assert mutation.loss.endswith("."), mutation.name
        if mutation.page:
            assert not mutation.promise, mutation.name
            assert (docs / mutation.page).is_file(), mutation.name


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
