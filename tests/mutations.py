"""Check that the suite catches mistakes in the package.

    python -m tests.mutations [NAME ...]

tests/mutations.toml is a list of mistakes. Each one is a change of the package's text.
It names the promise of docs/safety.md that it breaks, and the tests that must fail with
it. The checkout is copied to a temporary directory. There the tests run without a
mistake first, where they must pass, and then once with each mistake. The exit status is
1 if a mistake is not caught, or if its text does not occur exactly once any more.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dlocks"
# What the tests do not need. The servers are linked, since they are large.
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "site", "build", "dist")
# Seconds after which a test has failed that waits forever because of a mistake.
TIMEOUT = 40
# The line by which tests/run.py reports failed tests. With another status of pytest, no
# test has failed.
CAUGHT = re.compile(r"^\w+: FAILED \(1\)$", re.MULTILINE)

# Python reuses compiled code if the size of a file and its second are unchanged.
_seconds = itertools.count(1)


@dataclass(frozen=True)
class Change:
    """A change of the text of one file, which is relative to the package."""

    file: str
    old: str
    new: str

    def made(self, text: str) -> str:
        """Return the text of the file with the change."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(
                f"The text occurs {text.count(self.old)} times in {self.file}:"
                f" {self.old!r}. Change the mistake as the code was changed."
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Search:
    """How the nemesis finds a mistake."""

    # The checks that may report it.
    shows: tuple[str, ...]
    # The parameters of the shortest campaign in which it shows, and the weights of the
    # faults in that.
    plan: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mutation:
    """A mistake in the package."""

    name: str
    # What a user loses. A rewrite of the file replaces the mistake by one with this
    # meaning.
    loss: str
    changes: tuple[Change, ...]
    tests: tuple[str, ...]
    engine: str = "sqlite"
    # The number of the broken promise in docs/safety.md, or the page in docs/ of a
    # feature that is none of these promises.
    promise: int = 0
    page: str = ""
    # What the nemesis needs to find it, if it must.
    nemesis: Search | None = None

    def make(self, package: Path) -> None:
        """Make the mistake in a copy of the package."""
        for name, text in self.texts().items():
            write(package / name, text)

    def undo(self, package: Path) -> None:
        """Copy the right files to a copy of the package."""
        for name in self.texts():
            write(package / name, (PACKAGE / name).read_text())

    def texts(self) -> dict[str, str]:
        """Return the text of each changed file by its name."""
        texts: dict[str, str] = {}
        for change in self.changes:
            text = texts.get(change.file) or (PACKAGE / change.file).read_text()
            try:
                texts[change.file] = change.made(text)
            except ValueError as error:
                raise ValueError(f"{self.name}: {error}") from error
        return texts


def read() -> list[Mutation]:
    """Return the mutations."""
    data = tomllib.loads((ROOT / "tests" / "mutations.toml").read_text())
    return [_mutation(**each) for each in data["mutation"]]


def _mutation(
    file: str,
    old: str,
    new: str,
    tests: Iterable[str],
    also: Iterable[Mapping[str, str]] = (),
    nemesis: Mapping[str, Any] | None = None,
    **others: Any,
) -> Mutation:
    return Mutation(
        changes=(Change(file, old, new), *(Change(**one) for one in also)),
        tests=tuple(tests),
        nemesis=None if nemesis is None else Search(**nemesis),
        **others,
    )


def copy(directory: Path) -> Path:
    """Copy the checkout, and return the copy."""
    # Servers run under an account of their own.
    directory.chmod(0o755)
    root = Path(shutil.copytree(ROOT, directory / "checkout", ignore=LEFT_OUT))
    if (ROOT / ".servers").exists():
        (root / ".servers").symlink_to(ROOT / ".servers")
    return root


def run(root: Path, engine: str, tests: Iterable[str], *options: str) -> str:
    """Run tests in a copy, and return the output."""
    command = [sys.executable, "-m", "tests.run", engine, "--", *tests, *options]
    return subprocess.run(
        [*command, "-q", "--tb=no", f"--timeout={TIMEOUT}", "-p", "no:randomly"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


def write(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, (moment := next(_seconds), moment))


def first_failure(output: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return found[1] if found else f"ended by --timeout={TIMEOUT}"


def main(names: list[str]) -> int:
    known = read()
    if unknown := set(names) - {mutation.name for mutation in known}:
        print(f"Unknown: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    mutations = [one for one in known if not names or one.name in names]
    for mutation in mutations:
        # This raises an error if the code was changed.
        mutation.texts()
    missed = []
    with tempfile.TemporaryDirectory(prefix="dlocks-mutations-") as directory:
        root = copy(Path(directory))
        for engine in sorted({mutation.engine for mutation in mutations}):
            tests = {
                test for one in mutations if one.engine == engine for test in one.tests
            }
            output = run(root, engine, sorted(tests))
            if f"{engine}: passed" not in output:
                print(output, "The tests fail without any mistake.", sep="\n")
                return 1
        for mutation in mutations:
            began = time.monotonic()
            mutation.make(root / "dlocks")
            output = run(root, mutation.engine, mutation.tests, "-x")
            mutation.undo(root / "dlocks")
            seconds = f"{time.monotonic() - began:.0f} s"
            if CAUGHT.search(output):
                how = f"caught by {first_failure(output)}"
            else:
                missed.append(mutation.name)
                how = "NOT CAUGHT" + (
                    "" if f"{mutation.engine}: passed" in output else f"\n{output}"
                )
            print(f"{mutation.name}: {how} ({mutation.engine}, {seconds})", flush=True)
    print(f"{len(mutations) - len(missed)} of {len(mutations)} mistakes were caught.")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
