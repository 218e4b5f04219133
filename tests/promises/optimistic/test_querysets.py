"""VersionedQuerySet: updates, bulk methods, and partly loaded instances."""

from __future__ import annotations

import sqlite3
import threading

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F

from dlocks import StaleVersion
from dlocks.optimistic.retry import is_conflict
from tests import typed_usage
from tests.models import Article, Comment, Counter, Footnote, Page, Report
from tests.promises.optimistic.kinds import (
    COMMITS,
    execute,
    for_each_kind,
    is_stale,
    stored,
)

pytestmark = [pytest.mark.front, pytest.mark.django_db]


@pytest.fixture
def article():
    return Article.objects.create(title="first")


# update()


@for_each_kind
def test_update_makes_loaded_instances_stale(model, field):
    instance, other = model.objects.create(), model.objects.create()
    assert model.objects.filter(pk=instance.pk).update(**{field: "5"}) == 1
    assert str(getattr(model.objects.get(pk=instance.pk), field)) == "5"
    is_stale(instance.save)
    other.save()


@pytest.mark.storage
def test_update_with_a_version_filter_is_a_compare_and_swap(article):
    """A deletion without a filter ignores loaded versions."""
    rows = Article.objects.filter(pk=article.pk, version=article.version)
    assert rows.update(views=F("views") + 1) == 1
    assert rows.update(views=F("views") + 1) == 0
    assert stored(Article, name="views") == 1
    assert rows.delete()[0] == 0
    assert Article.objects.filter(pk=article.pk).delete()[0] == 1


@COMMITS
@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.usefixtures("repeatable_read")
def test_a_version_filter_compares_at_repeatable_read(article, in_second_connection):
    """A row that has changed since the transaction's snapshot is not overwritten."""
    rows = Article.objects.filter(version=article.version)
    try:
        with transaction.atomic():
            assert rows.exists()
            in_second_connection(lambda: Article.objects.update(title="theirs"))
            assert rows.update(title="mine") == 0
    except OperationalError as error:
        assert is_conflict(error)
    assert Article.objects.get().title == "theirs"


def test_an_update_of_parent_and_child_is_one_change():
    report = Report.objects.create()
    assert Report.objects.update(title="t", pages=3) == 1
    assert Report.objects.values_list("title", "pages").get() == ("t", 3)
    is_stale(report.save)


@COMMITS
@pytest.mark.engine("postgresql", "mariadb", "mysql")
def test_an_update_and_a_save_of_parent_and_child_do_not_deadlock(threads):
    """Both begin with the table of the version."""
    report = Report.objects.create(pages=1)
    written = {name: threading.Event() for name in ("update", "save")}

    def pause(mine, other):
        def wrapper(execute, sql, *arguments):
            result = execute(sql, *arguments)
            if sql.startswith("UPDATE") and not written[mine].is_set():
                written[mine].set()
                # The other one writes as well, or waits for this one.
                written[other].wait(0.5)
            return result

        return connection.execute_wrapper(wrapper)

    def update():
        with pause("update", "save"):
            Report.objects.update(pages=2)

    def save():
        with pause("save", "update"):
            try:
                report.save()
            except StaleVersion:
                # The update came first.
                return

    started = threads(update), threads(save)
    for thread in started:
        thread.join()


def test_update_refuses_a_version_as_a_value(article, django_assert_num_queries):
    with django_assert_num_queries(0):
        with pytest.raises(ValueError, match="is replaced by each update"):
            Article.objects.update(version=7)
        with pytest.raises(ValueError, match="is replaced by each update"):
            Article.objects.bulk_update([article], ["version"])
        with pytest.raises(ValueError, match="is replaced by each update"):
            # An older version would let a stale instance overwrite the row.
            Page.objects.update(hits=1, lock_version=7)
        assert Article.objects.none().update(title="x") == 0


@pytest.mark.storage
def test_updates_through_relations_replace_the_version(article):
    author = Counter.objects.create(name="a")
    author.articles.add(article)
    is_stale(article.save)
    article.refresh_from_db()
    author.delete()
    is_stale(article.save)
    article.refresh_from_db()
    assert article.author is None, "on_delete=SET_NULL has written the row"


def test_a_queryset_is_evaluated_again_after_its_update(article):
    Article.objects.update(author=Counter.objects.create(name="Ann"))
    report = Report.objects.create(pages=1)
    for rows in (
        Article.objects.filter(author__name="Ann"),
        Report.objects.filter(pk=report.pk),
    ):
        assert len(rows) == 1
        rows.update(title="new")
        assert rows[0].title == "new"
        rows[0].save()


# Bulk methods


