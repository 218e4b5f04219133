"""What the page on optimistic models claims about django-concurrency, beside it.

The rows of its table are quoted in the comments.
"""

from __future__ import annotations

import time

import pytest
from django.db import DatabaseError, connection, models
from django.db.migrations.state import ModelState, ProjectState
from django.test import modify_settings
from django.test.utils import isolate_apps

from dlocks import StaleVersion
from dlocks.optimistic import AddVersionTrigger, VersionedModel, VersionField

pytestmark = [
    pytest.mark.once,
    pytest.mark.nightly,
    pytest.mark.engine("postgresql"),
    pytest.mark.django_db(transaction=True),
]


def conflict(model):
    """Write a row by two instances of it, and return the error of the second."""
    first = model.objects.create(title="a")
    second = model.objects.get(pk=first.pk)
    first.title = "b"
    first.save()
    second.title = "c"
    try:
        second.save()
    except Exception as error:
        return second, error
    raise AssertionError


@isolate_apps("tests")
def test_versions_of_django_concurrency():
    """``IntegerVersionField``, ``AutoIncVersionField`` | ``VersionField``.

    ``RecordModifiedError`` | ``StaleVersion``, not a ``DatabaseError``
    """
    pytest.importorskip("concurrency")
    with modify_settings(INSTALLED_APPS={"append": "concurrency"}):
        check_versions()


def add_trigger(model):
    state = ProjectState()
    state.add_model(ModelState.from_model(model))
    operation = AddVersionTrigger(model.__name__)
    with connection.schema_editor() as editor:
        operation.database_forwards("tests", editor, state, state)


def check_versions():
    from concurrency import fields
    from concurrency.api import disable_concurrency
    from concurrency.exceptions import RecordModifiedError
    from concurrency.triggers import factory

    class Titled(models.Model):
        title = models.CharField(max_length=20)
        hits = models.IntegerField(default=0)

        class Meta:
            abstract = True
            app_label = "tests"

        def __str__(self):
            return self.title

    class Counted(Titled):
        version = fields.AutoIncVersionField()

    class Timed(Titled):
        version = fields.IntegerVersionField()

    class Triggered(Titled):
        version = fields.TriggerVersionField()

    class Chosen(Titled):
        version = fields.ConditionalVersionField()

        class ConcurrencyMeta:
            check_fields = ["title"]

    class Leaflet(VersionedModel):
        version = None
        title = models.CharField(max_length=20)
        hits = models.IntegerField(default=0)
        lock_version = VersionField(ignore_fields=["hits"])

        class Meta:
            app_label = "tests"

    every = Counted, Timed, Triggered, Chosen, Leaflet
    with connection.schema_editor() as editor:
        for model in every:
            editor.create_model(model)
    try:
        for model in (Counted, Timed):
            stale, error = conflict(model)
            assert isinstance(error, RecordModifiedError)
            assert isinstance(error, DatabaseError)
            # disable_concurrency(instance) | refresh_from_db(fields=["version"])
            with disable_concurrency(stale):
                stale.save()
            assert model.objects.get().title == "c"
        stale, error = conflict(Leaflet)
        assert isinstance(error, StaleVersion)
        assert not isinstance(error, DatabaseError)
        stale.refresh_from_db(fields=["lock_version"])
        stale.save()
        assert Leaflet.objects.get().title == "c"
        # AutoIncVersionField counts 1, 2, 3 | a version is a time in microseconds
        counted = Counted.objects.create(title="a")
        versions = []
        for _ in range(3):
            versions.append(counted.version)
            counted.save()
        assert versions == [1, 2, 3]
        leaflet = Leaflet.objects.create(title="a")
        assert abs(leaflet.lock_version / 1e6 - time.time()) < 3600
        # check_fields | ignore_fields, and update_fields
        chosen = Chosen.objects.create(title="a")
        before = chosen.version, leaflet.lock_version
        chosen.hits = leaflet.hits = 7
        chosen.save()
        leaflet.save(update_fields=["hits"])
        assert (chosen.version, leaflet.lock_version) == before
        chosen.title = leaflet.title = "b"
        chosen.save()
        leaflet.save(update_fields=["title"])
        assert chosen.version != before[0]
        assert leaflet.lock_version != before[1]
        # TriggerVersionField | AddVersionTrigger: raw SQL changes the version too
        factory(connection).create(Triggered._concurrencymeta.field)
        add_trigger(Leaflet)
        for model, field in ((Triggered, "version"), (Leaflet, "lock_version")):
            row = model.objects.create(title="a")
            row.refresh_from_db()
            with connection.cursor() as cursor:
                table = model._meta.db_table
                cursor.execute(f"UPDATE {table} SET title = 'b' WHERE id = {row.pk}")
            after = model.objects.get(pk=row.pk)
            assert getattr(after, field) != getattr(row, field)
            row.title = "c"
            with pytest.raises((RecordModifiedError, StaleVersion)):
                row.save()
    finally:
        with connection.schema_editor() as editor:
            for model in every:
                editor.delete_model(model)
