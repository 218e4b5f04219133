"""Databases, poolers and options with which session locks are refused."""

import contextlib

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connection, connections, transaction

from dlocks import LockBackendError, LockTimeout
from tests.promises.session.server import POSTGRESQL, lock, query
from tests.servers import PgBouncer
from tests.settings import PORT

pytestmark = pytest.mark.django_db(transaction=True)

SESSION = "dlocks.backends.session.SessionBackend"


def reported(databases=()):
    found = {message.id for message in run_checks(databases=databases)}
    return {number for number in found if number.startswith("dlocks.E")}


@pytest.mark.engine("sqlite")
def test_sqlite_has_no_session_locks(settings):
    """Invalid options are refused."""
    settings.DLOCKS = {**settings.DLOCKS, "session": {"BACKEND": SESSION}}
    with pytest.raises(ImproperlyConfigured, match="database 'default' is sqlite"):
        lock().acquire()
    assert reported() == {"dlocks.E004"}
    for option, value in (
        ("waiting", -1),
        ("waiting", True),
        ("ping", 0),
        ("linger", "1"),
        ("deadlock_after", -1),
    ):
        wrong = {"BACKEND": SESSION, "OPTIONS": {option: value}}
        settings.DLOCKS = {**settings.DLOCKS, "session": wrong}
        with pytest.raises(ImproperlyConfigured, match=option):
            lock().acquire()


@POSTGRESQL
def test_a_failed_connection_is_not_contention(monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "PORT", "1")
    with pytest.raises(
        LockBackendError, match="No session for locks on database 'default'"
    ):
        lock().acquire()


# Behind a pooler.


@pytest.fixture
def pooled(monkeypatch, settings):
    """Return a function that puts PgBouncer in between, in the given mode."""
    with contextlib.ExitStack() as stack:

        def put(mode, **options):
            server = stack.enter_context(PgBouncer(int(PORT), mode=mode))
            connections.close_all()
            session = {"BACKEND": SESSION, "OPTIONS": options}
            settings.DLOCKS = {**settings.DLOCKS, "session": session}
            monkeypatch.setitem(connection.settings_dict, "PORT", str(server.port))

        yield put
        connections.close_all()
        monkeypatch.undo()


@POSTGRESQL
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_session_locks_behind_a_pooler_are_refused(mode, pooled):
    pooled(mode)
    with pytest.raises(
        ImproperlyConfigured, match="is behind a pooler .*PessimisticBackend"
    ):
        lock().acquire()
    assert "dlocks.E007" in reported(databases=["default"])
    call_command("dlocks_health", using="default")
    with pytest.raises(CommandError, match="Not healthy: session"):
        call_command("dlocks_health", using="session")
    # The session of the pooler is unchanged.
    assert query("SELECT count(*) FROM pg_prepared_statements", "") == [(0,)]
    settings = (
        "SELECT current_setting('idle_session_timeout'),"
        " current_setting('application_name')"
    )
    assert query(settings, "") == [("0", "")]
    # In a transaction the pooler does not matter.
    with transaction.atomic(), lock() as held:
        assert held.scope == "transaction"
        held.check()


@POSTGRESQL
def test_session_locks_work_with_session_pooling(
    pooled, observer, in_other_thread, waiter
):
    """A wrong option is detected."""
    pooled("session", session_pooling=True)
    with lock():
        assert in_other_thread(lock().try_acquire) is None
        waiting = waiter()
        with pytest.raises(LockTimeout):
            in_other_thread(lock(timeout=0.2).acquire)
    waiting.join(30)
    pooled("transaction", session_pooling=True)
    with pytest.raises(ImproperlyConfigured, match="to two connections at a time"):
        lock().acquire()
