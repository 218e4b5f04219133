"""The mistakes that the suite catches. ``python -m tests.mutations`` makes them."""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import mutations
from tests.nemesis import checker
from tests.nemesis.__main__ import bug_plan
from tests.nemesis.bugs import BUGS
from tests.nemesis.campaign import Campaign

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]

MUTATIONS = mutations.read()


def test_each_mistake_is_still_a_change_of_the_code():
    """A mistake of the list can be made in the package as it is today."""
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    for mutation in MUTATIONS:
        # This raises an error that names the mistake and the file.
        mutation.texts()


def test_each_promise_is_broken_by_four_mistakes():
    """A mistake that breaks none names the page of the feature that it breaks."""
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


def test_the_documentation_gives_the_numbers():
    text = (mutations.ROOT / "docs" / "reliability.md").read_text()
    assert f" makes {len(MUTATIONS)} mistakes in the code" in text
    assert f" finds {len(BUGS)} seeded bugs" in text


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
                assert re.search(rf"^class {kind}[(:]", text, re.MULTILINE), test
            assert f"def {name}(" in (text + shared if classes else text), test


def test_the_nemesis_can_look_for_its_mistakes():
    """Each of them has a campaign, and a check that may report it."""
    assert checker.__doc__ is not None
    checks = set(re.findall(r"^\* (\w+):", checker.__doc__, re.MULTILINE))
    for name, search in BUGS.items():
        # This raises an error for an unknown parameter.
        assert bug_plan(name).bug == name
        assert set(search.shows) <= checks, name
        assert all(hasattr(Campaign, f"_fault_{one}") for one in search.faults), name
