"""The files of a release: what a package index and a contributor find."""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from pathlib import Path

import django
import pytest
import yaml
from django.core.checks import run_checks

pytestmark = [pytest.mark.front, pytest.mark.once]

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# noxfile.py needs nox, which the tests do not.
_text = (ROOT / "noxfile.py").read_text()
_newest = re.search(r"^NEWEST_DJANGO = (.*)$", _text, re.MULTILINE)[1]
_matrix = re.search(r"^MATRIX = (\[.*?^\])", _text, re.MULTILINE | re.DOTALL)[1]
MATRIX = ast.literal_eval(_matrix.replace("NEWEST_DJANGO", _newest))

# A released migration never changes, since databases have it already. Until the first
# release, this digest follows the file.
MIGRATIONS = {
    "0001_initial.py": (
        "82c4042504c7e42988c596f4ce7129f0c3730cb501cd6672b27e62719750ac70"
    ),
}


def missing(changelog, urls):
    """Return what a release lacks. An unreleased version may lack it."""
    heading = re.search(r"^## \[([\d.]+)\] - (\S+)$", changelog, re.MULTILINE)
    if heading is None:
        return ["the heading of the version in CHANGELOG.md"]
    if heading[2] == "Unreleased":
        return []
    placeholders = [name for name, url in urls.items() if "OWNER" in url]
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[2]):
        placeholders.append("the date in CHANGELOG.md")
    return placeholders


def test_a_release_has_no_placeholder():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    site = (ROOT / "mkdocs.yml").read_text()
    repository = re.search(r"^repo_url: (.*)$", site, re.MULTILINE)[1]
    urls = {**PROJECT["urls"], "mkdocs.yml": repository}
    assert urls["mkdocs.yml"] == urls["Source"]
    assert missing(changelog, urls) == []
    released = changelog.replace("- Unreleased", "- 2027-01-31", 1)
    assert missing(released, {"Source": "https://example.com/OWNER"}) == ["Source"]
    assert missing(released, {"Source": "https://example.com/dlocks"}) == []
    assert missing("# Changelog", {}) != []


def test_migrations_are_frozen():
    """Databases that have run a migration do not run it again."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in (ROOT / "dlocks" / "migrations").glob("0*.py")
    }
    assert found == MIGRATIONS


def test_the_versions_are_those_that_the_tests_run_with():
    """The README, the classifiers, the matrices and the system check agree."""
    listed = {
        kind: [
            one.rpartition(" ")[2]
            for one in PROJECT["classifiers"]
            if re.fullmatch(rf"{kind} :: [\d]+\.[\d]+", one)
        ]
        for kind in ("Programming Language :: Python", "Framework :: Django")
    }
    pythons, djangos = listed.values()
    assert pythons == sorted({python for python, _, _ in MATRIX}, key=version)
    assert djangos == sorted({django for _, django, _ in MATRIX}, key=version)
    for readme in ("README.md", "README.zh-CN.md"):
        stated = stated_versions((ROOT / readme).read_text())
        assert stated["Python"] == pythons, readme
        assert stated["Django"] == djangos, readme
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    matrix = workflow["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert [(one["python"], one["django"], one["engine"]) for one in matrix] == MATRIX


def stated_versions(text):
    """Return what the table of a README says about each program."""
    rows = re.findall(r"^\| (\w+) \| ([\d., ]+) \|$", text, re.MULTILINE)
    return {name: versions.split(", ") for name, versions in rows}


def test_the_versions_of_databases_are_the_same_everywhere():
    """The packages of a distribution's servers name no version."""
    stated = stated_versions((ROOT / "README.md").read_text())
    assert stated == stated_versions((ROOT / "README.zh-CN.md").read_text())
    databases = {
        name: versions
        for name, versions in stated.items()
        if name not in {"Python", "Django"}
    }
    page = (ROOT / "docs/backends.md").read_text()
    row = re.search(r"^\| Tested versions (.*)$", page, re.MULTILINE)[1]
    for column, names in enumerate((["PostgreSQL"], ["MariaDB", "MySQL"], ["SQLite"])):
        found = re.findall(r"\d+(?:\.\d+)?", row.split("|")[column + 1])
        assert found == [one for name in names for one in databases.pop(name)], names
    assert databases == {}
    script = (ROOT / "scripts/fetch_server.sh").read_text()
    fetched = re.findall(r"packages=postgresql-(\d+)", script)
    assert fetched == stated["PostgreSQL"][-1:]
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    for name in ("PostgreSQL", "MariaDB", "MySQL"):
        image = services[name.lower()]["image"]
        assert image.rpartition(":")[2] == stated[name][-1], name


def version(text):
    return tuple(map(int, text.split(".")))


def test_an_untested_version_of_django_is_a_warning(monkeypatch):
    """Users can update Django before dlocks, and are warned."""
    major, minor = version(MATRIX[-1][1])
    for tested, warned in (((major, minor), False), ((major, minor + 1), True)):
        monkeypatch.setattr(django, "VERSION", (*tested, 0, "final", 0))
        found = [
            one.msg for one in run_checks(tags=["dlocks"]) if one.id == "dlocks.W012"
        ]
        assert len(found) == warned
    assert f"up to Django {major}.{minor}," in found[0]


@pytest.mark.parametrize(
    "name",
    [
        "compose.yaml", ".pre-commit-config.yaml", ".github/ISSUE_TEMPLATE/bug.yml",
        ".github/ISSUE_TEMPLATE/idea.yml", ".github/ISSUE_TEMPLATE/config.yml",
    ],
)  # fmt: skip
def test_the_files_for_other_programs_are_valid(name):
    assert yaml.safe_load((ROOT / name).read_text())


def test_the_servers_for_trials_listen_on_loopback_alone():
    """Their passwords are public."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"postgresql", "mariadb", "mysql", "redis"}
    ports = [port for service in services.values() for port in service["ports"]]
    assert all(port.startswith("127.0.0.1:") for port in ports)
