"""Locks under gevent, which replaces threads by greenlets.

The gevent worker of gunicorn does the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.django_db(transaction=True, available_apps=["dlocks", "tests"]),
    # Each driver once.
    pytest.mark.engine("postgresql", "mariadb"),
]


def under_gevent(*aliases):
    """Run tests/under_gevent.py and return the lines of its output."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "gevent.monkey",
            "tests/under_gevent.py",
            *aliases,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_greenlets_exclude_each_other():
    """Locks of rows and of sessions work, renew and expire under gevent."""
    assert (
        under_gevent("default", "session")
        == [
            "threads 100 1",
            "greenlets 100 1",
            "renewed True",
            "beside busy",
            "forgotten False",
        ]
        * 2
    )
