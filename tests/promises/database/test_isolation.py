"""Locks of processes whose sessions run at SERIALIZABLE or REPEATABLE READ."""

from __future__ import annotations

import json
import re

import pytest
from django.db import connection
from django.db.models import F

from dlocks import db_lock, db_rwlock, db_semaphore
from tests.models import Counter
from tests.volume import volume

pytestmark = [
    pytest.mark.engine("postgresql", "mariadb", "mysql"),
    pytest.mark.django_db(transaction=True),
]


def options_of(level, how):
    """Return the OPTIONS of a database whose transactions run at a level.

    That is the default of the server's session, or of the driver.
    """
    if connection.vendor == "mysql":
        if how == "driver":
            return {"isolation_level": level.lower()}
        return {
            "isolation_level": None,
            "init_command": f"SET SESSION TRANSACTION ISOLATION LEVEL {level}",
        }
    if how == "driver":
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        return {"isolation_level": IsolationLevel[level.replace(" ", "_")].value}
    name = level.lower().replace(" ", r"\ ")
    return {"options": f"-c default_transaction_isolation={name}"}


def work(pipe, mine, *, times, using):
    """Use all kinds of locks, and guard transactions that write one row.

    Return the errors, and how often the row was written.
    """
    errors, written = [], 0

    def guard():
        with db_lock("stock", using=using, timeout=60) as hold, hold.atomic():
            Counter.objects.filter(name="stock").update(value=F("value") + 1)

    def use(lock):
        with lock:
            pass

    works = {
        "guard": guard,
        "permit": lambda: use(db_semaphore("permits", 2, using=using, timeout=60)),
        "read": lambda: use(db_rwlock("book", using=using, timeout=60).read()),
        "write": lambda: use(db_rwlock("book", using=using, timeout=60).write()),
        "own": lambda: use(db_lock(mine, f"{mine}:2", using=using, timeout=60)),
    }
    for _ in range(times):
        for name, one in works.items():
            try:
                one()
                written += name == "guard"
            except Exception as error:
                notes = " ".join(getattr(error, "__notes__", []))
                errors.append(f"{name}: {type(error).__name__}: {error} {notes}")
    return errors, written


# What a transaction at the server's SERIALIZABLE may raise on PostgreSQL, where also
# single statements of others count as conflicts.
CONFLICT = re.compile(
    "guard: (OperationalError: could not serialize access|LockBackendError: 'stock'"
    r" cannot guard ).*Retry the transaction .*OPTIONS\['isolation_level'\]",
    re.DOTALL,
)


@pytest.mark.parametrize(
    "how",
    [
        # Of MariaDB and MySQL, a session has the same level whoever has set it.
        pytest.param("driver", marks=pytest.mark.engine("postgresql", "mariadb")),
        "server",
    ],
)
@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_locks_work_at_a_higher_isolation_level(level, how, doomed):
    """No request of four processes fails because others changed a row meanwhile.

    If each statement on PostgreSQL runs at SERIALIZABLE, a guarded transaction may fail
    as any other. Its error names the setting.
    """
    Counter.objects.create(name="stock", value=0)
    options = json.dumps(options_of(level, how))
    crowd = [doomed(far=one % 2 == 1, DLOCKS_TEST_OPTIONS=options) for one in range(4)]
    may_fail = (connection.vendor, level, how) == (
        "postgresql",
        "SERIALIZABLE",
        "server",
    )
    written = 0
    for using in ("default", "optimistic", "insert"):
        for number, worker in enumerate(crowd):
            worker.start(work, f"own:{number}", times=volume(6), using=using)
        answers = [worker.hear() for worker in crowd]
        errors = [error for found, _ in answers for error in found]
        if may_fail:
            errors = [error for error in errors if not CONFLICT.match(error)]
        assert errors == [], using
        written += sum(times for _, times in answers)
    assert Counter.objects.get().value == written
