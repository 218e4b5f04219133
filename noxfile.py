"""Checks in environments of their own, which nox makes from the package index.

Nothing of the environment of ``make`` is visible there.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
DIST = ROOT / "dist"

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv|virtualenv"


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdist, and from it the wheel, and check the files in them."""
    session.install(*nox.project.dependency_groups(PROJECT, "package"))
    shutil.rmtree(DIST, ignore_errors=True)
    session.run("check-sdist", "--installer=uv")
    session.run("python", "-m", "build", "--installer=uv", "--outdir", DIST)
    session.run("check-wheel-contents", DIST)
    session.run("twine", "check", "--strict", *DIST.iterdir())


@nox.session(requires=["build"])
def package(session: nox.Session) -> None:
    """Use the wheel in a new project, where only its dependencies are installed."""
    session.install(*DIST.glob("*.whl"))
    shutil.rmtree(session.create_tmp())
    session.chdir(session.create_tmp())
    session.run("django-admin", "startproject", "trial", ".")
    test = ROOT / "scripts" / "smoke_test.py"
    session.run("python", "-W", "error", test, env={"PYTHONPATH": None})
