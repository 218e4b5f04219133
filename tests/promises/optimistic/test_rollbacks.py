"""Rollbacks and clocks: no stale instance looks current, and no other is refused."""

from __future__ import annotations

import copy
import pickle
import sys
import time

import pytest
from django.db import DatabaseError, connection, connections, models, transaction
from django.db.models.signals import post_save
from django.test import TestCase

from dlocks import StaleToken
from tests.for_each import for_each
from tests.models import (
    Article,
    Chapter,
    Counter,
    Crane,
    Machine,
    Note,
    Page,
    Place,
    Report,
    Restaurant,
    Robot,
)
from tests.promises.optimistic.kinds import (
    COMMITS,
    execute,
    is_stale,
    received,
    stored,
)

pytestmark = pytest.mark.whole("sqlite", "postgresql")


class Undone(Exception):  # noqa: N818 (not an error)
    pass


def undo(*steps):
    """Call functions in a transaction, and roll it back."""
    with pytest.raises(Undone), transaction.atomic():
        for one in steps:
            one()
        raise Undone


def undo_by_hand(*steps):
    """Call functions in a transaction without an atomic block, and roll it back."""
    transaction.set_autocommit(False)
    try:
        for one in steps:
            one()
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)


def delete_all():
    for model in (Article, Place, Page, Machine):
        models.QuerySet(model).delete()


UNDO = for_each("undo", [undo, undo_by_hand])


# Versions


@COMMITS
@UNDO
def test_after_a_rollback_the_instance_is_stale(undo):
    article = Article.objects.create()
    before = article.version
    undo(article.save)
    error = is_stale(article.save)
    assert error.held == article.version > before == error.found
    article.refresh_from_db()
    article.save()


@COMMITS
@UNDO
@for_each(
    "case",
    [
        (Article, "save"),
        (Article, "bulk_update"),
        (Article, "update"),
        (Report, "save"),
        (Report, "update"),
        (Restaurant, "save"),
        (Page, "refresh the version"),
    ],
)
def test_a_stale_instance_never_looks_current(case, undo):
    """Another writer saves the row as often as the transaction that is rolled back."""
    model, write = case
    name = {Page: "text", Restaurant: "name"}.get(model, "title")
    mine = model(pk="7" if model is Page else 7, **{name: "first"})
    delete_all()
    mine.save()

    def work():
        setattr(mine, name, "mine")
        if write == "bulk_update":
            model.objects.bulk_update([mine], [name])
        elif write == "save":
            mine.save()
        else:
            model.objects.update(**{name: "mine"})
            mine.refresh_from_db(fields=["lock_version"] if model is Page else None)

    undo(work)
    theirs = model.objects.get()
    setattr(theirs, name, "theirs")
    theirs.save()
    for instance in (mine, copy.copy(mine), pickle.loads(pickle.dumps(mine))):
        is_stale(instance.save)
        is_stale(instance.delete)
    assert getattr(model.objects.get(), name) == "theirs"


@COMMITS
@for_each("verb", ["save", "update", "bulk_update"])
def test_writers_with_slower_clocks_have_different_versions(verb):
    """The row has the version of a faster clock."""

    def write(article):
        if verb == "save":
            article.save()
        elif verb == "update":
            Article.objects.update(title="new")
            article.refresh_from_db()
        else:
            Article.objects.bulk_update([article], ["title"])

    delete_all()
    mine, theirs = Article.objects.create(), None
    execute(f"UPDATE tests_article SET version = {mine.version + 10**12}")
    equal = 0
    for _ in range(4):
        mine, theirs = Article.objects.get(), Article.objects.get()
        undo(lambda mine=mine: write(mine))
        write(theirs)
        equal += mine.version == theirs.version
    assert not equal


@COMMITS
def test_a_recreated_row_has_another_version():
    """An editor of the old row cannot overwrite the new one."""
    old = Page.objects.create(slug="a", text="old")
    Page.objects.get().delete()
    new = Page.objects.create(slug="a", text="new")
    assert new.lock_version > old.lock_version
    is_stale(old.save)


def test_a_clock_that_stands_still_or_goes_back_repeats_no_version(db, monkeypatch):
    now = time.time_ns()
    versions = []
    for moment in (now, now, now - 10**12):
        monkeypatch.setattr(time, "time_ns", lambda moment=moment: moment)
        article = Article.objects.create()
        versions.append(article.version)
        article.save()
        versions.append(article.version)
    assert versions == sorted(set(versions))


