"""Run the SQLite tests with every supported Python that is installed.

The newest Python has the newest Django. It also runs the tests of the admin and of the
commands on PostgreSQL, since their queries depend on Django and on the engine.

The script itself needs no packages. PostgreSQL is needed for that last part.

With ``--others``, skip the Python version that runs this script, since the suite has
already run with it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
# Tests that depend on the database, on the documentation or on random programs. The
# admin is left to a few of its files.
NEITHER = (
    "tests/admin/test_maintenance.py",
    "tests/admin/test_records.py",
    "tests/admin/test_security.py",
    "tests/promises/locks/test_fuzz.py",
    "tests/promises/locks/test_races.py",
    "tests/units/locks/test_simulation.py",
    "tests/units/database",
    "tests/units/session",
    "tests/nemesis",
    "tests/project",
    "tests/promises/session",
    *(
        f"tests/promises/database/{path.name}"
        for path in (ROOT / "tests/promises/database").glob("test_*.py")
        if path.name != "test_transactions.py"
    ),
    "tests/units/database",
    "tests/units/locks/test_simulation.py",
)
# Tests that depend on the version of Python. All others depend on that of Django, and
# the newest Python has the newest Django.
PYTHON = (
    "tests/promises",
    "tests/testing",
    "tests/units",
    "tests/test_asgi.py",
    "tests/test_decorators.py",
    "tests/promises/database/test_transactions.py",
)
# Promises that depend on the version of Django alone.
DJANGO = (
    "tests/promises/admin",
    "tests/promises/commands",
    "tests/promises/election",
    "tests/promises/optimistic",
)
# Tests that depend on both the version of Django and the engine.
QUERIES = ("tests/promises/admin", "tests/promises/commands")
# Shards per Python version. Two or three versions run in parallel.
SHARDS = 2 if "--others" in sys.argv[1:] else 3


def main() -> int:
    this = f"{sys.version_info[0]}.{sys.version_info[1]}"
    versions = [
        version
        for version in VERSIONS
        if "--others" not in sys.argv[1:] or version != this
    ]
    found = {
        version: python for version in versions if (python := find(version)) is not None
    }
    if not found:
        print(f"None of Python {', '.join(VERSIONS)} was found.", file=sys.stderr)
        return 1
    # In parallel, since the suite waits more than it computes.
    with ThreadPoolExecutor(len(versions)) as pool:
        runs = {
            version: pool.submit(attempt, version, found.get(version))
            for version in versions
        }
        outcomes = {version: one.result() for version, one in runs.items()}
    print("==> summary")
    for version, outcome in outcomes.items():
        print(f"Python {version}: {outcome}")
    return int(any("FAILED" in outcome for outcome in outcomes.values()))


def attempt(version: str, python: Path | None) -> str:
    """Run the suite with an interpreter, if there is one, and return the outcome."""
    if python is None:
        return "not found, not run"
    try:
        return run(version, python)
    except subprocess.CalledProcessError as error:
        return (
            f"FAILED: {' '.join(map(str, error.cmd[1:4]))} … ended with"
            f" {error.returncode}"
        )


def find(version: str) -> Path | None:
    """Return an interpreter of this version, or None.

    It must run and be able to create a virtual environment.
    """
    name = f"python{version}"
    places = [Path(place) / name for place in os.get_exec_path()]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    newest_first = sorted(
        pyenv.glob(f"{version}.*"), key=lambda path: _digits(path.name), reverse=True
    )
    places += [path / "bin" / name for path in newest_first]
    return next(
        (place for place in places if place.is_file() and _runs(place, version)), None
    )


def _digits(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in name.split(".") if part.isdigit())


def _runs(python: Path, version: str) -> bool:
    # A pyenv shim can exist and still fail.
    code = "import sys, ensurepip, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0 and answer.stdout.strip() == version


def run(version: str, python: Path) -> str:
    """Run the suite in the environment of this version, and return the outcome."""
    environment = ROOT / f".venv-{version}"
    inside = environment / "bin" / "python"
    stamp = environment / ".installed"
    state = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != state:
        print(f"==> Python {version}: installing", flush=True)
        shutil.rmtree(environment, ignore_errors=True)
        _call(python, "-m", "venv", environment)
        install = (
            inside,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
        )
        _call(*install, "--upgrade", "pip>=25.1")
        # A new environment gets the newest Django that this Python and pyproject.toml
        # allow.
        _call(*install, "--editable", ".[postgresql]", "--group", "test-sqlite")
        stamp.write_text(state)
    code = (
        "import django, platform; print(f'{platform.python_version()}, Django"
        " {django.__version__}')"
    )
    what = subprocess.run(
        [inside, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    print(f"==> Python {what}", flush=True)
    environ = dict(os.environ)
    if "--others" in sys.argv[1:]:
        # Tests marked ``once`` do not depend on the Python version: models, and what
        # other processes do to a holder. Pages depend on Django's.
        words = ["-m 'not once'", *map("--ignore={}".format, NEITHER)]
        if version != VERSIONS[-1]:
            words += [*PYTHON, *map("--ignore={}".format, DJANGO)]
        which = " ".join(words)
        environ["PYTEST_ADDOPTS"] = f"{environ.get('PYTEST_ADDOPTS', '')} {which}"
    environ.setdefault("DLOCKS_TEST_SHARDS", str(SHARDS))
    command = [inside, "-m", "tests.run"]
    runs = [([*command, "sqlite"], environ)]
    if version == VERSIONS[-1]:
        runs.append(([*command, "postgresql", "--", "-q", *QUERIES], dict(os.environ)))
    failures: dict[str, None] = {}
    statuses = [_test(version, *run, failures) for run in runs]
    if not any(statuses):
        return f"passed ({what})"
    return "\n    ".join([f"FAILED ({max(statuses)}) ({what})", *failures])


def _test(
    version: str,
    command: list[object],
    environ: dict[str, str],
    failures: dict[str, None],
) -> int:
    """Run tests, print and collect their failures, and return the exit status."""
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout or ():
        print(f"Python {version}, {line}", end="", flush=True)
        if re.search(r"(?:^|\| )(FAILED|ERROR) ", line):
            failures[line.rstrip()] = None
    return abs(process.wait())


def _call(*command: object) -> None:
    subprocess.run([str(word) for word in command], cwd=ROOT, check=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
