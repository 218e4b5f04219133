"""The settings and the system checks."""

from __future__ import annotations

import sys
from functools import partial

import pytest
from django.conf import settings as django_settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.signals import setting_changed
from django.db import connection
from django.test import modify_settings, override_settings

from dlocks import LockTimeout, db_lock
from dlocks.models import HoldRecord, LockClaim, ResourceLock
from dlocks.testing import frozen_clock, held_elsewhere
from tests import rows
from tests.for_each import for_each
from tests.scripts import run_python
from tests.settings import ENGINE

pytestmark = pytest.mark.front


def check_settings(databases=(), *, deploy=False):
    """Return what the checks of dlocks say, as ``manage.py check`` shows it."""
    options = {"databases": databases, "include_deployment_checks": deploy}
    return run_checks(tags=["dlocks"], **options)


check_tables = partial(check_settings, ["default"])
check_deployment = partial(check_settings, deploy=True)


def dlocks(
    backend="dlocks.backends.database.PessimisticBackend", alias="default", **options
):
    return override_settings(DLOCKS={alias: {"BACKEND": backend, "OPTIONS": options}})


@override_settings()
@pytest.mark.django_db(transaction=True)
def test_without_settings_the_default_database_is_used(in_other_thread):
    """To change a timeout, a project need not name the backend."""

    def check(ttl, using="default", message=None):
        with db_lock("stock:7", using=using) as hold:
            assert ttl - 10 < hold.remaining <= ttl
            assert ResourceLock.objects.get().pk == "stock:7"
            if message:
                with pytest.raises(LockTimeout, match=message):
                    in_other_thread(db_lock("stock:7", using=using).acquire)

    del django_settings.DLOCKS
    # Django sends this signal when a setting changes in a test.
    setting_changed.send(None, setting="DLOCKS", value=None, enter=True)
    check(30)
    with held_elsewhere("stock:7"), frozen_clock():
        with pytest.raises(LockTimeout, match="within 10 s"):
            db_lock("stock:7").acquire()
    changed = {"default": {"OPTIONS": {"timeout": 0.05, "ttl": 20}}, "b": {}}
    with override_settings(DLOCKS=changed):
        check(20, message="within 0.05 s")
        check(30, "b")


MEMORY = {"BACKEND": "dlocks.backends.memory.MemoryBackend"}
INSERT = {"BACKEND": "dlocks.backends.database.InsertBackend"}
EVERY_BACKEND = "grace, prefix, slow_hold, slow_wait, timeout, ttl"
DATABASE_FAMILY = (
    "database, deadlock_after, expiry, grace, history, listen, prefix, prepare,"
    " slow_hold, slow_wait, timeout, ttl"
)
NOTHING, MODEL = "nowhere.backends.Backend", "django.db.models.Model"
SETTINGS_ERRORS = [
    ({"BACKEND": NOTHING}, rf"'default'.*'{NOTHING}'.*imported"),
    ({"BACKEND": MODEL}, rf"'default'.*'{MODEL}'.*not a dlocks backend"),
    ({"BACKEND": None}, r"'default'.*must be a dotted path, not None"),
    ({**MEMORY, "TIMEOUT": 3}, r"'default'.*unknown keys 'TIMEOUT'"),
    (
        {**MEMORY, "OPTIONS": {"tll": 3}},
        f"'default'.*unknown option 'tll'; MemoryBackend accepts {EVERY_BACKEND}",
    ),
    (
        {**INSERT, "OPTIONS": {"x": "y"}},
        f"accepts {DATABASE_FAMILY}",
    ),
    (
        {**MEMORY, "OPTIONS": {"ttl": "long"}},
        "'default'.*ttl must be a number of seconds or a timedelta, not str",
    ),
    ({**MEMORY, "OPTIONS": {"timeout": -1}}, r"'default'.*timeout must be 0 or more"),
    ({**MEMORY, "OPTIONS": {"prefix": 7}}, r"'default'.*prefix"),
    ({"OPTIONS": {"history": "yes"}}, "history must be True or False, not 'yes'"),
    ({"OPTIONS": {"deadlock_after": "soon"}}, "'default'.*deadlock_after"),
    ({"OPTIONS": {"deadlock_after": -1}}, "'default'.*deadlock_after"),
    ({**MEMORY, "OPTIONS": {"slow_wait": "long"}}, "'default'.*slow_wait"),
    ({**MEMORY, "OPTIONS": {"slow_hold": "long"}}, "'default'.*slow_hold"),
]


