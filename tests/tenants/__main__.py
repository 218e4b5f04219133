"""Run scenarios by name and write their results as JSON.

There is one name per line of input and one line of JSON per result. The process has its
own database with the tenants acme and globex. Two scenarios move the tables.
"""

import json
import os
import sys
import threading
import traceback
from io import StringIO

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.tenants.settings"
django.setup()

# ruff: noqa: E402 (models need the settings)
import psycopg
from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, connections, transaction
from django_tenants.utils import schema_context as tenant

from dlocks import db_lock, db_semaphore, history, resume_hold
from dlocks.models import HoldRecord, ResourceLock
from tests.internals import backends, callers, schemas
from tests.tenants.models import Client, Domain
from tests.tenants.settings import DATABASE
from tests.timing import eventually

SERVER = {"host": "127.0.0.1", "port": os.environ["DLOCKS_TEST_PORT"], "user": "dlocks"}


def make_tenants():
    with connection.schema_editor() as editor:
        editor.create_model(Client)
        editor.create_model(Domain)
    call_command("migrate_schemas", shared=True, verbosity=0)
    for name in ("acme", "globex"):
        Client(schema_name=name, name=name).save(verbosity=0)


# Scenarios.


def share():
    """Create the tables in the public schema too."""
    settings.SHARED_APPS.append("dlocks")
    options = {"shared": True, "verbosity": 0}
    # Django recorded the migration in that schema although it created no table.
    call_command("migrate_schemas", "dlocks", "zero", fake=True, **options)
    call_command("migrate_schemas", **options)


def share_alone():
    """Drop the tables of the tenants."""
    settings.TENANT_APPS.remove("dlocks")
    with connection.cursor() as cursor:
        for table in ("resourcelock", "lockclaim", "holdrecord"):
            for name in ("acme", "globex"):
                cursor.execute(f"DROP TABLE {name}.dlocks_{table} CASCADE")
        cursor.execute("DELETE FROM public.dlocks_resourcelock")
        cursor.execute("DELETE FROM public.dlocks_holdrecord")
    # A new process has no holds, and looks for the tables again.
    callers.reset()
    schemas._schemas.clear()
    backends.reset()


def rows_of(schema):
    """Return the keys in the table of a schema, or None if it has no table."""
    with connection.cursor() as cursor:
        table = f"{schema}.dlocks_resourcelock"
        cursor.execute("SELECT to_regclass(%s) IS NULL", [table])
        if cursor.fetchone()[0]:
            return None
        cursor.execute(f"SELECT key_resource FROM {table} ORDER BY 1")
        return [key for (key,) in cursor.fetchall()]


def refused():
    said = []
    for name in ("acme", "public"):
        with tenant(name):
            try:
                db_lock("busy").acquire()
            except ImproperlyConfigured as error:
                said.append(str(error))
    found = run_checks(tags=["database"], databases=["default"])
    return said, [(message.id, message.msg) for message in found]


def renewed_for_longer_than_its_ttl():
    """Renew from a background thread, whose connection belongs to no tenant."""
    with tenant("acme"), db_lock("renewed", ttl=1) as hold:
        threading.Event().wait(1.3)
        hold.check()
        hold.renew()
        return hold.held


def new_key_in_a_transaction():
    granted = []
    with tenant("acme"):
        for using in ("default", "optimistic", "insert"):
            with transaction.atomic(), db_lock(f"new:{using}", using=using) as hold:
                granted.append(hold.scope)
    return granted


def every_kind():
    """Use several keys, a permit, guards and transaction scope with each backend."""
    done = []
    with tenant("globex"):
        for using in ("default", "optimistic", "insert"):
            with db_lock("a", "b", using=using) as both, both.atomic():
                both.check()
            with db_semaphore("permits", 2, using=using) as permit, permit.atomic():
                permit.check()
            with db_lock("guard", using=using) as hold, hold.atomic():
                hold.renew()
            with transaction.atomic():
                db_lock("ends", using=using).acquire()
            done.append(db_lock("ends", using=using).holder() is None)
    return done


def without_the_public_schema():
    """Use a search path that has only the tenant's schema."""
    with tenant("acme"):
        connection.set_schema("acme", include_public=False)
        with (
            db_lock("alone") as lease,
            transaction.atomic(),
            db_lock("alone too") as hold,
        ):
            lease.renew()
            row = ResourceLock.objects.filter(pk="alone").by_clock().with_queue().get()
            return hold.scope, row.state


