"""Programs that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_python(*arguments, warnings="error", cwd=ROOT, timeout=110, **environment):
    """Run Python, and return the ended process with its output as text.

    The environment is that of the test, so the process can use its database.
    """
    return subprocess.run(
        [sys.executable, "-W", warnings, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{cwd}", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_script(script, *, before=""):
    """Run a user's script in its own process, on this test's database.

    The code of ``before`` runs before the setup of Django.
    """
    setup = "\nimport django; django.setup()\n"
    code = textwrap.dedent(before) + setup + textwrap.dedent(script)
    return run_python("-c", code, DJANGO_SETTINGS_MODULE="tests.settings")
