"""Build the package, and test the wheel in a new environment and project.

Nothing of this source tree is visible there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "dlocks"

# Files that must be there, whatever else is in the tree.
ESSENTIAL = (
    "dlocks/py.typed",
    "dlocks/migrations/0001_initial.py",
    "dlocks/templates/",
    "dlocks/static/",
    "dlocks/backends/redis/lua/",
    "dlocks/sql/innodb_queue.sql",
)
OF_THE_SDIST = (
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "LICENSE",
    "Makefile",
    "manage.py",
    "tests/run.py",
    "mkdocs.yml",
    "docs/index.md",
)

INSTALLED = """
import importlib.metadata, json, re
print(json.dumps({
    re.sub("[-_.]+", "-", one.metadata["Name"]).lower(): [
        re.match("[A-Za-z0-9._-]+", text)[0].lower()
        for text in one.requires or []
        if "extra ==" not in text
    ]
    for one in importlib.metadata.distributions()
}))
"""

TRIAL = """
import io, os, threading
import django
django.setup()
from django.core.management import call_command, get_commands
import dlocks
from dlocks import db_lock

place = os.path.dirname(dlocks.__file__)
assert place.startswith(os.environ["TRIAL_VENV"]), place

def try_to_acquire(outcome):
    from django.db import connections
    other = db_lock("stock:7").try_acquire()
    outcome.append(other)
    if other is not None:
        other.release()
    connections.close_all()

def acquire_in_other_thread():
    outcome = []
    thread = threading.Thread(target=try_to_acquire, args=(outcome,))
    thread.start()
    thread.join()
    return outcome[0]

with db_lock("stock:7") as hold:
    assert hold.held
    assert acquire_in_other_thread() is None, "a second thread got the key too"
    if "list_locks" in get_commands():
        listing = io.StringIO()
        call_command("list_locks", stdout=listing)
        assert "stock:7" in listing.getvalue(), listing.getvalue()
        print(listing.getvalue().rstrip())
assert not hold.held
assert acquire_in_other_thread() is not None, "the key was not released"
"""


class PackageError(Exception):
    """The error for a package that is incomplete or wrong."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="dlocks-package-") as name:
        directory = Path(name).resolve()
        try:
            wheel = build(directory / "dist")
            look_into(wheel)
            environment = install(wheel, directory / "venv")
            try_out(environment, directory / "project")
        except PackageError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        print(f"{wheel.name} is fine.")
    return 0


def build(directory: Path) -> Path:
    """Build the sdist, then the wheel from it, and return the wheel."""
    say("building the sdist and the wheel")
    call([sys.executable, "-m", "build", "--outdir", directory, ROOT])
    (sdist,) = directory.glob("*.tar.gz")
    (wheel,) = directory.glob("*.whl")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in OF_THE_SDIST if name not in inside]:
        raise PackageError(f"{sdist.name} lacks {', '.join(missing)}.")
    return wheel


def look_into(wheel: Path) -> None:
    """Check that the wheel contains all files of the package and no others."""
    say(f"looking into {wheel.name}")
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    tree = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    if missing := sorted(tree - inside):
        raise PackageError(f"the wheel lacks {', '.join(missing)}.")
    if absent := [
        name for name in ESSENTIAL if not any(file.startswith(name) for file in inside)
    ]:
        raise PackageError(f"neither the tree nor the wheel has {', '.join(absent)}.")
    foreign = sorted(name for name in inside - tree if ".dist-info/" not in name)
    if foreign:
        raise PackageError(
            f"the wheel has what is not the package's: {', '.join(foreign)}."
        )


def install(wheel: Path, directory: Path) -> Path:
    """Install the wheel into a new environment, and return the environment.

    Check that no other package than Django was installed with it.
    """
    say("installing it where nothing else is")
    venv.create(directory, with_pip=True, clear=True)
    python = directory / "bin" / "python"
    call(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            wheel,
        ]
    )
    installed: dict[str, list[str]] = json.loads(call([python, "-c", INSTALLED]))
    expected = {"dlocks", "django", "pip", "setuptools", *installed["django"]}
    if besides := sorted(set(installed) - expected):
        raise PackageError(f"besides Django, {', '.join(besides)} was installed.")
    if installed["dlocks"] != ["django"]:
        raise PackageError(f"it requires {installed['dlocks']}, not Django alone.")
    print(f"    installed: {', '.join(sorted(set(installed) - {'pip', 'setuptools'}))}")
    return directory


def try_out(environment: Path, directory: Path) -> None:
    """Acquire a lock in a new project that has no settings for it."""
    say("taking a lock in a new project")
    python = environment / "bin" / "python"
    directory.mkdir()
    call([python, "-m", "django", "startproject", "trial", directory])
    with (directory / "trial" / "settings.py").open("a") as settings:
        settings.write('\nINSTALLED_APPS += ["dlocks"]\n')
    call([python, "manage.py", "check"], cwd=directory)
    call([python, "manage.py", "makemigrations", "--check", "--dry-run"], cwd=directory)
    call([python, "manage.py", "migrate", "--verbosity", "0"], cwd=directory)
    more = {"DJANGO_SETTINGS_MODULE": "trial.settings", "TRIAL_VENV": str(environment)}
    print(
        call(
            [python, "-W", "error::ResourceWarning", "-c", TRIAL], cwd=directory, **more
        ).rstrip()
    )


def say(what: str) -> None:
    print(f"==> {what}", flush=True)


def call(command: list[object], *, cwd: Path | None = None, **more: str) -> str:
    """Run a command to its end, outside of this source tree.

    Return its output. Raise PackageError if it fails.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "DJANGO"))
    }
    finished = subprocess.run(
        [str(word) for word in command],
        cwd=cwd or tempfile.gettempdir(),
        env={**environment, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode:
        what = " ".join(map(str, command[1:4]))
        raise PackageError(
            f"{what} … ended with"
            f" {finished.returncode}.\n{finished.stdout}{finished.stderr}"
        )
    return finished.stdout


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
