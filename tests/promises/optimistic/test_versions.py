"""VersionedModel: every way of writing in Django refuses stale writes."""

from __future__ import annotations

import copy
import io
import json
import pickle
from contextlib import contextmanager

import pytest
from asgiref.sync import sync_to_async
from django.core import checks, serializers
from django.core.management import call_command
from django.db import (
    DatabaseError,
    IntegrityError,
    OperationalError,
    connection,
    connections,
    models,
    transaction,
)
from django.db.migrations.state import ModelState, ProjectState
from django.db.models import F
from django.db.models.signals import post_save, pre_delete, pre_save

from dlocks import LockError, StaleVersion
from dlocks.optimistic import (
    VersionedManager,
    VersionedModel,
    VersionedQuerySet,
    VersionField,
    microseconds,
)
from dlocks.optimistic.retry import is_conflict
from tests.for_each import for_each
from tests.models import (
    Article,
    ArticleProxy,
    Comment,
    Counter,
    Footnote,
    Page,
    Place,
    Report,
    Restaurant,
    Seat,
)

pytestmark = [pytest.mark.front, pytest.mark.django_db]

# Transactions of these tests are committed.
COMMITS = pytest.mark.django_db(transaction=True)

KINDS = [
    (Article, "title"),
    (Report, "pages"),
    (ArticleProxy, "title"),
    (Restaurant, "stars"),
]


def for_each_kind(test):
    """Run a test for each kind of model in turn, and roll each one back."""

    def run(kind):
        with transaction.atomic():
            test(*kind)
            transaction.set_rollback(True)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return for_each("kind", KINDS)(run)


@pytest.fixture
def article():
    return Article.objects.create(title="first")


@pytest.fixture
def another(article):
    """Return the same row, read before anything else happens to it."""
    return Article.objects.get(pk=article.pk)


@pytest.fixture(scope="module")
def other(tmp_path_factory, django_db_setup, django_db_blocker):
    """Create a second database with the same tables."""
    path = tmp_path_factory.mktemp("other") / "other.sqlite3"
    settings = {
        **connection.settings_dict,
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {},
    }
    connections.databases["other"] = settings
    with django_db_blocker.unblock():
        with connections["other"].schema_editor() as editor:
            for model in (Counter, Article, Report, Comment, Footnote):
                editor.create_model(model)
        yield "other"
        connections["other"].close()
    del connections["other"]
    del connections.databases["other"]


def is_stale(write, *arguments, **options):
    """Check that a write is refused because the row has changed or is gone."""
    with pytest.raises(StaleVersion):
        write(*arguments, **options)


@contextmanager
def received(handler, sender, *signals):
    """Connect a handler to signals of a model."""
    for signal in signals:
        signal.connect(handler, sender=sender)
    try:
        yield
    finally:
        for signal in signals:
            signal.disconnect(handler, sender=sender)


def stored(model, pk):
    return model.objects.values_list("version", flat=True).get(pk=pk)


# save()


@pytest.mark.storage
@for_each_kind
def test_a_stale_save_is_refused_with_both_versions(model, field):
    first = model.objects.create()
    second, third = model.objects.get(pk=first.pk), model.objects.get(pk=first.pk)
    setattr(first, field, "7")
    first.save()
    setattr(second, field, "8")
    with pytest.raises(
        StaleVersion, match="expected version 1, found version 2"
    ) as caught:
        second.save()
    error = caught.value
    assert (error.model, error.pk, error.held, error.found) == (model, first.pk, 1, 2)
    assert isinstance(error, LockError)
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert "Nothing was written. Read it again" in str(copied)
    assert (copied.model, copied.pk, copied.pks) == (model, first.pk, (first.pk,))
    assert str(getattr(model.objects.get(pk=first.pk), field)) == "7"
    assert second.version == 1, "a refused save does not change the instance"
    is_stale(third.save, force_update=True)


def test_the_version_starts_at_one_and_counts_every_write(
    article, django_assert_num_queries
):
    """The comparison is part of the update."""
    assert (article.version, stored(Article, article.pk)) == (1, 1)
    for expected in (2, 3, 4):
        with django_assert_num_queries(1) as captured:
            article.save()
        assert "version" in captured[0]["sql"].split("WHERE")[1]
        assert (article.version, stored(Article, article.pk)) == (expected, expected)
    assert Article(title="not there yet").version == 0


@pytest.mark.driver
@for_each_kind
def test_a_deleted_row_is_not_inserted_again(model, field):
    instance = model.objects.create()
    model.objects.get(pk=instance.pk).delete()
    for options in ({}, {"force_update": True}, {"update_fields": [field]}):
        with pytest.raises(StaleVersion, match="is gone") as caught:
            instance.save(**options)
        assert caught.value.found is None
    assert not model.objects.exists()
    assert not Article.objects.exists()
    assert not Place.objects.exists()


