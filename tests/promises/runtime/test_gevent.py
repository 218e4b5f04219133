"""Locks under gevent, which replaces threads by greenlets.

The gevent worker of gunicorn does the same.
"""

import pytest

from tests.scripts import run_python

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # Each driver once.
    pytest.mark.engine("postgresql", "mariadb"),
]


def test_greenlets_exclude_each_other():
    """Locks of rows and of sessions work, renew and expire under gevent."""
    done = run_python(
        "-m", "gevent.monkey", "tests/under_gevent.py", "default", "session"
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()
        == [
            "threads 24 1",
            "greenlets 24 1",
            "renewed True",
            "beside busy",
            "forgotten False",
            "ended LockShutDown",
        ]
        * 2
    )
