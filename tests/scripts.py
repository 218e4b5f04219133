"""Programs that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_python(*arguments, warnings="error", cwd=ROOT, **environment):
    """Run Python, and return the ended process with its output as text.

    The environment is that of the test, so the process can use its database.
    """
    return subprocess.run(
        [sys.executable, "-W", warnings, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{cwd}", **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