@pytest.mark.storage
@for_each_kind
def test_bulk_update_compares_all_rows_and_names_stale_ones(model, field):
    rows = [model.objects.create() for _ in range(5)]
    for row in rows:
        setattr(row, field, "6")
    rows[0].save()
    held = [row.version for row in rows]
    for stale in (rows[1], rows[3]):
        model.objects.get(pk=stale.pk).save()
    gone = rows[4].pk
    model.objects.get(pk=gone).delete()
    error = is_stale(model.objects.bulk_update, rows, [field])
    assert "3 rows are stale" in str(error)
    assert (error.pk, error.held) == (rows[1].pk, held[1])
    assert error.found == stored(model, rows[1].pk)
    assert error.instance is rows[1]
    assert error.pks == (rows[1].pk, rows[3].pk, gone)
    written = map(str, model.objects.values_list(field, flat=True))
    assert list(written).count("6") == 1, "only save() wrote"
    assert [row.version for row in rows] == held


@for_each_kind
def test_bulk_update_keeps_the_change_of_another_writer(model, field):
    """One changed row is enough, and no row has to be missing."""
    rows = [model.objects.create() for _ in range(2)]
    before = getattr(model.objects.get(pk=rows[0].pk), field)
    model.objects.filter(pk=rows[1].pk).update(**{field: "7"})
    for row in rows:
        setattr(row, field, "6")
    error = is_stale(model.objects.bulk_update, rows, [field])
    assert "has changed" in str(error)
    written = model.objects.order_by("pk").values_list(field, flat=True)
    assert list(map(str, written)) == [str(before), "7"]


@for_each_kind
def test_bulk_update_replaces_the_versions(model, field):
    rows = [model.objects.create() for _ in range(5)]
    rows[2].save()
    for batch_size in (None, 2):
        before = [model.objects.get(pk=row.pk) for row in rows]
        for row in rows:
            setattr(row, field, "6")
        assert model.objects.bulk_update(rows, [field], batch_size=batch_size) == 5
        for row, old in zip(rows, before, strict=True):
            assert row.version == stored(model, row.pk) > old.version, batch_size
            is_stale(old.save)
    for row in rows:
        row.save()


@for_each_kind
def test_bulk_update_of_filtered_rows_leaves_all_instances_current(model, field):
    """As in Django, a row that the queryset excludes is not written."""
    rows = [model.objects.create() for _ in range(3)]
    before = stored(model, rows[0].pk, field)
    for row in rows:
        setattr(row, field, "5")
    chosen = model.objects.exclude(pk=rows[0].pk)
    assert chosen.bulk_update(rows, [field], batch_size=2) == 2
    assert stored(model, rows[0].pk, field) == before
    for row in rows:
        row.save()
        assert str(stored(model, row.pk, field)) == "5"


def test_bulk_update_of_many_rows_is_split():
    """SQLite takes fewer parameters in one statement than there are rows."""
    Article.objects.bulk_create(Article(title="t") for _ in range(1200))
    rows = list(Article.objects.all())
    for row in rows:
        row.views = 3
    assert Article.objects.bulk_update(rows, ["views"]) == 1200
    assert set(Article.objects.values_list("views", flat=True)) == {3}
    assert {row.version for row in rows} == set(
        Article.objects.values_list("version", flat=True)
    )


@pytest.mark.engine("sqlite")
def test_bulk_update_sends_no_more_parameters_than_sqlite_takes(monkeypatch):
    """Django counts on this number, or on that with which SQLite was compiled."""
    Article.objects.bulk_create(Article(title="t") for _ in range(400))
    rows = list(Article.objects.all())
    limit, most = sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 999
    monkeypatch.setattr(type(connection.features), "max_query_params", most)
    usual = connection.connection.setlimit(limit, most)
    try:
        assert Article.objects.bulk_update(rows, ["views"]) == 400
    finally:
        connection.connection.setlimit(limit, usual)


def test_bulk_update_refuses_invalid_arguments_as_in_django(article):
    before = article.version
    for rows, fields, options, message in (
        ([article, Article.objects.get()], ["title"], {}, "two instances"),
        ([article], ["title"], {"batch_size": 0}, "Batch size"),
        ([Article()], ["title"], {}, "primary key"),
        ([article], [], {}, "Field names"),
    ):
        with pytest.raises(ValueError, match=message):
            Article.objects.bulk_update(rows, fields, **options)
    assert Article.objects.bulk_update([], ["title"]) == 0
    assert article.version == before == stored(Article)


