"""VersionedModel: every way of writing an instance in Django refuses stale writes."""

from __future__ import annotations

import copy
import io
import json
import pickle
from functools import partial

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
from django.test.utils import isolate_apps

from dlocks import LockError, StaleVersion
from dlocks.optimistic import (
    VersionedManager,
    VersionedModel,
    VersionedQuerySet,
    VersionField,
)
from dlocks.optimistic.retry import is_conflict
from tests.for_each import for_each
from tests.models import (
    Article,
    Badge,
    Comment,
    Counter,
    Footnote,
    Page,
    Place,
    Report,
    Restaurant,
    Seat,
)
from tests.promises.optimistic.kinds import (
    COMMITS,
    execute,
    for_each_kind,
    is_stale,
    own_checks,
    received,
    stored,
)

pytestmark = [pytest.mark.front, pytest.mark.django_db]


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


# save()


@pytest.mark.storage
@for_each_kind
def test_a_stale_save_is_refused_with_both_versions(model, field):
    first = model.objects.create()
    second, third = model.objects.get(pk=first.pk), model.objects.get(pk=first.pk)
    held = second.version
    setattr(first, field, "7")
    first.save()
    setattr(second, field, "8")
    message = f"expected version {held}, found version {first.version}"
    with pytest.raises(StaleVersion, match=message) as caught:
        second.save()
    error = caught.value
    assert (error.model, error.pk, error.instance) == (model, first.pk, second)
    assert error.instance is second
    assert (error.held, error.found) == (held, first.version)
    assert isinstance(error, LockError)
    copied = pickle.loads(pickle.dumps(error))
    assert str(copied) == str(error)
    assert "Nothing was written. Read it again" in str(copied)
    assert (copied.model, copied.pk, copied.pks) == (model, first.pk, (first.pk,))
    assert copied.instance is None
    assert str(getattr(model.objects.get(pk=first.pk), field)) == "7"
    assert second.version == held, "a refused save does not change the instance"
    is_stale(third.save, force_update=True)


def test_each_write_has_a_greater_version(article, django_assert_num_queries):
    """The comparison is part of the update."""
    versions = [article.version]
    assert versions == [stored(Article)]
    for _ in range(3):
        with django_assert_num_queries(1) as captured:
            article.save()
        assert "version" in captured[0]["sql"].split("WHERE")[1]
        versions.append(article.version)
        assert stored(Article) == versions[-1]
    assert versions == sorted(set(versions))
    assert Article(title="not there yet").version == 0


@pytest.mark.driver
@for_each_kind
def test_a_deleted_row_is_not_inserted_again(model, field):
    instance = model.objects.create()
    model.objects.get(pk=instance.pk).delete()
    for options in ({}, {"force_update": True}, {"update_fields": [field]}):
        error = is_stale(instance.save, **options)
        assert error.found is None
        assert "is gone" in str(error)
        assert "force_insert=True" in str(error)
    assert not model.objects.exists()
    assert not Article.objects.exists()
    assert not Place.objects.exists()


@for_each_kind
def test_update_fields_compare_and_replace_the_version(model, field):
    """Those of a child replace the version of its parent."""
    first, second = model.objects.create(), model.objects.get()
    setattr(first, field, "7")
    first.save(update_fields=[field])
    version = first.version
    assert second.version < version == stored(model)
    setattr(second, field, "8")
    for other in (field, "version"):
        is_stale(second.save, update_fields=[other])
    assert str(getattr(model.objects.get(), field)) == "7"
    first.save(update_fields=[])
    assert stored(model) == version, "no field, no write"
    first.save(update_fields=["version"])
    assert version < first.version == stored(model)


def test_a_write_through_the_parent_model_changes_the_same_row():
    report = Report.objects.create()
    parent = Article.objects.get(pk=report.pk)
    parent.save()
    is_stale(report.save)
    report.refresh_from_db()
    report.delete(keep_parents=True)
    is_stale(parent.save)


