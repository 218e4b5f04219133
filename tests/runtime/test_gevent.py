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
]


def under_gevent(using):
    """Run tests/under_gevent.py and return the lines of its output."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "gevent.monkey",
            "tests/under_gevent.py",
            using,
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


@pytest.mark.parametrize(
    "using",
    [
        "default",
        pytest.param(
            "session", marks=pytest.mark.engine("postgresql", "mariadb", "mysql")
        ),
    ],
)
def test_greenlets_exclude_each_other(using):
    assert under_gevent(using) == [
        "threads 100 1",
        "greenlets 100 1",
        "renewed True",
        "beside busy",
        "forgotten False",
    ]