def test_a_settings_error_names_alias_and_option():
    """The check and the first use of a lock report it."""
    for settings, message in SETTINGS_ERRORS:
        with override_settings(DLOCKS={"default": settings}):
            with pytest.raises(ImproperlyConfigured, match=message):
                db_lock("stock:7").acquire()
            (found,) = check_settings()
            assert (found.id, found.is_serious()) == ("dlocks.E002", True)
            assert found.hint
    for wrong in (None, []):
        with override_settings(DLOCKS=wrong):
            assert ids(check_settings()) == {"dlocks.E002"}
            for every in (check_tables(), check_deployment()):
                assert ids(every) == {"dlocks.E002"}
    known = "no alias 'other'; it has 'default'"
    with pytest.raises(ImproperlyConfigured, match=known):
        db_lock("stock:7", using="other").acquire()


# System checks.


def ids(messages):
    return {message.id for message in messages}


@pytest.mark.storage
@pytest.mark.django_db
def test_correct_settings_pass_the_checks():
    """The migrations are complete too."""
    assert check_settings() == []
    call_command("check", "--fail-level", "WARNING")
    call_command("makemigrations", "dlocks", "--check", "--dry-run", verbosity=0)


def test_a_missing_app_is_reported_with_a_hint(tmp_path):
    """By the first use of a lock and by the check, in a project of its own."""
    with modify_settings(INSTALLED_APPS={"remove": "dlocks"}):
        assert "dlocks.E001" in ids(check_settings())
    (tmp_path / "shop_urls.py").write_text("urlpatterns = []\n")
    code = """
from django.conf import settings
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
database["OPTIONS"] = {"transaction_mode": "IMMEDIATE"}
settings.configure(ROOT_URLCONF="shop_urls", DATABASES={"default": database})
import django; django.setup()
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from dlocks import db_lock
try:
    db_lock("stock:7").acquire()
except ImproperlyConfigured as error:
    print(error)
try:
    call_command("check")
except Exception as error:
    print(str(error).count("dlocks.E001"))
"""
    done = run_python("-c", code, cwd=tmp_path)
    hint = "Add 'dlocks' to INSTALLED_APPS, and run 'manage.py migrate'."
    assert done.stdout.splitlines() == [hint, "1"], done.stderr


@dlocks(database="nowhere")
def test_a_database_that_does_not_exist_is_an_error():
    """The first use names the wrong alias and option, and the valid values."""
    (found,) = check_settings()
    assert found.id == "dlocks.E003"
    assert "DLOCKS['default']['OPTIONS']['database'] is 'nowhere'" in found.msg
    message = (
        r"DLOCKS\['reports'\]\['OPTIONS'\]\['database'\] is 'nowhere'.*it has 'default'"
    )
    for kind in ("database.Pessimistic", "database.Insert", "session.Session"):
        with dlocks(f"dlocks.backends.{kind}Backend", "reports", database="nowhere"):
            with pytest.raises(ImproperlyConfigured, match=message):
                db_lock("stock:7", using="reports").acquire()