@for_each_kind
def test_update_fields_compare_and_increment_the_version(model, field):
    """Those of a child increment the version of its parent."""
    first, second = model.objects.create(), model.objects.get()
    setattr(first, field, "7")
    first.save(update_fields=[field])
    assert (first.version, stored(model, first.pk)) == (2, 2)
    setattr(second, field, "8")
    for other in (field, "version"):
        is_stale(second.save, update_fields=[other])
    assert str(getattr(model.objects.get(), field)) == "7"
    first.save(update_fields=[])
    assert stored(model, first.pk) == 2, "no field, no write"
    first.save(update_fields=["version"])
    assert (first.version, stored(model, first.pk)) == (3, 3)


def test_a_write_through_the_parent_model_changes_the_same_row():
    report = Report.objects.create()
    parent = Article.objects.get(pk=report.pk)
    parent.save()
    is_stale(report.save)
    report.refresh_from_db()
    report.delete(keep_parents=True)
    is_stale(parent.save)


def test_f_expressions_are_compared_and_written_once(article, another):
    article.views = F("views") + 1
    article.save(update_fields=["views"])
    article.refresh_from_db()
    assert (article.views, article.version) == (1, 2)
    another.views = F("views") + 1
    is_stale(another.save)
    assert Article.objects.get().views == 1


def test_a_failing_child_table_keeps_the_version():
    report, taken = Report.objects.create(), Article.objects.create()
    taken.save()
    clash = Report(article_ptr=taken, pages=1)
    with pytest.raises(IntegrityError), transaction.atomic():
        clash.save()
    assert clash.version == 0
    report.pages = "not a number"
    with pytest.raises(ValueError, match="not a number"):
        report.save()
    assert (report.version, stored(Report, report.pk)) == (1, 1)