@COMMITS
@UNDO
def test_a_read_beside_a_write_that_is_rolled_back_is_not_stale(undo):
    """The row itself never changed."""
    delete_all()
    article, other = Article.objects.create(), Article.objects.create()
    Page.objects.create(slug="a")
    read = []

    def work():
        Article.objects.filter(pk=other.pk).update(title="undone")
        Page.objects.update(text="undone")
        read.append(Article.objects.get(pk=article.pk))

    undo(work)
    (article,) = read
    article.save()


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
        raise Undone

    with transaction.atomic():
        transaction.on_commit(article.save)
        transaction.on_commit(save_in_another)
        article.save()
        with transaction.atomic():
            article.save()
        article.save()
        transaction.on_commit(article.save)
    with pytest.raises(Undone), transaction.atomic():
        transaction.on_commit(fail)
        article.save()
    article.save()
    assert article.version == stored(Article, article.pk)


def calls(function):
    """Return the number of calls of Python functions."""
    counted = 0

    def profile(frame, event, arg):
        nonlocal counted
        counted += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return counted


@COMMITS
def test_the_cost_does_not_grow_with_a_transactions_callbacks():
    delete_all()
    made = iter([Article() for _ in range(3)])

    def work():
        for article in Article.objects.all()[:50]:
            article.touch()
        next(made).save()

    with transaction.atomic():
        Article.objects.bulk_create([Article() for _ in range(50)])
        work()
        before = calls(work)
        for _ in range(200):
            transaction.on_commit(str)
        # A driver may make a few calls more, but each callback costs none.
        assert calls(work) < before + 200


# Inserts


@COMMITS
@for_each("model", [Article, Report, Restaurant, Page])
@for_each("verb", ["save", "create", "bulk_create", "savepoint"])
def test_an_instance_whose_insert_was_rolled_back_can_be_saved(model, verb):
    values = {"slug": "a"} if model is Page else {}
    made = []
    delete_all()

    def insert():
        made.append(model(**values))
        if verb == "bulk_create" and model in {Article, Page}:
            model.objects.bulk_create(made)
        elif verb == "create":
            made[0] = model.objects.create(**values)
        else:
            made[0].save()
            made[0].save()

    if verb == "savepoint":
        with transaction.atomic():
            undo(insert)
            made[0].save()
    else:
        undo(insert)
        made[0].save()
    made[0].save()
    assert model.objects.get().pk == made[0].pk


@COMMITS
def test_a_rolled_back_insert_overwrites_and_recreates_no_row():
    """The key may belong to another row by now."""
    mine = Page(slug="a", text="mine")
    undo(mine.save)
    theirs = Page.objects.create(slug="a", text="theirs")
    is_stale(mine.save)
    is_stale(mine.delete)
    assert Page.objects.get().text == "theirs"
    mine.refresh_from_db()
    theirs.delete()
    is_stale(mine.save)
    kept = Page(slug="b")
    with transaction.atomic():
        kept.save()
        Page.objects.all().delete()
        is_stale(kept.save)
    is_stale(kept.save)
    kept.save(force_insert=True)


@COMMITS
def test_a_rolled_back_insert_of_a_fenced_row_can_be_saved():
    for model in (Machine, Robot, Crane):
        made = []
        undo(lambda made=made, model=model: made.append(_insert(model)))
        made[0].save()
        assert model.objects.get().fence == 7
        models.QuerySet(model).delete()
        with pytest.raises(StaleToken, match="is gone"):
            made[0].save()
    made = [Machine(state="made")]
    undo(lambda: Machine.objects.bulk_create(made))
    made[0].save(token=7)
    assert Machine.objects.get().state == "made"


def _insert(model):
    row = model.objects.fenced(7).create()
    row.save()
    return row


@COMMITS
def test_a_failed_save_leaves_the_instance_as_it_was():
    report = Report.objects.create(pages=1)
    before = report.version
    with pytest.raises(
        OverflowError if connection.vendor == "sqlite" else DatabaseError
    ):
        report.pages = 2**70
        report.save()
    assert report.version == before
    report.pages = 3
    report.save()


# Fences


