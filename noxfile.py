"""Checks in environments of their own, which nox makes from the package index.

``make test-all`` and ``make package`` run them. Nothing of the environment of ``make``
is visible there.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
DIST = ROOT / "dist"

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
# A Python that is not installed is skipped, and the summary says so.
nox.options.error_on_missing_interpreters = False

# The shims of pyenv only find the versions that are named here.
PYENV = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
os.environ.setdefault(
    "PYENV_VERSION", ":".join(path.name for path in PYENV.glob("versions/3.*"))
)

# "make test-all" has fetched Python 3.14, unless that was impossible.
os.environ["PATH"] += f":{ROOT / '.servers' / 'python3.14' / 'bin'}"
THIS_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
NEWEST_DJANGO = "6.1"
MATRIX = [
    ("3.11", "5.2", "sqlite"),
    ("3.12", "6.0", "sqlite"),
    ("3.13", NEWEST_DJANGO, "sqlite"),
    # What a new user installs.
    ("3.14", NEWEST_DJANGO, "postgresql"),
    ("3.14", NEWEST_DJANGO, "mariadb"),
]
# Tests that depend neither on the version of Python nor on that of Django, but on the
# database, on the documentation or on random programs.
NEITHER = (
    "campaign", "database", "nemesis", "project", "session", "test_fuzz.py",
    "test_holders.py", "test_races.py", "test_records.py", "test_security.py",
    "test_simulation.py",
)  # fmt: skip
# Tests that depend on the version of Django. The newest one is tested.
DJANGO = (
    "admin", "commands", "election", "optimistic", "test_contract.py",
    "test_history.py", "test_responses.py", "test_schedules.py", "test_settings.py",
    "test_telemetry.py",
)  # fmt: skip
# Tests of queries, storage and transactions. They depend on Django and on the engine.
# Those of signals depend on how the newest Python compiles our code.
SERVERS = (
    "admin", "commands", "test_contract.py", "test_guard.py", "test_signals.py",
    "test_table.py", "test_transactions.py",
)  # fmt: skip


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist, and from it the wheel, and check the files in them."""
    session.install(*nox.project.dependency_groups(PROJECT, "package"))
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("check-sdist", "--installer=uv")
    session.run("python", "-m", "build", "--installer=uv", "--outdir", DIST)
    session.run("check-wheel-contents", DIST)
    session.run("twine", "check", "--strict", *DIST.iterdir())


@nox.session(python=sorted({THIS_PYTHON, MATRIX[-1][0]}), requires=["build"])
def package(session: nox.Session) -> None:
    """Use the wheel in a new project, where only its dependencies are installed.

    On each Python, this is the newest Django that supports it.
    """
    session.install(*DIST.glob("*.whl"))
    shutil.rmtree(session.create_tmp())
    session.chdir(session.create_tmp())
    session.run("django-admin", "startproject", "trial", ".")
    test = ROOT / "scripts" / "smoke_test.py"
    session.run("python", "-W", "error", test, env={"PYTHONPATH": None})


@nox.session(allow_parallel=True, reuse_venv=True)
@nox.parametrize(("python", "django", "engine"), MATRIX)
def tests(session: nox.Session, django: str, engine: str) -> None:
    """Run the tests on SQLite, or those that a server makes a difference for.

    With ``--others``, run only tests that depend on the version of Python or of Django,
    and skip the Python that runs nox, since the suite has already run with it.
    """
    others = engine == "sqlite" and "--others" in session.posargs
    if others and session.python == THIS_PYTHON:
        session.skip("the suite has run with this Python")
    group = "test-sqlite" if engine == "sqlite" else "test"
    session.install("--editable=.", f"--group={group}", f"django=={django}.*")
    session.run(
        "python", "-c", "import django, sys; print(sys.version, django.VERSION)"
    )
    run = ["python", "-m", "tests.run", engine]
    two = ["-q", "-n", "2", "--dist=worksteal", "-m"]
    if engine != "sqlite":
        session.run(*run, "--", *two, "not once", *paths(session, SERVERS))
    elif others:
        # Tests marked "once" do not depend on the version of Python.
        ignored = NEITHER if django == NEWEST_DJANGO else NEITHER + DJANGO
        globs = " ".join(f"--ignore-glob=*/{name}" for name in ignored)
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} -m 'not once' {globs}"
        session.run(*run, env={"PYTEST_ADDOPTS": options, "DLOCKS_TEST_WORKERS": "2"})
    else:
        session.run(*run, env={"DLOCKS_TEST_WORKERS": "3"})
    if engine == "sqlite" and django == NEWEST_DJANGO:
        session.run(*run, "--", *two, "pages and not nightly")


def paths(session: nox.Session, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files and folders of tests with these names."""
    for name in names:
        found = sorted(ROOT.glob(f"tests/**/{name}"))
        if not found:
            session.error(f"tests/ has no {name}")
        yield from found