def test_a_refused_save_writes_no_parent():
    """Django writes the tables of the parents first."""
    restaurant = Restaurant.objects.create(name="first")
    Restaurant.objects.update(stars=1)
    restaurant.name = "second"
    unread = Restaurant(pk=restaurant.pk, version=restaurant.version, name="second")
    for write in (
        restaurant.save,
        partial(unread.save, force_update=True),
        partial(unread.save, update_fields=["name", "stars"]),
    ):
        is_stale(write)
        assert Place.objects.get().name == "first"


def test_f_expressions_are_compared_and_written_once(article, another):
    article.views = F("views") + 1
    article.save(update_fields=["views"])
    article.refresh_from_db()
    assert article.views == 1
    another.views = F("views") + 1
    is_stale(another.save)
    assert stored(Article, name="views") == 1


def test_a_failing_child_table_keeps_the_version():
    report, taken = Report.objects.create(), Article.objects.create()
    before = report.version
    taken.save()
    clash = Report(article_ptr=taken, pages=1)
    with pytest.raises(IntegrityError), transaction.atomic():
        clash.save()
    assert clash.version == 0
    report.pages = "not a number"
    with pytest.raises(ValueError, match="not a number"), transaction.atomic():
        report.save()
    assert report.version == before == stored(Report, report.pk)