def test_a_new_instance_never_overwrites_an_existing_row(article):
    article.save()
    for options in ({}, {"force_insert": True}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Article(pk=article.pk, title="over").save(**options)
    with pytest.raises(IntegrityError), transaction.atomic():
        article.save(force_insert=True)
    assert article.version == 2
    with pytest.raises(ValueError, match="was not read"):
        Article(pk=article.pk, title="over").save(force_update=True)
    with pytest.raises(ValueError, match="was not read"):
        Article(pk=article.pk, title="over").delete()
    assert Article.objects.get().title == "first"


def test_a_version_set_by_hand_is_compared(article):
    """So is that of a pickled instance."""
    kept = pickle.dumps(article)
    article.save()
    is_stale(pickle.loads(kept).save)
    with pytest.raises(StaleVersion):
        Article(pk=article.pk, title="over", version=1).save(force_update=True)
    Article(pk=article.pk, title="over", version="2").save(update_fields=["title"])
    found = Article.objects.get()
    assert (found.title, found.version) == ("over", 3)
    found.version = 1
    is_stale(found.save)


def test_a_copy_starts_with_a_new_version(article):
    article.save()
    clone = copy.deepcopy(article)
    clone.pk = None
    clone.save()
    assert clone.pk != article.pk
    assert (clone.version, stored(Article, clone.pk)) == (1, 1)
    assert stored(Article, article.pk) == 2
    article.save()


def test_a_refreshed_instance_can_be_saved(article, another):
    """Refreshing only the version allows an overwrite."""
    article.save()
    another.title = "mine"
    another.refresh_from_db(fields=["version"])
    another.save()
    assert (another.title, stored(Article, article.pk)) == ("mine", 3)
    article.refresh_from_db()
    article.save()
    assert Article.objects.values_list("title", "version").get() == ("mine", 4)


def test_handlers_see_the_new_version_and_may_save_again(article, another):
    """A refused save sends no ``post_save``."""
    seen = []

    def handler(instance, signal, created=None, **kwargs):
        seen.append((signal, instance.version, created))
        if signal is post_save and len(seen) == 2:
            instance.save()

    with received(handler, Article, pre_save, post_save):
        article.save()
        is_stale(another.save)
    assert seen == [
        (pre_save, 1, None),
        (post_save, 2, False),
        (pre_save, 2, None),
        (post_save, 3, False),
        (pre_save, 1, None),
    ]
    assert (article.version, stored(Article, article.pk)) == (3, 3)


# Transactions


@pytest.mark.driver
@for_each_kind
def test_the_callers_transaction_can_go_on_after_a_refusal(model, field):
    """Nothing was written, so nothing has to be rolled back."""
    first, second = model.objects.create(), model.objects.get()
    with transaction.atomic():
        first.save()
        is_stale(second.save)
        is_stale(second.delete)
        is_stale(model.objects.bulk_update, [second], [field])
        second.refresh_from_db()
        setattr(second, field, "9")
        second.save()
    assert str(getattr(model.objects.get(), field)) == "9"


@COMMITS
@pytest.mark.storage
def test_after_a_rollback_the_instance_is_stale():
    article = Article.objects.create()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        article.save()
        raise ZeroDivisionError
    assert (article.version, stored(Article, article.pk)) == (2, 1)
    with pytest.raises(StaleVersion, match="expected version 2, found version 1"):
        article.save()
    article.refresh_from_db()
    article.save()


def prepare(model, monkeypatch):
    """Delete all rows, and return the names of a field and of the version."""
    Article.objects.all().delete()
    Page.objects.all().delete()
    monkeypatch.setattr(Page.lock_version.field, "start", 1)
    return ("text", "lock_version") if model is Page else ("title", "version")


@COMMITS
@for_each(
    "case",
    [
        (Article, "save"),
        (Article, "bulk_update"),
        (Report, "save"),
        (Report, "insert"),
        (Page, "bulk_update"),
        (Page, "insert"),
    ],
)
def test_after_a_rollback_an_equal_version_is_stale(case, monkeypatch):
    (model, write), (field, name) = case, prepare(case[0], monkeypatch)
    mine = model(pk="7" if model is Page else 7)
    if write != "insert":
        mine.save()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        setattr(mine, field, "mine")
        if write == "bulk_update":
            model.objects.bulk_update([mine], [field])
        else:
            mine.save()
        raise ZeroDivisionError
    theirs = model.objects.get() if write != "insert" else model(pk=mine.pk)
    setattr(theirs, field, "theirs")
    theirs.save()
    assert getattr(mine, name) == getattr(theirs, name)
    for instance in (mine, copy.copy(mine), copy.deepcopy(mine)):
        is_stale(instance.save)
        is_stale(instance.delete)
    assert getattr(model.objects.get(), field) == "theirs"
    mine.refresh_from_db()
    mine.save()


@COMMITS
def test_a_savepoint_rollback_makes_stale_but_a_commit_does_not(article, another):
    with transaction.atomic():
        article.save()
        with transaction.atomic():
            article.save()
        article.save()
        pickle.loads(pickle.dumps(article)).save()
    article.refresh_from_db()
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        article.save()
        raise ZeroDivisionError
    Article.objects.update(title="theirs")
    is_stale(article.save)


@COMMITS
def test_an_instance_can_be_saved_again_after_the_commit():
    article = Article(title="first")

    def save_in_another():
        with transaction.atomic():
            Article.objects.create(title="another")
        with transaction.atomic():
            article.save()
        article.save()

    def fail():
        raise ZeroDivisionError

    with transaction.atomic():
        transaction.on_commit(article.save)
        transaction.on_commit(save_in_another)
        article.save()
        transaction.on_commit(article.save)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        transaction.on_commit(fail)
        article.save()
    with transaction.atomic():
        Article.objects.create(title="another")
    article.save()
    assert article.version == stored(Article, article.pk) == 7


@COMMITS
@for_each(
    "case",
    [
        (Article, "select_related"),
        (Article, "refresh_from_db"),
        (Report, "get"),
        (Report, "refresh_from_db"),
        (Page, "get"),
        (Page, "refresh the version"),
    ],
)
def test_a_read_of_a_rolled_back_write_is_stale(case, monkeypatch):
    (model, read), (field, name) = case, prepare(case[0], monkeypatch)
    mine = model.objects.create(pk="7" if model is Page else 7)
    if read == "select_related":
        Comment.objects.create(article=mine)
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        model.objects.update(**{field: "undone"})
        if read.startswith("refresh"):
            mine.refresh_from_db(fields=[name] if "version" in read else None)
        elif read == "select_related":
            mine = Comment.objects.select_related("article").get().article
        else:
            mine = model.objects.get()
        raise ZeroDivisionError
    theirs = model.objects.get()
    setattr(theirs, field, "theirs")
    theirs.save()
    for write in (mine.save, mine.delete):
        is_stale(write)
    assert getattr(model.objects.get(), field) == "theirs"
    mine.refresh_from_db()
    mine.save()


@COMMITS
def test_writes_to_other_rows_do_not_make_a_read_stale(article):
    other = Page.objects.create(slug="7")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        Page.objects.update(text="undone")
        article = Article.objects.get()
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            other.refresh_from_db()
            raise ZeroDivisionError
        other.save()
        raise ZeroDivisionError
    article.save()
    with transaction.atomic():
        Article.objects.update(title="done")
        article = Article.objects.get()
    article.save()
    assert stored(Article, article.pk) == 4


def test_full_clean_does_not_load_a_deferred_version(article, another):
    mine = Article.objects.defer("version").get()
    another.save()
    mine.title = "mine"
    mine.full_clean()
    with pytest.raises(RuntimeError, match="loaded without its version"):
        mine.save()
    article.refresh_from_db()
    article.full_clean()
    article.save()


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


@for_each_kind
def test_a_pre_delete_receiver_may_write_the_row(model, field):
    for verb in ("save", "check_version", "touch"):
        instance = model.objects.create()

        def note(instance, verb=verb, **kwargs):
            getattr(instance, verb)()

        with received(note, model, pre_delete):
            stale = model.objects.get()
            model.objects.update(**{field: "7"})
            is_stale(stale.delete)
            instance.refresh_from_db()
            instance.delete()
        assert not model.objects.exists(), verb


@COMMITS
def test_a_failed_deletion_leaves_the_instance_unchanged(article):
    """After a failed ``post_save`` receiver, it has the stored version."""

    def fail(instance, signal, **kwargs):
        if signal is pre_delete:
            instance.save()
        raise ZeroDivisionError

    report = Report.objects.create(title="first")
    with received(fail, Article, pre_delete), pytest.raises(ZeroDivisionError):
        article.delete()
    with received(fail, Report, post_save), pytest.raises(ZeroDivisionError):
        report.save()
    article.save()
    assert stored(Article, article.pk) == article.version == 2
    Report.objects.update(title="theirs")
    is_stale(report.save)


@COMMITS
def test_an_instance_is_not_stale_after_a_failed_save():
    report, other = Report.objects.create(pages=1), Report.objects.create(pages=2)
    before = report.version
    with pytest.raises(
        OverflowError if connection.vendor == "sqlite" else DatabaseError
    ):
        report.pages = 2**70
        report.save()
    report.pages = 3
    report.save()
    assert report.version == before + 1
    page = Page(slug="new")
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        page.save()
        raise ZeroDivisionError
    page.save(force_insert=True)
    page.save()
    assert Report.objects.get(pk=other.pk).version == 1


def test_a_partly_loaded_instance_can_be_refreshed_in_part(article):
    late = Article.objects.defer("body").get()
    Article.objects.update(title="theirs")
    late.refresh_from_db(from_queryset=Article.objects.defer("body"))
    late.refresh_from_db(from_queryset=Article.objects.only("body"))
    assert (late.title, late.version) == ("theirs", 2)
    late.save()
    late.refresh_from_db(fields=(name for name in ["title"]))
    Article.objects.update(title="theirs again")
    late.refresh_from_db(fields=(name for name in ["title"]))
    assert late.title == "theirs again"


# Fields that are read later.


def test_loading_a_deferred_field_keeps_the_old_version(article):
    part = Article.objects.defer("title")
    for number, read in enumerate((
        lambda late: late.body,
        lambda late: late.refresh_from_db(fields=["body"]),
        lambda late: late.refresh_from_db(from_queryset=part),
    )):  # fmt: skip
        late = Article.objects.defer("body").get()
        version = late.version
        Article.objects.update(title=f"theirs {number}")
        read(late)
        assert late.version == version, number
        is_stale(late.save)
        late.refresh_from_db()
        late.save()


# Replicas.


class ReadsElsewhere:
    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "default"


def test_a_deleted_row_read_from_a_replica_is_not_recreated(
    article, settings, monkeypatch
):
    monkeypatch.setitem(
        connections.settings, "replica", connections.settings["default"]
    )
    settings.DATABASE_ROUTERS = [ReadsElsewhere()]

    def from_replica():
        row = Article.objects.using("default").values().get()
        return Article.from_db("replica", list(row), list(row.values()))

    from_replica().save()
    article = from_replica()
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM tests_article")
    for force in ({}, {"force_update": True}, {"update_fields": ["title"]}):
        with pytest.raises(StaleVersion, match="is gone"):
            article.save(**force)


# Conditions on other tables.


# A condition on a parent, on a joined table, and on a child.
JOINED = for_each(
    "rows",
    [
        lambda: Report.objects.filter(version=1),
        lambda: Article.objects.filter(version=1, author__name="o"),
        lambda: Restaurant.objects.filter(version=1),
    ],
)


def create_a_row_of(rows):
    """Create a row that matches. Return its model, and the field that tests write."""
    model = rows().model
    Article.objects.all().delete()
    Place.objects.all().delete()
    if model is Restaurant:
        model.objects.create()
        return model, "name"
    model.objects.create(author=Counter.objects.get_or_create(name="o")[0])
    return model, "title"


@COMMITS
@pytest.mark.engine("postgresql", "mariadb", "mysql")
@JOINED
def test_a_version_filter_is_atomic_across_tables(rows, in_second_connection):
    model, field = create_a_row_of(rows)
    theirs = []

    def come_between(execute, sql, params, many, context):
        if sql.startswith("UPDATE") and not theirs:
            theirs.append(None)
            theirs[0] = in_second_connection(write_if_not_locked, model, field)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(come_between):
        updated = rows().update(**{field: "mine"})
    assert (updated, theirs) in [(1, [False]), (0, [True])]
    assert getattr(model.objects.get(), field) == ("mine" if updated else "theirs")


@COMMITS
@pytest.mark.engine("postgresql", "mariadb", "mysql")
@pytest.mark.usefixtures("repeatable_read")
@JOINED
def test_a_version_filter_compares_at_repeatable_read(rows, in_second_connection):
    """A row that has changed since the transaction's snapshot is not overwritten."""
    model, field = create_a_row_of(rows)
    try:
        with transaction.atomic():
            assert rows().exists()
            in_second_connection(lambda: model.objects.update(**{field: "theirs"}))
            assert rows().update(**{field: "mine"}) == 0
    except OperationalError as error:
        assert is_conflict(error)
    assert getattr(model.objects.get(), field) == "theirs"


@COMMITS
@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.usefixtures("repeatable_read")
def test_manual_transactions_do_not_hide_a_conflict(in_second_connection):
    """``check_version()`` reads the current row after ``set_autocommit(False)``."""
    Article.objects.create()
    transaction.set_autocommit(False)
    try:
        article = Article.objects.get()
        in_second_connection(lambda: Article.objects.update(title="theirs"))
        with pytest.raises((StaleVersion, OperationalError)) as caught:
            article.check_version()
        assert is_conflict(caught.value)
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def write_if_not_locked(model, field):
    """Write a row as any code does. Return whether it was not locked."""
    try:
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute(
                    "SET lock_timeout = 1000"
                    if connection.vendor == "postgresql"
                    else "SET innodb_lock_wait_timeout = 1"
                )
            model.objects.update(**{field: "theirs"})
    except DatabaseError:
        return False
    return True


# delete()


@pytest.mark.driver
@for_each_kind
def test_a_stale_delete_is_refused(model, field):
    first = model.objects.create()
    second = model.objects.get()
    first.save()
    with pytest.raises(StaleVersion) as caught:
        second.delete()
    assert (caught.value.held, caught.value.found) == (1, 2)
    assert (second.pk, second.version) == (first.pk, 1)
    assert model.objects.count() == 1
    assert first.delete()[0] >= 1
    assert not model.objects.exists()
    with pytest.raises(StaleVersion, match="is gone"):
        second.delete()


def test_a_refused_delete_does_not_cascade(article, another):
    """A deleted instance can be saved as a new row."""
    Footnote.objects.create(article=article)
    article.save()
    is_stale(another.delete)
    assert Footnote.objects.count() == 1
    assert article.delete() == (2, {"tests.Footnote": 1, "tests.Article": 1})
    article.save()
    assert (article.version, Article.objects.count()) == (1, 1)


# Querysets


@for_each_kind
def test_update_makes_loaded_instances_stale(model, field):
    instance = model.objects.create()
    model.objects.create()
    assert model.objects.filter(pk=instance.pk).update(**{field: "5"}) == 1
    assert str(getattr(model.objects.get(pk=instance.pk), field)) == "5"
    is_stale(instance.save)
    assert sorted(model.objects.values_list("version", flat=True)) == [1, 2]


@pytest.mark.storage
def test_update_with_a_version_filter_is_a_compare_and_swap(article):
    """An update of fields of parent and child increments the version once.

    A deletion without a filter ignores loaded versions.
    """
    rows = Article.objects.filter(pk=article.pk, version=article.version)
    assert rows.update(views=F("views") + 1) == 1
    assert rows.update(views=F("views") + 1) == 0
    assert Article.objects.get().views == 1
    assert rows.delete()[0] == 0
    assert Article.objects.filter(pk=article.pk).delete()[0] == 1
    report = Report.objects.create()
    assert Report.objects.update(title="t", pages=3) == 1
    assert stored(Report, report.pk) == 2


def test_update_refuses_a_version_as_a_value(article, django_assert_num_queries):
    with django_assert_num_queries(0):
        with pytest.raises(ValueError, match="is incremented by each update"):
            Article.objects.update(version=7)
        with pytest.raises(ValueError, match="is incremented by each update"):
            Article.objects.bulk_update([article], ["version"])
        assert Article.objects.none().update(title="x") == 0


@pytest.mark.storage
def test_updates_through_relations_increment_the_version(article):
    author = Counter.objects.create(name="a")
    author.articles.add(article)
    assert stored(Article, article.pk) == 2
    article.refresh_from_db()
    author.delete()
    assert stored(Article, article.pk) == 3, "on_delete=SET_NULL has written the row"
    is_stale(article.save)


@pytest.mark.storage
@for_each_kind
def test_bulk_update_compares_all_rows_and_names_stale_ones(model, field):
    rows = [model.objects.create() for _ in range(5)]
    for row in rows:
        setattr(row, field, "6")
    rows[0].save()
    for stale in (rows[1], rows[3]):
        model.objects.get(pk=stale.pk).save()
    gone = rows[4].pk
    model.objects.get(pk=gone).delete()
    with pytest.raises(StaleVersion, match="3 rows are stale") as caught:
        model.objects.bulk_update(rows, [field])
    error = caught.value
    assert (error.pk, error.held, error.found) == (rows[1].pk, 1, 2)
    assert error.pks == (rows[1].pk, rows[3].pk, gone)
    written = map(str, model.objects.values_list(field, flat=True))
    assert list(written).count("6") == 1, "only save() wrote"
    assert [row.version for row in rows] == [2, 1, 1, 1, 1]


@for_each_kind
def test_bulk_update_keeps_the_change_of_another_writer(model, field):
    """One changed row is enough, and no row has to be missing."""
    rows = [model.objects.create() for _ in range(2)]
    before = getattr(model.objects.get(pk=rows[0].pk), field)
    model.objects.filter(pk=rows[1].pk).update(**{field: "7"})
    for row in rows:
        setattr(row, field, "6")
    with pytest.raises(StaleVersion, match="has changed"):
        model.objects.bulk_update(rows, [field])
    written = model.objects.order_by("pk").values_list(field, flat=True)
    assert list(map(str, written)) == [str(before), "7"]


@for_each_kind
def test_bulk_update_increments_the_version_once(model, field):
    rows = [model.objects.create() for _ in range(5)]
    rows[2].save()
    versions = [1, 1, 2, 1, 1]
    for batch_size in (None, 2):
        for row in rows:
            setattr(row, field, "6")
        assert model.objects.bulk_update(rows, [field], batch_size=batch_size) == 5
        versions = [version + 1 for version in versions]
        assert [row.version for row in rows] == versions, batch_size
    for row in rows:
        row.save()


def test_bulk_update_of_many_rows_is_split():
    """SQLite takes fewer parameters in one statement than there are rows."""
    Article.objects.bulk_create(Article(title="t") for _ in range(1200))
    rows = list(Article.objects.all())
    for row in rows:
        row.views = 3
    assert Article.objects.bulk_update(rows, ["views"]) == 1200
    assert set(Article.objects.values_list("views", "version")) == {(3, 2)}


def test_bulk_update_refuses_invalid_arguments_as_in_django(article):
    for rows, fields, options, message in (
        ([article, Article.objects.get()], ["title"], {}, "two instances"),
        ([article], ["title"], {"batch_size": 0}, "Batch size"),
        ([Article()], ["title"], {}, "primary key"),
        ([article], [], {}, "Field names"),
    ):
        with pytest.raises(ValueError, match=message):
            Article.objects.bulk_update(rows, fields, **options)
    assert Article.objects.bulk_update([], ["title"]) == 0
    assert (article.version, stored(Article, article.pk)) == (1, 1)


@pytest.mark.storage
def test_bulk_create_sets_versions_and_overwrites_no_row(article):
    """An insert with ignored conflicts has no version."""
    articles = [Article(title="a"), Article(title="b", version=9)]
    rows = Article.objects.bulk_create(articles)
    assert [row.version for row in rows] == [1, 1]
    assert set(Article.objects.values_list("version", flat=True)) == {1}
    Page.objects.create(slug="a", text="theirs")
    mine = Page(slug="a", text="mine")
    Page.objects.bulk_create([mine], ignore_conflicts=True)
    with pytest.raises(RuntimeError, match="without its lock_version"):
        Page.objects.bulk_update([mine], ["text"])
    with pytest.raises(RuntimeError, match="without its lock_version"):
        mine.save()
    assert Page.objects.get().text == "theirs"
    new = [Article(title="new")]
    (keyless,) = Article.objects.bulk_create(new, ignore_conflicts=True)
    assert keyless.version == 0
    with pytest.raises(ValueError, match="update_conflicts"):
        Page.objects.bulk_create([mine], None, False, True, ["text"], ["slug"])


@pytest.mark.storage
def test_get_or_create_and_update_or_create_keep_versions(article):
    found, created = Article.objects.get_or_create(title="first")
    assert (found.pk, created, found.version) == (article.pk, False, 1)
    body = {"body": "b"}
    found, created = Article.objects.update_or_create(title="first", defaults=body)
    assert (created, found.version, stored(Article, article.pk)) == (False, 2, 2)
    is_stale(article.save)
    made, created = Article.objects.update_or_create(title="new", defaults=body)
    assert (created, made.version) == (True, 1)
    made.save()


def test_select_related_instances_are_compared(article):
    comment = Comment.objects.create(article=article)
    beside = Comment.objects.select_related("article").get(pk=comment.pk).article
    article.save()
    is_stale(beside.save)
    fetched = Comment.objects.prefetch_related("article").get(pk=comment.pk).article
    fetched.save()
    assert stored(Article, article.pk) == 3


# Instances whose version is not loaded


def test_only_also_loads_the_version(article, django_assert_num_queries):
    partly = Article.objects.only("title").get()
    with django_assert_num_queries(1):
        partly.title = "second"
        partly.save()
    assert stored(Article, article.pk) == 2
    is_stale(article.save)


def test_an_instance_without_its_version_cannot_be_written(article):
    """Reading the version later does not help.

    It would belong to another state than the other values.
    """
    Comment.objects.create(article=article)
    related = Comment.objects.select_related("article").only("article__title", "text")
    raw = Article.objects.raw("SELECT id, title FROM tests_article")
    for number, partly in enumerate(
        (Article.objects.defer("version").get(), raw[0], related.get().article)
    ):
        Article.objects.update(title="first")
        assert partly.version == 2 + 2 * number
        partly.title = "over"
        for write in (partly.save, partly.delete, partly.check_version):
            with pytest.raises(RuntimeError, match="without its version"):
                write()
        with pytest.raises(RuntimeError, match="without its version"):
            Article.objects.bulk_update([partly], ["title"])
        assert Article.objects.get().title == "first", number
        partly.refresh_from_db(fields=["version"])
        partly.save(update_fields=["title"])
        assert Article.objects.get().title == "over"


# Fixtures and other databases


@pytest.mark.storage
def test_loaddata_never_lowers_a_version(article, tmp_path):
    for _ in range(4):
        article.save()
    dumped = io.StringIO()
    call_command("dumpdata", "tests.Article", stdout=dumped)
    (row,) = json.loads(dumped.getvalue())
    assert row["fields"]["version"] == 5
    path = tmp_path / "articles.json"

    def load(version):
        row["fields"] |= {"title": "loaded", "version": version}
        path.write_text(json.dumps([row]))
        call_command("loaddata", path, verbosity=0)
        return Article.objects.values_list("title", "version").get()

    assert load(2) == ("loaded", 6)
    is_stale(article.save)
    assert load(40) == ("loaded", 40)
    Article.objects.all().delete()
    assert load(3) == ("loaded", 3)


def test_a_fixture_of_a_child_model_can_be_loaded(tmp_path):
    report = Report.objects.create(title="t", pages=1)
    report.save()
    dumped = io.StringIO()
    call_command("dumpdata", "tests.Article", "tests.Report", stdout=dumped)
    Report.objects.all().delete()
    path = tmp_path / "reports.json"
    path.write_text(dumped.getvalue())
    for version in (2, 3):
        call_command("loaddata", path, verbosity=0)
        assert stored(Report, report.pk) == version
    written = serializers.serialize("json", [Article.objects.get()])
    (loaded,) = serializers.deserialize("json", written)
    loaded.save()
    assert loaded.object.version == 4


@pytest.mark.django_db(databases=["default", "other"])
def test_using_compares_and_writes_in_that_database(article, other):
    article.save()
    article.save(using=other)
    assert article.version == 1
    assert stored(Article, article.pk) == 2
    assert Article.objects.using(other).get().title == "first"
    second = Article.objects.using(other).get()
    article.title = "there"
    article.save()
    assert Article.objects.get().title == "first"
    is_stale(second.save)
    is_stale(second.delete)
    here = Article.objects.get()
    here.save(using=other)
    assert Article.objects.using(other).get().version == 3, "both had version 2"
    older = Article.objects.get()
    is_stale(older.save, using=other)
    Article.objects.using(other).get().delete()
    assert Article.objects.count() == 1
    here = Article.objects.get()
    Article.objects.all().delete()
    is_stale(here.save, using="default")


# Other ways to count and check


def test_touch_only_increments_the_version(article, another):
    """``check_version()`` does not write."""
    before = article.changed_at
    another.check_version()
    article.title = "not written"
    article.touch()
    assert (article.version, stored(Article, article.pk)) == (2, 2)
    assert Article.objects.values_list("title", "changed_at").get() == ("first", before)
    is_stale(another.touch)
    is_stale(another.check_version)
    article.delete()
    with pytest.raises(StaleVersion, match="is gone"):
        another.check_version()


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@COMMITS
@for_each("model", [Article, Report])
def test_check_version_locks_the_row_in_a_transaction(model, in_second_connection):
    """The row stays unchanged until the end of the transaction."""
    row = model.objects.create()
    with transaction.atomic():
        row.check_version()
        assert not in_second_connection(write_if_not_locked, model, "title")
    assert in_second_connection(write_if_not_locked, model, "title")


def test_ignored_fields_do_not_change_the_version():
    page = Page.objects.create(slug="a")
    stale = Page.objects.get()
    page.save()
    version = page.lock_version
    stale.hits = 5
    stale.save(update_fields=["hits"])
    Page.objects.update(hits=F("hits") + 1)
    Page.objects.bulk_update([stale], ["hits"])
    assert Page.objects.get().lock_version == version
    is_stale(stale.save, update_fields=["hits", "text"])
    is_stale(stale.save)
    Page.objects.update(hits=0, text="t")
    assert Page.objects.get().lock_version == version + 1
    Page.objects.get().delete()
    with pytest.raises(DatabaseError):
        page.save(update_fields=["hits"])


@pytest.mark.storage
def test_a_recreated_row_has_a_newer_version():
    """Its versions start with the clock.

    An editor of the old row cannot overwrite the new one.
    """
    old = Page.objects.create(slug="a", text="old")
    Page.objects.get().delete()
    new = Page.objects.create(slug="a", text="new")
    assert new.lock_version > old.lock_version > 1_000_000_000_000_000
    is_stale(old.save)


@pytest.mark.storage
def test_a_composite_primary_key_is_compared():
    seats = [Seat.objects.create(row=1, number=number) for number in (1, 2)]
    stale = [Seat.objects.get(row=1, number=number) for number in (1, 2)]
    seats[0].save()
    with pytest.raises(StaleVersion) as caught:
        stale[0].save()
    assert caught.value.pk == (1, 1)
    is_stale(stale[0].delete)
    for seat in stale:
        seat.guest = "Ada"
    with pytest.raises(StaleVersion) as caught:
        Seat.objects.bulk_update(stale, ["guest"])
    assert caught.value.pks == ((1, 1),)
    seats[0].guest = seats[1].guest = "Bob"
    assert Seat.objects.bulk_update(seats, ["guest"]) == 2
    assert list(Seat.objects.values_list("version", flat=True)) == [3, 2]
    assert not Seat.objects.exclude(guest="Bob").exists()
    seats[0].delete()
    assert Seat.objects.count() == 1


async def test_async_methods_compare_versions_too():
    article = await Article.objects.acreate(title="a")
    second = await Article.objects.aget()
    await article.asave()
    await article.atouch()
    for write in (second.asave, second.adelete, second.atouch, second.acheck_version):
        with pytest.raises(StaleVersion):
            await write()
    assert await Article.objects.aupdate(title="b") == 1
    await article.arefresh_from_db()
    assert await Article.objects.abulk_update([article], ["title"]) == 1
    await article.adelete()
    assert await sync_to_async(Article.objects.count)() == 0


# The model itself


@pytest.mark.storage
def test_the_field_works_in_migrations():
    field = VersionField(start=microseconds, ignore_fields=["hits"])
    _, path, args, kwargs = field.deconstruct()
    assert path == "dlocks.optimistic.VersionField"
    clone = VersionField(*args, **kwargs)
    assert (clone.start, clone.ignore_fields) == (microseconds, {"hits"})
    assert (clone.default, clone.editable) == (0, False)
    assert "start" not in VersionField().deconstruct()[3]
    state = ProjectState()
    for model in (Counter, Article):
        state.add_model(ModelState.from_model(model))
    historical = state.apps.get_model("tests", "Article")
    historical.objects.create(title="old")
    assert stored(Article, Article.objects.get().pk) == 1


@pytest.mark.storage
def test_rows_older_than_the_column_are_compared(article):
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tests_article SET version = 0")
    first, second = Article.objects.get(), Article.objects.get()
    first.save()
    assert stored(Article, article.pk) == 1
    is_stale(second.save)


@pytest.fixture
def ids():
    from django.apps import apps

    def check(model):
        try:
            found = sorted(message.id for message in model.check())
            return [one for one in found if one.startswith("dlocks")]
        finally:
            apps.all_models["tests"].pop(model.__name__.lower(), None)
            apps.clear_cache()

    return check


def test_the_checks_report_unprotected_models(ids):
    class Plain(VersionedModel):
        objects = models.Manager()

        class Meta:
            app_label = "tests"

    class Two(VersionedModel):
        other = VersionField()

        class Meta:
            app_label = "tests"

    class Odd(VersionedModel):
        version = VersionField(ignore_fields=["hits"])

        class Meta:
            app_label = "tests"

    class Good(VersionedModel):
        objects = VersionedManager.from_queryset(VersionedQuerySet)()

        class Meta:
            app_label = "tests"

    found = [ids(model) for model in (Plain, Two, Odd, Good)]
    assert found == [["dlocks.E021"], ["dlocks.E020"], ["dlocks.E022"], []]
    every = [message.id or "" for message in checks.run_checks(databases=[])]
    assert not [one for one in every if one.startswith("dlocks.E02")]
