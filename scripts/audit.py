"""Check the installed packages for known vulnerabilities, with pip-audit.

The exit status is 0 if there are none, 1 if there are some, and 2 if the advisory
database could not be queried.
"""

from __future__ import annotations

import json
import subprocess
import sys

FOUND, NOT_ASKED = 1, 2


def main() -> int:
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--local",
        "--skip-editable",
        "--progress-spinner=off",
        "--format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        # pip-audit's exit status is 1 in this case, too.
        print(
            "The advisory database could not be queried, so the result is unknown:",
            file=sys.stderr,
        )
        print(
            "\n".join(done.stderr.strip().splitlines()[-3:])
            or f"status {done.returncode}",
            file=sys.stderr,
        )
        return NOT_ASKED
    # If an index has no advisories, pip-audit reports no error. It reports packages
    # that are not on the index.
    skipped = [one for one in packages if "skip_reason" in one]
    unknown = [one["name"] for one in skipped if "editable" not in one["skip_reason"]]
    found = [
        (one["name"], one["version"], hole)
        for one in packages
        for hole in one.get("vulns", [])
    ]
    for name, version, hole in found:
        fixed = ", ".join(hole.get("fix_versions", [])) or "no version yet"
        print(f"{name} {version}: {hole['id']}, fixed in {fixed}")
    print(
        f"{len(packages) - len(skipped)} packages, {len(found)} known vulnerabilities."
    )
    if unknown:
        print(
            f"The advisory database has no data about: {', '.join(unknown)}",
            file=sys.stderr,
        )
    return FOUND if found else NOT_ASKED if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