def test_a_new_instance_never_overwrites_an_existing_row(article):
    article.save()
    before = article.version
    for options in ({}, {"force_insert": True}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Article(pk=article.pk, title="over").save(**options)
    with pytest.raises(IntegrityError), transaction.atomic():
        article.save(force_insert=True)
    assert article.version == before
    with pytest.raises(ValueError, match="was not read"):
        Article(pk=article.pk, title="over").save(force_update=True)
    with pytest.raises(ValueError, match="was not read"):
        Article(pk=article.pk, title="over").delete()
    assert Article.objects.get().title == "first"


def test_a_version_set_by_hand_is_compared(article):
    """So is that of a pickled instance."""
    kept, held = pickle.dumps(article), article.version
    article.save()
    is_stale(pickle.loads(kept).save)
    is_stale(Article(pk=article.pk, title="over", version=held).save, force_update=True)
    text = str(article.version)
    Article(pk=article.pk, title="over", version=text).save(update_fields=["title"])
    found = Article.objects.get()
    assert found.title == "over"
    found.version = held
    is_stale(found.save)


def test_a_version_in_a_parents_table_is_set_by_hand_too():
    """The instance has the key of its own table, and not yet that of the parent's."""
    stored_at = Report.objects.create(title="first").pk
    for number, options in enumerate(
        ({"update_fields": ["pages"]}, {"force_update": True})
    ):
        held = stored(Report)
        report = Report(pk=stored_at, version=held, pages=number)
        assert not report.is_stale()
        report.save(**options)
        assert stored(Report, name="pages") == number
        is_stale(Report(pk=stored_at, version=held, pages=7).save, **options)
    report = Report(pk=stored_at, version=stored(Report), pages=8)
    Report.objects.bulk_update([report], ["pages"])
    assert stored(Report, name="pages") == 8


def test_a_copy_starts_with_a_new_version(article):
    article.save()
    clone = copy.deepcopy(article)
    clone.pk = None
    clone.save()
    assert clone.pk != article.pk
    assert clone.version == stored(Article, clone.pk) > article.version
    article.save()


def test_an_instance_without_a_key_gets_its_default_and_is_inserted():
    """It is a new row, also if the instance was deleted before."""
    badge = Badge.objects.create(title="first")
    badge.delete()
    badge.save()
    assert stored(Badge) == badge.version
    badge.pk = None
    badge.save()
    assert Badge.objects.count() == 2


def test_a_refreshed_instance_can_be_saved(article, another):
    """Refreshing only the version allows an overwrite."""
    article.save()
    another.title = "mine"
    another.refresh_from_db(fields=["version"])
    another.save()
    assert another.title == "mine"
    article.refresh_from_db()
    article.save()
    assert Article.objects.get().title == "mine"


def test_handlers_see_the_new_version_and_may_save_again(article, another):
    """A refused save sends no ``post_save``."""
    seen = []

    def handler(instance, signal, created=None, **kwargs):
        seen.append((signal, instance.version, created))
        if signal is post_save and len(seen) == 2:
            instance.save()

    first = article.version
    with received(handler, Article, pre_save, post_save):
        article.save()
        is_stale(another.save)
    second = seen[1][1]
    third = article.version
    assert first < second < third == stored(Article)
    assert seen == [
        (pre_save, first, None),
        (post_save, second, False),
        (pre_save, second, None),
        (post_save, third, False),
        (pre_save, first, None),
    ]


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


def test_a_refusal_in_a_receiver_undoes_the_save_around_it(article, another):
    """Only a save that has written nothing leaves the transaction as it was."""
    article.save()
    comment = Comment.objects.create(article=article, text="first")

    def save_stale(**kwargs):
        another.save()

    comment.text = "second"
    with (
        received(save_stale, Comment, pre_save, post_save),
        pytest.raises(StaleVersion),
        transaction.atomic(),
    ):
        comment.save()
    assert Comment.objects.get().text == "first"


@COMMITS
def test_a_failed_deletion_leaves_the_instance_unchanged(article):
    def fail(instance, signal, **kwargs):
        instance.save()
        raise ZeroDivisionError

    with received(fail, Article, pre_delete), pytest.raises(ZeroDivisionError):
        article.delete()
    assert article.version == stored(Article)
    article.save()


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
            execute(
                "SET lock_timeout = 1000"
                if connection.vendor == "postgresql"
                else "SET innodb_lock_wait_timeout = 1"
            )
            model.objects.update(**{field: "theirs"})
    except DatabaseError:
        return False
    return True


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


# delete()


@pytest.mark.driver
@for_each_kind
def test_a_stale_delete_is_refused(model, field):
    first = model.objects.create()
    second = model.objects.get()
    before = second.version
    first.save()
    error = is_stale(second.delete)
    assert (error.held, error.found) == (before, first.version)
    assert error.instance is second
    assert (second.pk, second.version) == (first.pk, before)
    assert model.objects.count() == 1
    assert first.delete()[0] >= 1
    assert not model.objects.exists()
    assert "is gone" in str(is_stale(second.delete))


def test_a_refused_delete_does_not_cascade(article, another):
    """A deleted instance can be saved as a new row."""
    Footnote.objects.create(article=article)
    article.save()
    is_stale(another.delete)
    assert Footnote.objects.count() == 1
    assert article.delete() == (2, {"tests.Footnote": 1, "tests.Article": 1})
    article.save()
    assert stored(Article) == article.version


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


# Fixtures and other databases


@pytest.mark.storage
def test_loaddata_replaces_a_version(article, tmp_path):
    for _ in range(4):
        article.save()
    dumped = io.StringIO()
    call_command("dumpdata", "tests.Article", stdout=dumped)
    (row,) = json.loads(dumped.getvalue())
    assert row["fields"]["version"] == article.version
    path = tmp_path / "articles.json"

    def load(version):
        row["fields"] |= {"title": "loaded", "version": version}
        path.write_text(json.dumps([row]))
        call_command("loaddata", path, verbosity=0)
        return Article.objects.values_list("title", "version").get()

    title, version = load(2)
    assert title == "loaded"
    assert version > article.version
    is_stale(article.save)
    assert load(version + 10**9)[1] > version + 10**9
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
    call_command("loaddata", path, verbosity=0)
    assert stored(Report, report.pk) == report.version
    call_command("loaddata", path, verbosity=0)
    assert stored(Report, report.pk) > report.version
    written = serializers.serialize("json", [Article.objects.get()])
    (loaded,) = serializers.deserialize("json", written)
    loaded.save()
    assert loaded.object.version == stored(Article)


@pytest.mark.django_db(databases=["default", "other"])
def test_using_compares_and_writes_in_that_database(article, other):
    """A copy in another database has the version of the original."""
    article.save()
    version = article.version
    article.save(using=other)
    assert article.version == version == stored(Article)
    second = Article.objects.using(other).get()
    assert (second.title, second.version) == ("first", version)
    article.title = "there"
    article.save()
    assert Article.objects.get().title == "first"
    is_stale(second.save)
    is_stale(second.delete)
    Article.objects.get().save(using="default")
    is_stale(Article.objects.get().save, using=other)
    Article.objects.using(other).get().delete()
    assert Article.objects.count() == 1
    here = Article.objects.get()
    Article.objects.all().delete()
    is_stale(here.save, using="default")


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
    execute("DELETE FROM tests_article")
    for force in ({}, {"force_update": True}, {"update_fields": ["title"]}):
        assert "is gone" in str(is_stale(article.save, **force))


# Other ways to count and check


def test_touch_only_replaces_the_version(article, another):
    """``check_version()`` and ``is_stale()`` do not write."""
    before, version = article.changed_at, article.version
    another.check_version()
    assert not another.is_stale()
    article.title = "not written"
    article.touch()
    assert version < article.version == stored(Article)
    assert Article.objects.values_list("title", "changed_at").get() == ("first", before)
    assert another.is_stale()
    is_stale(another.touch)
    is_stale(another.check_version)
    article.delete()
    assert another.is_stale()
    assert "is gone" in str(is_stale(another.check_version))
    with pytest.raises(ValueError, match="was not read"):
        Article(pk=7).is_stale()


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
    assert Page.objects.get().lock_version > version
    Page.objects.get().delete()
    with pytest.raises(DatabaseError):
        page.save(update_fields=["hits"])


@pytest.mark.storage
def test_a_composite_primary_key_is_compared():
    seats = [Seat.objects.create(row=1, number=number) for number in (1, 2)]
    stale = [Seat.objects.get(row=1, number=number) for number in (1, 2)]
    seats[0].save()
    assert is_stale(stale[0].save).pk == (1, 1)
    is_stale(stale[0].delete)
    for seat in stale:
        seat.guest = "Ada"
    assert is_stale(Seat.objects.bulk_update, stale, ["guest"]).pks == ((1, 1),)
    seats[0].guest = seats[1].guest = "Bob"
    assert Seat.objects.bulk_update(seats, ["guest"]) == 2
    assert [seat.version for seat in seats] == list(
        Seat.objects.values_list("version", flat=True)
    )
    assert not Seat.objects.exclude(guest="Bob").exists()
    seats[0].delete()
    assert Seat.objects.count() == 1


async def test_async_methods_compare_versions_too():
    article = await Article.objects.acreate(title="a")
    second = await Article.objects.aget()
    await article.asave()
    await article.atouch()
    assert await second.ais_stale()
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
    field = VersionField(ignore_fields=["hits"])
    _, path, args, kwargs = field.deconstruct()
    assert path == "dlocks.optimistic.VersionField"
    clone = VersionField(*args, **kwargs)
    assert clone.ignore_fields == {"hits"}
    assert (clone.default, clone.editable) == (0, False)
    state = ProjectState()
    for model in (Counter, Article):
        state.add_model(ModelState.from_model(model))
    historical = state.apps.get_model("tests", "Article")
    historical.objects.create(title="old")
    assert stored(Article) > 0


@pytest.mark.storage
def test_rows_older_than_the_column_are_compared(article):
    execute("UPDATE tests_article SET version = 0")
    first, second = Article.objects.get(), Article.objects.get()
    first.save()
    assert stored(Article) == first.version > 0
    is_stale(second.save)


@isolate_apps("tests")
def test_the_checks_report_unprotected_models():
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

    found = [own_checks(model) for model in (Plain, Two, Odd, Good)]
    assert found == [["dlocks.E021"], ["dlocks.E020"], ["dlocks.E022"], []]
    every = [message.id or "" for message in checks.run_checks(databases=[])]
    assert not [one for one in every if one.startswith("dlocks.E02")]
