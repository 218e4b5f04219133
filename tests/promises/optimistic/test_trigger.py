"""AddVersionTrigger: raw SQL and other programs replace versions too."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.core.exceptions import FieldDoesNotExist
from django.db import NotSupportedError, connection, connections, migrations
from django.db.migrations.state import ModelState, ProjectState
from django.db.migrations.writer import MigrationWriter

from dlocks.optimistic import AddVersionTrigger, RemoveVersionTrigger
from tests.for_each import for_each
from tests.models import Article, Counter, Page, Report
from tests.promises.optimistic.kinds import COMMITS, execute, is_stale, stored

pytestmark = [pytest.mark.driver, COMMITS]


def state_of(*kinds):
    state = ProjectState()
    for model in kinds:
        state.add_model(ModelState.from_model(model))
    return state


def run(operation, *kinds, back=False):
    state = state_of(*kinds)
    method = operation.database_backwards if back else operation.database_forwards
    with connection.schema_editor() as editor:
        method("tests", editor, state, state)


@contextmanager
def trigger(*kinds):
    """Install the trigger of the last model, and remove it afterwards."""
    name = kinds[-1].__name__
    run(AddVersionTrigger(name), *kinds)
    try:
        yield
    finally:
        run(AddVersionTrigger(name), *kinds, back=True)


@pytest.mark.storage
def test_a_write_of_raw_sql_makes_loaded_instances_stale():
    article, other = Article.objects.create(title="a"), Article.objects.create()
    with trigger(Counter, Article):
        for title in ("b", "B"):
            before = article.version
            execute(
                "UPDATE tests_article SET title = %s WHERE id = %s", title, article.pk
            )
            is_stale(article.save)
            article.refresh_from_db()
            assert article.version > before
        other.save()
    execute("UPDATE tests_article SET title = 'c'")
    article.save()


@for_each("model", [Article, Report])
def test_the_writes_of_the_model_set_their_own_versions(model):
    with trigger(Counter, Article):
        row = model.objects.create()
        rows = model.objects.filter(pk=row.pk)
        for _ in range(3):
            row.save()
            assert row.version == stored(model, row.pk)
        row.save(update_fields=["title"])
        assert row.version == stored(model, row.pk)
        if model is Report:
            row.save(update_fields=["pages"])
        model.objects.bulk_update([row], ["title"])
        assert row.version == stored(model, row.pk)
        row.save()
        rows.update(title="new")
        is_stale(row.save)
        rows.get().delete()


def test_versions_of_raw_sql_are_not_repeated():
    """Neither that of a write that was rolled back, nor that of a faster clock."""
    Article.objects.create()
    ahead = stored(Article) + 10**12
    with trigger(Counter, Article):
        for start in (None, ahead):
            if start:
                execute("UPDATE tests_article SET version = %s", start)
            versions = [stored(Article)]
            for _ in range(5):
                execute("UPDATE tests_article SET title = 'x'")
                versions.append(stored(Article))
                assert versions == sorted(set(versions))


def test_a_program_that_writes_whole_rows_restores_no_version():
    """With its old version, an older instance would overwrite the program's change."""
    article, page = Article.objects.create(title="a"), Page.objects.create(slug="a")
    Article.objects.update(title="b")
    Page.objects.update(text="b")
    with trigger(Counter, Article), trigger(Page):
        whole = "UPDATE tests_article SET title = 'c', version = %s"
        execute(whole, article.version)
        is_stale(article.save)
        for columns in ("text = 'c', hits = 7", "hits = 8"):
            whole = f"UPDATE tests_page SET {columns}, lock_version = %s"
            execute(whole, page.lock_version)
            is_stale(page.save)


def test_a_write_of_ignored_fields_is_left_alone():
    page = Page.objects.create(slug="a", text="x")
    with trigger(Page):
        execute("UPDATE tests_page SET hits = hits + 1")
        page.hits = 7
        page.save(update_fields=["hits"])
        Page.objects.update(hits=8)
        page.save()
        for change in ("text = 'X'", "text = 'y', hits = 9", "text = 'y '"):
            execute(f"UPDATE tests_page SET {change}")
            is_stale(page.save)
            page.refresh_from_db()
        page.save()


def test_the_operation_is_repeated_behind_a_rename_of_the_version():
    before = state_of(Counter, Article)
    after = before.clone()
    rename = migrations.RenameField("Article", "version", "edition")
    rename.state_forwards("tests", after)
    again = AddVersionTrigger("Article")
    Article.objects.create()
    with trigger(Counter, Article):
        with connection.schema_editor() as editor:
            rename.database_forwards("tests", editor, before, after)
            again.database_forwards("tests", editor, before, after)
        try:
            versions = after.apps.get_model("tests", "Article").objects
            versions = versions.values_list("edition", flat=True)
            read = versions.get()
            execute("UPDATE tests_article SET title = 'b'")
            assert versions.get() > read
        finally:
            with connection.schema_editor() as editor:
                rename.database_backwards("tests", editor, after, before)


def test_the_operation_can_be_repeated_reversed_and_removed():
    page = Page.objects.create(slug="a")
    add, remove = AddVersionTrigger("Page"), RemoveVersionTrigger("page")
    run(add, Page)
    with trigger(Page):
        execute("UPDATE tests_page SET text = 'a'")
        is_stale(page.save)
    for operation, back, works in (
        (add, False, True),
        (remove, False, False),
        (remove, True, True),
        (add, True, False),
        (add, True, False),
    ):
        run(operation, Page, back=back)
        page.refresh_from_db()
        execute(f"UPDATE tests_page SET text = '{operation.describe()} {back}'")
        assert page.is_stale() == works


@pytest.mark.front
def test_a_migration_contains_the_operation():
    migration = migrations.Migration("0002_trigger", "tests")
    migration.operations = [AddVersionTrigger("Page"), RemoveVersionTrigger("Page")]
    text = MigrationWriter(migration).as_string()
    assert "dlocks.optimistic" in text
    names = [one.migration_name_fragment for one in migration.operations]
    assert names == ["page_version_trigger"] * 2


@pytest.mark.front
def test_a_version_in_a_parents_table_is_named(settings):
    with pytest.raises(FieldDoesNotExist, match=r"tests\.Article. Name that model"):
        run(AddVersionTrigger("Report"), Counter, Article, Report)
    with pytest.raises(FieldDoesNotExist, match="no VersionField"):
        run(AddVersionTrigger("Counter"), Counter)


def test_other_engines_and_databases_have_no_trigger(monkeypatch, settings):
    with monkeypatch.context() as patched:
        patched.setattr(connections["default"], "vendor", "oracle")
        with pytest.raises(
            NotSupportedError, match="no trigger for versions on oracle"
        ):
            AddVersionTrigger("Page").database_forwards(
                "tests", Editor(), state_of(Page), state_of(Page)
            )
    settings.DATABASE_ROUTERS = [Nowhere()]
    run(AddVersionTrigger("Page"), Page)
    page = Page.objects.create(slug="a")
    execute("UPDATE tests_page SET text = 'a'")
    page.save()


class Editor:
    connection = connection

    def execute(self, sql, params=()):
        raise AssertionError(sql)


class Nowhere:
    def allow_migrate(self, db, app_label, **hints):
        return False
