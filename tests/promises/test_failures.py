"""What a caller reads when the database fails: the reason, once."""

import asyncio
import io
import logging
from contextlib import contextmanager

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from dlocks import LockBackendError, LockLost, db_lock, db_rwlock, db_semaphore
from tests.for_each import for_each
from tests.processes import on_database
from tests.sync_and_async import sync_and_async

pytest_plugins = ["tests.promises.stops"]
pytestmark = [pytest.mark.driver, pytest.mark.django_db(transaction=True)]

VENDOR = connection.vendor


def locks():
    """Return locks on one key and on several, in every kind of block."""
    return [
        db_lock("stock:7", timeout=1),
        db_lock("stock:7", timeout=0),
        db_lock("stock:7", "stock:8", timeout=1),
        db_semaphore("stock:9", 2, timeout=1),
    ]


@contextmanager
def logged():
    """Collect what dlocks logs."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("dlocks")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


def acquire_all(pipe):
    """Try to acquire each lock. Return the errors and the log records."""
    errors = []

    async def acquire(lock):
        await lock.aacquire()

    with logged() as records:
        for lock in locks():
            for attempt in (lock.acquire, lambda lock=lock: asyncio.run(acquire(lock))):
                try:
                    attempt()
                except LockBackendError as error:
                    errors.append((str(error), getattr(error, "__notes__", [])))
    return errors, records


def check_health(pipe):
    """Run ``dlocks_health``. Return its output and the log records."""
    out = io.StringIO()
    with logged() as records:
        try:
            call_command("dlocks_health", "--using", "default", stdout=out)
        except CommandError as error:
            out.write(str(error))
    return out.getvalue(), records


def dead(_request, tmp_path):
    if VENDOR == "sqlite":
        return on_database(NAME=str(tmp_path / "missing" / "db.sqlite3"))
    return on_database(PORT="1")


def without_tables(_request, tmp_path):
    names = {"sqlite": str(tmp_path / "empty.sqlite3"), "postgresql": "postgres"}
    return on_database(NAME=names.get(VENDOR, "mysql"))


def read_only(request, tmp_path):
    """Return the environment of a user that may only read."""
    if VENDOR == "sqlite":
        name = f"file:{connection.settings_dict['NAME']}?mode=ro"
        return on_database(NAME=name, OPTIONS={"uri": True})
    tables = "dlocks_resourcelock", "dlocks_lockclaim", "dlocks_holdrecord"
    password = connection.settings_dict["PASSWORD"]
    if VENDOR == "postgresql":
        user = "dlocks_reader"
        create = f"CREATE ROLE {user} LOGIN NOSUPERUSER PASSWORD '{password}'"
        remove = ["DROP OWNED BY dlocks_reader", "DROP ROLE dlocks_reader"]
    else:
        user = "'reader'@'127.0.0.1'"
        create = f"CREATE USER {user} IDENTIFIED BY '{password}'"
        remove = [f"DROP USER {user}"]
    with connection.cursor() as cursor:
        cursor.execute(create)
        for table in tables:
            cursor.execute(f"GRANT SELECT ON {table} TO {user}")

    def drop():
        with connection.cursor() as cursor:
            for sql in remove:
                cursor.execute(sql)

    request.addfinalizer(drop)
    return on_database(USER="dlocks_reader" if VENDOR == "postgresql" else "reader")


@pytest.mark.parametrize("failing", [dead, without_tables, read_only])
def test_a_database_that_fails_is_reported_once(failing, doomed, request, tmp_path):
    """A request that was not sent, or was refused, leaves no claim to cancel.

    So nothing is logged before the error, for one key and several, permits, threads and
    coroutines. For ``dlocks_health``, the check and the lock that fail for one reason
    are one problem.
    """
    worker = doomed(**failing(request, tmp_path))
    errors, records = worker.call(acquire_all)
    text, more = worker.call(check_health)
    worker.kill()
    assert records == more == []
    assert len(errors) == 2 * len(locks())
    for said, notes in errors:
        assert "database 'default'" in said.lower()
        assert notes == []
    first, *problems, last = text.splitlines()
    assert (first, last) == ("default: not healthy", "Not healthy: default.")
    fact = {
        dead: "unable to open" if VENDOR == "sqlite" else "127.0.0.1",
        without_tables: "migrate dlocks",
        read_only: "A lock request",
    }[failing]
    assert "\n".join(problems).count(fact) == 1


# The reason for which a lease was not renewed.


@for_each("kind", ["stopping pessimistic", "stopping memory"])
@sync_and_async
async def test_the_error_of_a_lost_hold_says_why_its_renewals_failed(
    do, kind, settings, stops, until
):
    """A lease that cannot be renewed ends, and ``LockLost`` has the server's reason.

    That is so for one key, for several, and for shared holds. A hold that is lost for
    another reason does not repeat an old one.
    """

    def fail(*_):
        raise LockBackendError("FATAL:  sorry,\n too many connections already")

    failing = {**settings.DLOCKS[kind], "OPTIONS": {"grace": 0}}
    settings.DLOCKS = {**settings.DLOCKS, "failing": failing}
    stops.replace("renew", fail, "failing")
    lost = []
    policy = {"using": "failing", "ttl": 0.3, "on_lost": lost.append}
    made = [
        db_lock("stock:7", **policy),
        db_lock("stock:8", "stock:9", **policy),
        db_semaphore("stock:10", 2, **policy),
        db_rwlock("stock:12", **policy).read(),
    ]
    if kind == "stopping memory":
        del made[2:]
    short = db_lock("stock:11", max_hold=0.15, **policy)
    holds = [await do.ask(lock, "acquire") for lock in [*made, short]]
    await do.sync(until, lambda: len(lost) == len(holds))
    for hold in holds[:-1]:
        said = "the last renewal failed: FATAL: sorry, too many connections already"
        with pytest.raises(LockLost, match=rf"\({said}\)\.$"):
            await do.ask(hold, "release")
    with pytest.raises(LockLost, match=r"max_hold of 0\.15 s\.$"):
        await do.ask(holds[-1], "release")