def test_another_engine_is_an_error_unless_the_alias_is_not_set(monkeypatch):
    """A project with such a database may have its locks elsewhere."""
    monkeypatch.setattr(connection, "vendor", "oracle")
    for settings, found in (
        ({}, {"dlocks.E004"}),
        ({"default": {}, "jobs": MEMORY}, {"dlocks.E004"}),
        ({"jobs": MEMORY}, set()),
    ):
        with override_settings(DLOCKS=settings):
            assert ids(check_settings()) == found, settings


@pytest.mark.engine("sqlite")
def test_deferred_sqlite_transactions_cause_a_warning(monkeypatch):
    """So does an in-memory database."""
    monkeypatch.delitem(connection.settings_dict["OPTIONS"], "transaction_mode")
    assert ids(check_settings()) == {"dlocks.W002"}
    monkeypatch.undo()
    monkeypatch.setitem(connection.settings_dict, "NAME", ":memory:")
    assert ids(check_settings()) == {"dlocks.W001"}


@pytest.mark.engine("sqlite")
def test_an_error_explains_why_a_thread_finds_no_table_in_memory(tmp_path):
    """A migration would not help. The thread that migrated can acquire."""
    code = """
import threading
from django.conf import settings
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(INSTALLED_APPS=["dlocks"], DATABASES={"default": database})
import django; django.setup()
from django.core.management import call_command
from dlocks import LockBackendError, db_lock
call_command("migrate", verbosity=0)
def acquire():
    try:
        with db_lock("stock:7", timeout=0):
            print("acquired")
    except LockBackendError as error:
        print(error)
acquire()
thread = threading.Thread(target=acquire)
thread.start()
thread.join()
"""
    acquired, error = run_python("-c", code, cwd=tmp_path).stdout.splitlines()
    assert acquired == "acquired"
    assert "no such table" in error
    assert error.endswith(
        "DATABASES['default'] is in memory, where each thread has a database of its"
        " own: only the thread that ran 'migrate' finds the table. Use a database in a"
        " file."
    )


@pytest.mark.engine("postgresql", "mariadb")
def test_a_higher_isolation_level_causes_a_warning(monkeypatch):
    if connection.vendor == "mysql":
        levels = {"read committed": False, "repeatable read": True}
    else:
        from django.db.backends.postgresql.psycopg_any import IsolationLevel

        # Their numbers depend on the driver.
        levels = {None: False} | {
            level: not level.name.startswith("READ") for level in IsolationLevel
        }
    options = connection.settings_dict.setdefault("OPTIONS", {})
    for level, warned in levels.items():
        monkeypatch.setitem(options, "isolation_level", level)
        found = check_settings()
        assert ids(found) == ({"dlocks.W003"} if warned else set()), level
        assert not warned or connection.vendor != "mysql" or level in found[0].msg


@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_the_check_finds_other_engines_and_isolation_levels():
    assert check_tables() == []
    with connection.cursor() as cursor:
        try:
            cursor.execute("ALTER TABLE dlocks_resourcelock ENGINE = MEMORY")
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            assert ids(check_tables()) == {"dlocks.E005", "dlocks.W004"}
        finally:
            cursor.execute("ALTER TABLE dlocks_resourcelock ENGINE = InnoDB")
            connection.close()
    with connection.cursor() as cursor:
        try:
            # This engine has no TEXT.
            cursor.execute(
                "ALTER TABLE dlocks_lockclaim DROP COLUMN holding, ENGINE = MEMORY"
            )
            (found,) = check_tables()
            assert found.id == "dlocks.E005"
            assert found.hint == "ALTER TABLE dlocks_lockclaim ENGINE = InnoDB;"
        finally:
            cursor.execute(
                "ALTER TABLE dlocks_lockclaim ADD COLUMN holding longtext NOT NULL,"
                " ENGINE = InnoDB"
            )