def guarded_on_another_alias():
    """Guard on the alias acme, whose search path has only that schema."""
    guarded = []
    for lock in (db_lock("stock:7"), db_semaphore("permits", 2)):
        with lock as hold, hold.atomic(using="acme"):
            hold.check()
            guarded.append(hold.key)
    return guarded


def handed_over_to_another_tenant():
    """Queue a waiter in globex behind a holder in acme until the handover."""
    order = []

    def wait():
        with tenant("globex"), db_lock("shared", timeout=20) as hold:
            order.append(("globex", hold.waited > 0, hold.takeover))
        connection.close()

    with tenant("acme"):
        with db_lock("shared") as hold:
            waiter = threading.Thread(target=wait)
            waiter.start()
            eventually(hold.queue_length)
            order.append(("acme", False, hold.takeover))
        waiter.join(20)
    return order


def seen_by_the_commands():
    """List all locks of the database from any tenant, and free those of another."""
    with tenant("globex"), db_lock("seen"):
        with tenant("acme"):
            out = StringIO()
            call_command("list_locks", stdout=out)
            listed = "seen" in out.getvalue()
            holder = db_lock("seen").holder() is not None
    with tenant("globex"):
        db_lock("left", ttl=0.5, renew=False).acquire()
    reader = backends["default"].store.reader
    reader.grace, grace = 0.0, reader.grace
    try:
        with tenant("acme"):
            stale = eventually(lambda: db_lock("left").holder().stale)
            call_command("reap_locks", stdout=StringIO())
    finally:
        reader.grace = grace
    with tenant("globex"):
        return listed, holder, stale, db_lock("left").holder() is None


def recorded():
    """Write the history in a background thread and read it in a tenant."""
    with tenant("acme"):
        with db_lock("recorded"):
            pass
        history.flush()
        with tenant("globex"):
            return HoldRecord.objects.filter(key_resource="recorded").count()


def keys_of_each_tenant():
    """Separate the keys of tenants by a prefix, so that each sees its own keys."""
    lock = db_lock("nightly", using="tenant")
    listed = []
    with tenant("acme"), lock as first, tenant("globex"), lock as second:
        keys = first.claim.key, second.claim.key
        for name in ("acme", "globex", "public"):
            with tenant(name):
                out = StringIO()
                call_command("list_locks", using="tenant", stdout=out)
                listed.append(out.getvalue().count("nightly"))
        locked = lock.locked()
    with tenant("acme"):
        locked = locked and not lock.locked()
    return keys, listed, locked, ResourceLock.objects.filter(pk__in=keys).count()


async def keys_of_each_tenant_in_a_coroutine():
    """Use the tenant of Django's thread, as a view behind a sync middleware does."""
    await sync_to_async(lambda: connection.set_schema("acme"))()
    lock = db_lock("nightly", using="tenant")
    try:
        async with lock as hold:
            return hold.claim.key, await lock.alocked(), (await lock.aholder()).key
    finally:
        await sync_to_async(lambda: connection.set_schema_to_public())()


def resumed_in_another_tenant():
    """Resume a hold in another tenant, with the key that was granted."""
    with tenant("acme"):
        text = db_lock("handed", using="tenant").acquire().detach()
    with tenant("globex"), resume_hold(text) as hold:
        return hold.claim.key


def tables():
    return {schema: rows_of(schema) for schema in ("public", "acme", "globex")}


def call(name):
    situation = globals()[name]
    if name.endswith("coroutine"):
        situation = async_to_sync(situation)
    try:
        return {"result": situation()}
    except BaseException:
        return {"error": traceback.format_exc()}


def main():
    # Other output must not be mixed with the results.
    answers, sys.stdout = sys.stdout, sys.stderr
    with psycopg.connect(dbname="postgres", autocommit=True, **SERVER) as server:
        server.execute(f"CREATE DATABASE {DATABASE}")

    try:
        make_tenants()
        for line in sys.stdin:
            print(json.dumps(call(line.strip())), file=answers, flush=True)
    finally:
        history.flush()
        connections.close_all()
        with psycopg.connect(dbname="postgres", autocommit=True, **SERVER) as server:
            server.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")


if __name__ == "__main__":
    main()
