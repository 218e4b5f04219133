"""The output of ``make audit`` for each result of pip-audit."""

from __future__ import annotations

import json

import pytest

from tests.scripts import ROOT, run_python

pytestmark = pytest.mark.engine("sqlite")


def report(*dependencies):
    text = json.dumps({"dependencies": dependencies, "fixes": []})
    return f"import sys\nprint({json.dumps(text)})\n"


def test_the_audit_fails_unless_all_packages_are_safe(tmp_path):
    """Unknown packages and an unreachable database are no vulnerabilities."""
    name, hole = "django", {"id": "CVE-0000-1", "fix_versions": ["5.2.1"]}
    known, safe = {"name": name, "version": "5.2"}, "0 known vulnerabilities.\n"
    skipped = f"Dependency not found on PyPI and could not be audited: {name}"
    editable = {"name": "dlocks", "skip_reason": "distribution marked as editable"}
    found = report({**known, "vulns": [hole]}, editable) + "sys.exit(1)"
    hole = "django 5.2: CVE-0000-1, fixed in 5.2.1\n1 packages, "
    hole += "1 known vulnerabilities.\n"
    unreachable = "import sys\nsys.exit('no route to host')"
    for program, status, output, errors in (
        (report({**known, "vulns": []}), 0, f"1 packages, {safe}", []),
        (found, 1, hole, []),
        (
            report({"name": name, "skip_reason": skipped}), 2, f"0 packages, {safe}",
            ["has no data about: django"],
        ),
        (unreachable, 2, "", ["could not be queried", "no route to host"]),
    ):  # fmt: skip
        (tmp_path / "pip_audit.py").write_text(program)
        script = str(ROOT / "scripts/audit.py")
        done = run_python(script, warnings="default", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (status, output)
        for error in errors:
            assert error in done.stderr