@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_a_collation_that_confuses_keys_is_an_error_with_a_fix():
    """The SQL of the hint lets the column compare keys byte for byte."""
    with connection.cursor() as cursor:
        for table, column, kind in (
            ("dlocks_resourcelock", "key_resource", "varchar(255)"),
            ("dlocks_lockclaim", "key_resource", "varchar(255)"),
            ("dlocks_lockclaim", "owner", "varchar(32)"),
        ):
            cursor.execute(
                f"ALTER TABLE {table} MODIFY {column} {kind} COLLATE utf8mb4_general_ci"
                " NOT NULL"
            )
            (found,) = check_tables()
            assert found.id == "dlocks.E006"
            assert f"{table}.{column}" in found.msg
            assert "utf8mb4_general_ci" in found.msg
            cursor.execute(found.hint)
            assert check_tables() == []


NOTHING_ELSE = {
    "postgresql": "BEGIN RETURN NEW; END",
    "mysql": "FOR EACH ROW SET @x = 1",
    "sqlite": "BEGIN SELECT 1; END",
}


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
def test_a_trigger_on_the_tables_causes_a_warning():
    assert check_tables() == []
    with rows.trigger("BEFORE UPDATE", LockClaim, **NOTHING_ELSE):
        (found,) = check_tables()
    assert found.id == "dlocks.W011"
    said = "The table dlocks_lockclaim on database 'default' has the trigger"
    assert found.msg.startswith(f"{said} 'of_a_test'.")
    assert check_tables() == []


@pytest.mark.engine("postgresql")
@pytest.mark.django_db(transaction=True)
@for_each("table", ["dlocks_lockclaim", "dlocks_resourcelock"])
def test_row_security_on_the_tables_causes_a_warning(table):
    """The SQL of its hint switches it off."""
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        (found,) = check_tables()
        assert found.id == "dlocks.W010"
        assert f"The table {table} on database 'default'" in found.msg
        cursor.execute(found.hint)
    assert check_tables() == []


@pytest.mark.storage
@pytest.mark.django_db(transaction=True)
@for_each("model", [LockClaim, HoldRecord])
def test_missing_tables_cause_a_warning(model, monkeypatch):
    """It says what to run, before the first ``migrate`` and after an upgrade."""
    table = {LockClaim: "dlocks_lockclaim", HoldRecord: "dlocks_holdrecord"}[model]

    def check(said):
        (found,) = [one for one in check_tables() if one.id != "dlocks.W004"]
        assert found.id == "dlocks.W006"
        assert said in found.msg
        assert "migrate dlocks --database default" in found.hint

    with rows.without_table(model):
        check(table)
        with rows.without_table(ResourceLock):
            check("does not have the table dlocks_resourcelock")
            # ``manage.py migrate`` runs this check first, so it must not ask for it.
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", ["manage.py", "migrate"])
                assert not ids(check_tables()) - {"dlocks.W004"}
    assert check_tables() == []


@pytest.mark.storage
@pytest.mark.django_db
def test_the_key_is_the_primary_key_and_the_only_index():
    get_constraints = connection.introspection.get_constraints
    with connection.cursor() as cursor:
        found = get_constraints(cursor, "dlocks_resourcelock").values()
        indexes = [one for one in found if one["index"] or one["primary_key"]]
        assert [one["columns"] for one in indexes] == [["key_resource"]]
        if connection.vendor == "mysql":
            columns = "SHOW FULL COLUMNS FROM dlocks_resourcelock LIKE 'key_resource'"
            cursor.execute(columns)
            names = {"mysql": "utf8mb4_0900_bin", "mariadb": "utf8mb4_nopad_bin"}
            assert cursor.fetchone()[2] == names[ENGINE]


def test_deploying_a_test_backend_causes_a_warning():
    for kind, whom in (
        ("dummy.Dummy", "no other caller"),
        ("memory.Memory", "no caller in another process"),
    ):
        with dlocks(f"dlocks.backends.{kind}Backend"):
            (found,) = check_deployment()
        assert found.id == "dlocks.W007"
        assert found.msg.endswith(f"whose locks exclude {whom}.")