@pytest.mark.storage
def test_bulk_create_sets_versions_and_overwrites_no_row(article):
    """An instance that was not inserted because of a conflict is stale."""
    articles = [Article(title="a"), Article(title="b", version=9)]
    rows = Article.objects.bulk_create(articles)
    versions = [row.version for row in rows]
    assert article.version < versions[0] < versions[1]
    assert {article.version, *versions} == set(
        Article.objects.values_list("version", flat=True)
    )
    Page.objects.create(slug="a", text="theirs")
    mine = Page(slug="a", text="mine")
    Page.objects.bulk_create([mine], ignore_conflicts=True)
    is_stale(Page.objects.bulk_update, [mine], ["text"])
    is_stale(mine.save)
    assert Page.objects.get().text == "theirs"
    new = Page(slug="b")
    Page.objects.bulk_create([new], ignore_conflicts=True)
    new.save()
    with pytest.raises(ValueError, match="update_conflicts"):
        Page.objects.bulk_create([mine], None, False, True, ["text"], ["slug"])


@pytest.mark.storage
def test_get_or_create_and_update_or_create_keep_versions(article):
    found, created = Article.objects.get_or_create(title="first")
    assert (found.pk, created, found.version) == (article.pk, False, article.version)
    body = {"body": "b"}
    found, created = Article.objects.update_or_create(title="first", defaults=body)
    assert (created, found.version) == (False, stored(Article))
    is_stale(article.save)
    made, created = Article.objects.update_or_create(title="new", defaults=body)
    assert created
    made.save()


# Instances that are loaded in part


def test_select_related_instances_are_compared(article):
    comment = Comment.objects.create(article=article)
    beside = Comment.objects.select_related("article").get(pk=comment.pk).article
    article.save()
    is_stale(beside.save)
    fetched = Comment.objects.prefetch_related("article").get(pk=comment.pk).article
    fetched.save()
    assert stored(Article) == fetched.version


def test_only_also_loads_the_version(article, django_assert_num_queries):
    """So does ``only()`` of a related model's field."""
    Comment.objects.create(article=article)
    partly = Article.objects.only("title").get()
    related = Comment.objects.select_related("article").only("article__title")
    with django_assert_num_queries(2):
        partly.title = "second"
        partly.save()
        beside = related.get().article
    is_stale(article.save)
    with django_assert_num_queries(1):
        beside.save()
    assert stored(Article) == beside.version
    names = Article.objects.only("author__nothing")
    with pytest.raises(Exception, match="nothing"):
        list(names)


def test_an_instance_without_its_version_cannot_be_written(article):
    """A version that is read later would belong to another state than the values."""
    Comment.objects.create(article=article)
    Footnote.objects.create(article=article)
    related = Comment.objects.select_related("article").defer("article__version")
    plain = Footnote.objects.select_related("article").only("article__title")
    raw = Article.objects.raw("SELECT id, title FROM tests_article")
    for number, partly in enumerate((
        Article.objects.defer("version").get(),
        raw[0],
        related.get().article,
        plain.get().article,
    )):  # fmt: skip
        Article.objects.update(title="first")
        partly.title = "over"
        for use in (
            lambda partly=partly: partly.version,
            partly.full_clean,
            partly.save,
            partly.delete,
            partly.check_version,
            partly.is_stale,
            lambda partly=partly: Article.objects.bulk_update([partly], ["title"]),
        ):
            with pytest.raises(RuntimeError, match="without its version"):
                use()
        assert Article.objects.get().title == "first", number
        partly.refresh_from_db(fields=["version"])
        partly.save(update_fields=["title"])
        assert Article.objects.get().title == "over"


def test_a_partly_loaded_instance_can_be_refreshed_in_part(article):
    late = Article.objects.defer("body").get()
    Article.objects.update(title="theirs")
    late.refresh_from_db(from_queryset=Article.objects.defer("body"))
    assert late.title == "theirs"
    late.save()
    late.refresh_from_db(fields=(name for name in ["title"]))
    Article.objects.update(title="theirs again")
    late.refresh_from_db(fields=(name for name in ["title"]))
    assert late.title == "theirs again"


def test_loading_a_deferred_field_keeps_the_old_version(article):
    part = Article.objects.defer("title")
    for number, read in enumerate((
        lambda late: late.body,
        lambda late: late.refresh_from_db(fields=["body"]),
        lambda late: late.refresh_from_db(from_queryset=part),
        lambda late: late.refresh_from_db(from_queryset=Article.objects.only("body")),
    )):  # fmt: skip
        late = Article.objects.defer("body").get()
        version = late.version
        Article.objects.update(title=f"theirs {number}")
        read(late)
        assert late.version == version, number
        is_stale(late.save)
        late.refresh_from_db()
        late.save()


def test_an_update_counts_the_version_of_a_faster_clock(article):
    """The rows' own versions count, whatever the clock of this process."""
    execute(f"UPDATE tests_article SET version = {article.version + 10**12}")
    before = Article.objects.get()
    Article.objects.update(title="second")
    assert stored(Article) > before.version
    is_stale(before.save)


@pytest.mark.usefixtures("memory_locks")
def test_querysets_and_managers_have_the_types_of_their_models():
    """``make lint`` compares the types with these calls, which work too."""
    typed_usage.check_models()