@COMMITS
@UNDO
@for_each("model", [Machine, Robot, Crane])
def test_a_claim_that_was_rolled_back_writes_nothing(model, undo):
    """Another holder may have written the row since, even with an older token."""
    delete_all()
    row = model.objects.create()
    undo(lambda: row.claim(7))
    older = model.objects.claim(row.pk, 6)
    older.steps = 6
    older.save()
    row.steps = 7
    message = "has token 6, so the claim with token 7 was rolled back"
    for write in (row.save, row.delete):
        with pytest.raises(StaleToken, match=message) as caught:
            write()
        assert caught.value.found == 6
    assert model.objects.get().steps == 6
    row.claim(7)
    row.steps += 1
    row.save()
    assert model.objects.get().steps == 7


# The tests of users


class InTestCase(TestCase):
    """Rollbacks of blocks in a TestCase, which is one transaction."""

    def test_a_rolled_back_claim(self):
        machine = Machine.objects.create()
        undo(lambda: machine.claim(7))
        Machine.objects.claim(machine.pk, 6)
        with pytest.raises(StaleToken):
            machine.save()

    def test_a_rolled_back_save(self):
        article = Article.objects.create()
        undo(article.save)
        Article.objects.get().save()
        is_stale(article.save)

    def test_a_read_beside_a_rolled_back_write(self):
        article, other = Article.objects.create(), Article.objects.create()
        read = []
        undo(other.save, lambda: read.append(Article.objects.get(pk=article.pk)))
        read[0].save()

    def test_callbacks_are_those_of_the_test(self):
        with self.captureOnCommitCallbacks() as callbacks:
            Article.objects.create().save()
            Article.objects.bulk_create([Article()])
        assert not callbacks

    def test_a_rolled_back_insert(self):
        """It has to be said there, since a TestCase commits nothing."""
        article = Article()
        undo(article.save)
        is_stale(article.save)
        article.save(force_insert=True)


# Django's own writes


@pytest.mark.django_db
def test_the_order_of_related_rows_is_written():
    """``set_note_order()`` compares no version. ``bulk_update()`` of it does."""
    chapter = Chapter.objects.create()
    notes = [Note.objects.create(chapter=chapter) for _ in range(3)]
    keys = [note.pk for note in notes]
    assert list(chapter.get_note_order()) == keys
    chapter.set_note_order(keys[::-1])
    assert list(chapter.get_note_order()) == keys[::-1]
    for note in notes:
        is_stale(note.save)
        is_stale(Note.objects.bulk_update, [note], ["_order"])
        note.refresh_from_db()
        note.save()
    Note.objects.bulk_update(notes, ["_order"])


@pytest.mark.django_db
def test_a_custom_on_delete_handler_replaces_the_version():
    chapter, editor = Chapter.objects.create(), Counter.objects.create(name="a")
    Note.objects.create(chapter=chapter, editor=editor)
    note = Note.objects.get()
    other = Note.objects.create(chapter=chapter)
    editor.delete()
    is_stale(note.save)
    note.refresh_from_db()
    assert note.editor is None
    note.save()
    other.save()
    Counter.objects.create(name="b")
    Counter.objects.all().delete()


@COMMITS
@for_each("model", [Report, Restaurant, Article, Robot])
def test_receivers_of_post_save_run_outside_of_the_saves_transaction(model):
    """As in Django, a receiver that fails does not undo the save."""
    seen = []

    def fail(**kwargs):
        seen.append(connections["default"].in_atomic_block)
        raise Undone

    delete_all()
    row = model.objects.create()
    if model is Robot:
        row.claim(5)
    with received(fail, model, post_save):
        with pytest.raises(Undone):
            row.save()
    assert seen == [False]
    if model is not Robot:
        assert row.version == stored(model)
    row.save()


# Mixins that write


@pytest.mark.django_db
def test_a_mixin_may_pass_djangos_arguments_by_keyword():
    """django-fsm-2 does so, and compares its own field in the same statement."""
    note = Note.objects.create(chapter=Chapter.objects.create())
    stale = Note.objects.get()
    note.text = "closed"
    note.save()
    is_stale(stale.save)
    note.text = "late"
    with (
        pytest.raises(DatabaseError, match="did not affect any rows"),
        transaction.atomic(),
    ):
        note.save(force_update=True)
    assert Note.objects.get().text == "closed"
