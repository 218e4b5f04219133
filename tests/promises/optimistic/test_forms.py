"""Forms and the admin: a stale edit saves nothing and shows both values."""

from __future__ import annotations

import html
import re
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from urllib.parse import urlencode

import pytest
from django import forms
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.db.models.signals import post_delete, post_save, pre_save
from django.forms import BaseModelFormSet, modelformset_factory
from django.http import QueryDict
from django.test import Client
from django.utils import timezone
from django.utils.formats import date_format

from dlocks import StaleVersion
from dlocks.optimistic.admin import VersionedModelAdmin, VersionedStackedInline
from dlocks.optimistic.forms import (
    TOKEN,
    Conflict,
    VersionedFormSet,
    VersionedModelForm,
    shown,
    sign_version,
)
from tests.for_each import for_each
from tests.models import Album, Article, Comment, Counter
from tests.promises.admin.conftest import boss
from tests.promises.admin.pages import page
from tests.promises.optimistic.kinds import received

__all__ = ["boss"]

pytestmark = [pytest.mark.front, pytest.mark.django_db]

LIST = "/admin/tests/article/"


class ArticleForm(VersionedModelForm):
    class Meta:
        model = Article
        fields = ["title", "body", "views", "author"]


@pytest.fixture
def article():
    return Article.objects.create(title="first", body="text", views=3)


# Controls that belong to no field, or that a click on another button leaves out.
OTHERS = {None, "q", "action", "csrfmiddlewaretoken", "index"}


def sent(text: str, **changes) -> dict:
    """Return the form data that a browser would send, with some values changed."""
    data = {}
    text = visible(text)
    for tag in re.findall(r"<input [^>]*>", text):
        facts = dict(re.findall(r'([\w-]+)="([^"]*)"', tag))
        kind, name = facts.get("type"), facts.get("name")
        if kind not in {"submit", "checkbox", "file"} or "checked" in tag:
            value = facts.get("value", "on" if kind == "checkbox" else "")
            data[name] = html.unescape(value)
    textarea = r'<textarea [^>]*name="([^"]+)"[^>]*>\s?(.*?)</textarea>'
    for name, value in re.findall(textarea, text, re.DOTALL):
        data[name] = html.unescape(value)
    select = r'<select name="(\w+)"[^>]*>(.*?)</select>'
    for name, options in re.findall(select, text, re.DOTALL):
        chosen = re.findall(r'value="([^"]*)"[^>]* selected', options)
        data[name] = chosen[0] if chosen else ""
    for name in list(data):
        if name in OTHERS or name.startswith("_"):
            del data[name]
    return {**data, **changes}


def visible(text: str) -> str:
    """Return a page without the parts that a browser does not show or send."""
    return re.sub(r"<template>.*?</template>", "", text, flags=re.DOTALL)


def cells(text: str) -> list[tuple[str, ...]]:
    """Return the rows of the comparison on a page."""

    def clean(cell):
        return html.unescape(re.sub(r"<button.*?</button>|<[^>]+>", "", cell)).strip()

    row = r'<tr[^>]*>\s*(<th scope="row">.*?</th>.*?)</tr>'
    cell = r"<t[hd].*?</t[hd]>"
    found = re.findall(row, visible(text), re.DOTALL)
    return [tuple(map(clean, re.findall(cell, one, re.DOTALL))) for one in found]


@contextmanager
def before_the_write(signal, action):
    """Call ``action`` as another user, between all checks and the write."""
    done = []

    def handler(instance, **kwargs):
        if not done:
            done.append(True)
            action()

    with received(handler, Article, signal):
        yield
    assert done


# Forms


def bound(article, form=ArticleForm, **changes):
    """Return the submitted form, bound to the current row."""
    unbound = form(instance=article)
    values = {name: unbound[name].value() for name in unbound.fields}
    data = {name: "" if value is None else value for name, value in values.items()}
    return form({**data, **changes}, instance=Article.objects.get(pk=article.pk))


def test_a_form_shows_both_values_and_keeps_its_input(article):
    author = Counter.objects.create(name="Ada")
    Article.objects.update(title="<script>theirs", author=author)
    form = bound(article, title="<script>yours", body="text")
    assert not form.is_valid()
    assert form.errors.as_data()["__all__"][0].code == "conflict"
    assert isinstance(form.conflict, Conflict)
    versions = article.version, Article.objects.get().version
    assert (form.conflict.held, form.conflict.found) == versions
    found = form.conflict.differences
    assert [(one.label, one.yours, one.theirs, one.is_yours) for one in found] == [
        ("Title", "<script>yours", "<script>theirs", True),
        ("Author", "", "Ada", False),
    ]
    kept = {"title": "<script>yours", "body": "text", "author": str(author.pk)}
    assert kept.items() <= sent(str(form)).items()
    text = str(form.conflict)
    assert "Yours" in text
    assert "&lt;script&gt;theirs" in text
    assert "<script>" not in text
    assert Article.objects.get().title == "<script>theirs"


def test_a_resubmitted_form_saves_unless_changed_again(article):
    """A row that has changed after the check of the form is refused by its save."""
    Article.objects.update(title="theirs")
    form = bound(article, title="yours")
    assert not form.is_valid()
    again = sent(str(form))
    Article.objects.update(title="third")
    second = ArticleForm(again, instance=Article.objects.get())
    assert not second.is_valid()
    assert [one.theirs for one in second.conflict.differences] == ["third"]
    again = sent(str(second))
    third = ArticleForm(again, instance=Article.objects.get())
    assert third.is_valid()
    third.save()
    assert Article.objects.get().title == "yours"
    late = bound(Article.objects.get(), title="late")
    assert late.is_valid()
    Article.objects.update(title="theirs")
    with pytest.raises(StaleVersion):
        late.save()


def test_a_version_that_is_missing_or_forged_is_refused(article):
    for token in ("", "1", "1:forged", None):
        form = bound(article, title="yours", **{TOKEN: token or ""})
        if token is None:
            del form.data[TOKEN]
        assert not form.is_valid()
        assert form.errors.as_data()["__all__"][0].code == "version", token
        assert form.conflict is None
    # The version of another row is forged too.
    form = ArticleForm(instance=Article.objects.create())
    assert not bound(article, **{TOKEN: form.initial[TOKEN]}).is_valid()
    assert not bound(article, **{TOKEN: sign_version(article)}).is_valid()
    form = bound(article, title="second")
    assert form.is_valid(), form.errors
    assert form.changed_data == ["title"]
    assert form.save().version > article.version
    # The form for a new row has no version.
    form = ArticleForm({"title": "new", "views": "0"})
    assert TOKEN not in form.fields
    assert form.is_valid()
    assert form.save().version


def test_a_conflict_shows_readable_values():
    class Sample(forms.Form):
        choice = forms.ChoiceField(choices=[("a", "Apple"), ("More", [("b", "Berry")])])
        several = forms.MultipleChoiceField(choices=[("a", "Apple"), ("b", "Berry")])
        flag = forms.BooleanField()
        objects = forms.ModelMultipleChoiceField(Counter.objects.all())
        text = forms.CharField()

    with timezone.override("Asia/Tokyo"):
        moment = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
        assert shown(forms.DateTimeField(), moment) == "Nov. 21, 2026, 9:30 p.m."
    ada, bob = (Counter.objects.create(name=name) for name in ("Ada", "Bob"))
    fields = Sample().fields
    assert shown(fields["choice"], "b") == "Berry"
    assert shown(fields["choice"], "gone") == "gone"
    assert shown(fields["several"], ["a", "b"]) == "Apple, Berry"
    assert (shown(fields["flag"], True), shown(fields["flag"], False)) == ("Yes", "No")
    assert shown(fields["objects"], [ada, bob.pk]) == "Ada, Bob"
    assert shown(fields["objects"], Counter.objects.filter(name="Bob")) == "Bob"
    assert (shown(fields["text"], None), shown(fields["text"], "<b>")) == ("", "<b>")


def test_a_conflict_hides_password_fields(article):
    class SecretForm(VersionedModelForm):
        class Meta:
            model = Article
            fields = ["title", "body"]
            widgets = {"body": forms.PasswordInput}

    Article.objects.update(body="their secret")
    form = bound(article, SecretForm, body="my secret")
    assert not form.is_valid()
    assert "secret" not in str(form.conflict) + str(form)
    assert cells(str(form.conflict)) == [("Body", "********", "********")]


def test_an_uploaded_file_is_a_change_whatever_its_name(article):
    class FileForm(VersionedModelForm):
        file = forms.FileField(required=False)

        class Meta:
            model = Article
            fields = ["title"]

    initial = {"file": "a.txt"}
    token = FileForm(instance=article, initial=initial).initial[TOKEN]
    data = {"title": "first", TOKEN: token}
    article.save()
    upload = {"file": SimpleUploadedFile("a.txt", b"new")}
    for files, touched in (({}, []), (upload, [("File", True)])):
        form = FileForm(data, files, instance=Article.objects.get(), initial=initial)
        assert not form.is_valid()
        found = form.conflict.differences
        assert [(one.label, one.is_yours) for one in found] == touched


class EveryKindForm(VersionedModelForm):
    """Fields whose values have another format when they are submitted."""

    moment = forms.SplitDateTimeField()
    several = forms.ModelMultipleChoiceField(Counter.objects.all(), required=False)
    price = forms.DecimalField(localize=True)

    class Meta:
        model = Article
        fields = ["title", "body", "author"]


def test_untouched_fields_of_every_kind_are_recognised(article):
    """Line endings that a browser changes are not a change either."""
    author = Counter.objects.create(name="Ada")
    Article.objects.update(author=author, body="x\ny ")
    initial = {
        "moment": datetime(2026, 11, 21, 12, 30, 15, 99, tzinfo=UTC),
        "several": [author, Counter.objects.create(name="Bob")],
        "price": Decimal("1234.50"),
    }
    text = str(EveryKindForm(instance=Article.objects.get(), initial=initial))
    data = sent(text, title="yours", several=[one.pk for one in initial["several"]])
    data["body"] = "x\r\ny"
    Article.objects.update(title="theirs", body="theirs\nz", author=None)
    query = QueryDict(urlencode(data, doseq=True))
    form = EveryKindForm(query, instance=Article.objects.get(), initial=initial)
    assert not form.is_valid()
    found = [(one.label, one.is_yours) for one in form.conflict.differences]
    assert found == [("Title", True), ("Body", False), ("Author", False)]
    assert sent(str(form))["author"] == ""
    assert form["body"].value() == "theirs\nz"


class FoldedField(forms.CharField):
    """A field that decides itself what a change is."""

    def has_changed(self, initial, data):
        return super().has_changed((initial or "").lower(), (data or "").lower())


class FoldedForm(ArticleForm):
    title = FoldedField()


def test_the_field_decides_whether_a_value_has_changed(article):
    for title, is_yours in (("FIRST", False), ("Mine", True)):
        form = FoldedForm(instance=article)
        data = {"title": title, "views": "03", TOKEN: form.initial[TOKEN]}
        Article.objects.update(title=f"theirs {title}", views=4)
        form = FoldedForm(data, instance=Article.objects.get())
        assert not form.is_valid()
        found = {one.label: one.is_yours for one in form.conflict.differences}
        assert found["Title"] == is_yours
        assert found["Views"] is False
        Article.objects.update(title="first", views=3)
        article = Article.objects.get()


class TagsForm(ArticleForm):
    tags = forms.JSONField(required=False)
    chosen = forms.TypedMultipleChoiceField(
        choices=[(1, "a"), (2, "b")], coerce=int, required=False
    )


def test_reordering_counts_only_if_the_order_matters(article):
    initial = {"tags": ["a", "b", {"x": 1, "y": 2}], "chosen": [1, 2]}
    for tags, chosen, touched in (
        ('["b", "a", {"x": 1, "y": 2}]', ["1", "2"], ["Tags"]),
        ('["a", "b", {"x": 1, "y": "2"}]', ["1", "2"], ["Tags"]),
        ('["a", "b", {"y": 2, "x": 1}]', ["2", "1"], []),
    ):
        text = str(TagsForm(instance=Article.objects.get(), initial=initial))
        data = sent(text, tags=tags, chosen=chosen)
        Article.objects.update(title=tags)
        later = {"tags": "theirs", "chosen": []}
        query = QueryDict(urlencode(data, doseq=True))
        form = TagsForm(query, instance=Article.objects.get(), initial=later)
        assert not form.is_valid()
        found = [one.label for one in form.conflict.differences if one.is_yours]
        assert found == touched


def formset_of(data=None, form=ArticleForm, formset=VersionedFormSet):
    options = {"formset": formset, "extra": 0, "can_delete": True}
    factory = modelformset_factory(Article, form, **options)
    return factory(data, queryset=Article.objects.order_by("pk"))


@pytest.mark.django_db(transaction=True)
def test_relations_are_saved_together_with_the_version(in_other_thread):
    """A form that is opened meanwhile cannot have the new version without them."""
    ann, bob = (Counter.objects.create(name=name) for name in ("ann", "bob"))
    kind = forms.modelform_factory(Album, VersionedModelForm, fields=["authors"])
    Album.objects.create()

    def opened():
        form = kind(instance=Album.objects.get())
        return {name: form[name].value() for name in form.fields}

    def submit(data, author):
        data = {**data, "authors": [*(one.pk for one in data["authors"]), author.pk]}
        form = kind(data, instance=Album.objects.get())
        return form.is_valid() and form.save()

    between = []

    def receiver(**kwargs):
        between.append(in_other_thread(opened))

    with received(receiver, Album, post_save):
        assert submit(opened(), ann)
    submit(between[0], bob)
    assert ann in Album.objects.get().authors.all()


def test_a_formset_refuses_and_shows_a_conflicting_row(article):
    other = Article.objects.create(title="other")
    yours = {"form-0-title": "mine", "form-1-title": "also mine"}
    data = sent(str(formset_of()), **yours)
    Article.objects.filter(pk=other.pk).update(title="theirs")
    formset = formset_of(data)
    assert not formset.is_valid()
    assert [bool(form.errors) for form in formset.forms] == [False, True]
    text = str(formset)
    assert cells(text) == [("Title", "also mine", "theirs")]
    again = formset_of(sent(text))
    assert again.is_valid(), again.errors
    again.save()
    titles = Article.objects.order_by("pk").values_list("title", flat=True)
    assert list(titles) == ["mine", "also mine"]


def test_a_formset_does_not_write_untouched_rows(article):
    """A row that has changed is not deleted either. An invalid row can be deleted."""
    other = Article.objects.create(title="other")
    data = sent(str(formset_of()), **{"form-0-title": "mine"})
    Article.objects.filter(pk=other.pk).update(title="theirs")
    version = Article.objects.get(pk=other.pk).version
    formset = formset_of(data)
    assert formset.is_valid(), formset.errors
    formset.save()
    titles = set(Article.objects.values_list("title", flat=True))
    assert titles == {"mine", "theirs"}
    assert Article.objects.get(title="theirs").version == version
    for kind in (VersionedFormSet, BaseModelFormSet):
        text = str(formset_of(formset=kind))
        data = sent(text, **{"form-1-DELETE": "on"})
        del data["form-0-row_version"]
        Article.objects.filter(pk=other.pk).update(title=kind.__name__)
        formset = formset_of(data, formset=kind)
        assert not formset.is_valid()
        assert not formset.deleted_forms
        with pytest.raises(ValueError, match="didn't validate"):
            formset.save()
        assert Article.objects.count() == 2

    class Invalid(ArticleForm):
        def clean(self):
            raise forms.ValidationError("No article is valid any more.")

    both = {"form-0-DELETE": "on", "form-1-DELETE": "on"}
    formset = formset_of(sent(str(formset_of()), **both), Invalid)
    assert formset.is_valid(), formset.errors
    formset.save()
    assert not Article.objects.exists()


# The admin's page of one row


class Opened:
    """A page of the admin that a user has opened, with the data that it would send."""

    def __init__(self, user, url, **changes):
        self.user, self.url = user, url
        self.extra = {"_save": "Save"} if url == LIST else {}
        self.shows(page(user.get(url)), **changes)

    def shows(self, text, **changes):
        """Take the data from the text of the page, and change some values."""
        self.text, self.data = text, sent(text, **self.extra, **changes)

    def refused(self, **changes):
        """Save, and return the text of the page, which shows a conflict."""
        self.shows(page(self.user.post(self.url, self.data | changes)))
        return self.text

    def saves(self, **changes):
        """Save, and return whether that has worked."""
        return self.user.post(self.url, self.data | changes).status_code == 302


@pytest.fixture
def change(boss, article):
    """Return a function that opens the page of the article."""
    return partial(Opened, boss, f"{LIST}{article.pk}/change/")


@pytest.mark.driver
def test_the_admin_saves_and_logs_as_usual(boss, article, change):
    assert change(title="second").saves()
    assert Article.objects.get().title == "second"
    assert Article.objects.get().version > article.version
    assert LogEntry.objects.get().get_change_message() == "Changed Title."
    assert Opened(boss, f"{LIST}add/", title="new").saves()
    assert Article.objects.get(title="new").version


def test_the_admin_shows_a_conflict_and_saves_when_resubmitted(change):
    """Conflicts come before changes of one side."""
    opened = change(title="mine", body="mine")
    Article.objects.update(body="theirs", views=4)
    text = opened.refused()
    assert "This object has changed in the meantime" in text
    assert cells(text) == [
        ("Body", "mine", "theirs"),
        ("Title changed by you", "mine", "first"),
        ("Views changed by them", "3", "4"),
    ]
    assert text.count('class="dlocks-both"') == 1
    assert "No field was changed on both sides." not in text
    assert Article.objects.get().title == "first"
    assert not LogEntry.objects.exists()
    # What was entered is still there, and nothing else.
    again = opened.data
    assert (again["title"], again["body"], again["views"]) == ("mine", "mine", "4")
    assert opened.saves()
    found = Article.objects.values_list("title", "body", "views").get()
    assert found == ("mine", "mine", 4)


@for_each("place", ["page", "inline", "list"])
def test_changes_of_different_fields_are_kept_together(boss, place):
    """The page tells who changed what, and one more click saves all changes."""
    Article.objects.all().delete()
    article = Article.objects.create(title="first", views=3)
    comment = Comment.objects.create(article=article, text="old", author="Ada")
    url = LIST if place == "list" else f"{LIST}{article.pk}/change/"
    yours, theirs = {
        "page": ("title", "views"),
        "inline": ("comments-0-text", "comments-0-author"),
        "list": ("form-0-title", "form-0-views"),
    }[place]
    opened = Opened(boss, url, **{yours: "mine"})
    label = ("Title", "Views", "first", "3")
    if place == "inline":
        Comment.objects.update(author="8")
        label = ("Text", "Author", "old", "Ada")
    else:
        Article.objects.update(views=8)
    text = opened.refused()
    assert cells(text) == [
        (f"{label[0]} changed by you", "mine", label[2]),
        (f"{label[1]} changed by them", label[3], "8"),
    ]
    assert "No field was changed on both sides." in text
    assert 'class="dlocks-both"' not in text
    assert (opened.data[yours], opened.data[theirs]) == ("mine", "8")
    assert opened.saves()
    article.refresh_from_db()
    comment.refresh_from_db()
    saved = (article.title, str(article.views))
    if place == "inline":
        saved = (comment.text, comment.author)
    assert saved == ("mine", "8")


@for_each("place", ["page", "inline", "list"])
def test_the_page_says_who_changed_the_object_and_when(boss, place, settings):
    """The admin's log knows. The name of a user is shown as in the history."""
    settings.DLOCKS_SHOW_HOLDER = False
    Article.objects.all().delete()
    article = Article.objects.create(title="first")
    Comment.objects.create(article=article, text="old")
    url = LIST if place == "list" else f"{LIST}{article.pk}/change/"
    field = {"inline": "comments-0-text", "list": "form-0-title"}.get(place, "title")
    ada, rights = Client(), {"is_staff": True, "is_superuser": True}
    ada.force_login(User.objects.get_or_create(username="ada", **rights)[0])
    if place == "page":
        # An entry from before the page was opened.
        assert Opened(ada, url, **{field: "before"}).saves()
    opened = Opened(boss, url, **{field: "yours"})
    assert Opened(ada, url, **{field: "theirs"}).saves()
    text = opened.refused()
    entry = LogEntry.objects.first()
    when = date_format(timezone.localtime(entry.action_time), "DATETIME_FORMAT")
    assert f"Last changed in the admin by ada, {when}<" in text
    # The next change is made by a program.
    Article.objects.update(title="third")
    Comment.objects.update(text="third")
    assert "Last changed in the admin" not in opened.refused()


def test_a_conflict_is_shown_if_use_tz_is_off(change, settings):
    settings.USE_TZ = False
    one, other = change(title="yours"), change(title="yours")
    assert change(title="theirs").saves()
    assert "Last changed in the admin by boss, " in one.refused()
    LogEntry.objects.update(action_time=timezone.now() - timedelta(days=2))
    assert "Last changed in the admin" not in other.refused()


def test_a_form_outside_the_admin_names_no_user(article, change):
    """Visitors of a public page must not see the names of the staff."""
    form = bound(article, title="yours")
    assert change(title="theirs").saves()
    form = ArticleForm(form.data, instance=Article.objects.get())
    assert not form.is_valid()
    assert "boss" not in str(form.conflict)


# SQLite has one writer, which is the request itself by then.
@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_the_admin_shows_a_change_just_before_its_write(boss, change, in_other_thread):
    """The form and the list do."""

    theirs = partial(Article.objects.update, title="theirs")
    for open_page in change, partial(Opened, boss, LIST):
        Article.objects.update(title="first")
        opened = open_page()
        name = "title" if open_page is change else "form-0-title"
        opened.data[name] = "yours"
        with before_the_write(pre_save, lambda: in_other_thread(theirs)):
            text = opened.refused()
        assert cells(text) == [("Title", "yours", "theirs")]
        assert Article.objects.get().title == "theirs"
        assert opened.saves()
        assert Article.objects.get().title == "yours"


def test_the_admin_refuses_a_form_without_its_version_or_row(article, change):
    opened, without = change(title="yours"), change(title="yours")
    del without.data[TOKEN]
    assert "does not contain the version" in without.refused()
    assert Article.objects.get().title == "first"
    article.delete()
    response = opened.user.post(opened.url, opened.data, follow=True)
    assert "Perhaps it was deleted?" in html.unescape(page(response))
    assert not Article.objects.exists()


def test_a_page_that_can_only_be_viewed_needs_no_version(boss, article):
    viewer = User.objects.create_user("viewer", password="x", is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename="view_article"))
    client = Client()
    client.force_login(viewer)
    assert "first" in page(client.get(f"{LIST}{article.pk}/change/"))


# Inline rows


def test_an_inline_row_that_changed_is_refused_and_shown(change):
    """It is not deleted either. A new one can be added."""
    assert change(**{"comments-0-text": "old"}).saves()
    comment = Comment.objects.get()
    opened = change(**{"comments-0-text": "yours"})
    Comment.objects.update(text="theirs")
    assert cells(opened.refused()) == [("Text", "yours", "theirs")]
    assert Comment.objects.get().text == "theirs"
    assert opened.data["comments-0-text"] == "yours"
    assert opened.saves()
    comment.refresh_from_db()
    assert comment.text == "yours"
    opened = change(**{"comments-0-DELETE": "on"})
    Comment.objects.update(text="theirs")
    text = opened.refused()
    assert Comment.objects.get().text == "theirs"
    assert cells(text) == [("Text changed by them", "yours", "theirs")]
    assert "Save again to keep all changes." not in text
    # The box is still checked.
    assert opened.saves()
    assert not Comment.objects.exists()


# The list


def test_a_conflicting_row_of_the_list_saves_nothing(boss, article):
    """A row that you have not touched is not written."""
    other = Article.objects.create(title="other")
    opened = Opened(boss, LIST)
    index = {opened.data[f"form-{number}-id"]: number for number in range(2)}
    mine = f"form-{index[str(article.pk)]}-title"
    theirs = f"form-{index[str(other.pk)]}-title"
    Article.objects.filter(pk=other.pk).update(title="theirs")
    text = opened.refused(**{mine: "mine", theirs: "also mine"})
    assert cells(text) == [("Title", "also mine", "theirs")]
    assert set(Article.objects.values_list("title", flat=True)) == {"first", "theirs"}
    assert opened.data[theirs] == "also mine"
    assert opened.saves()
    titles = Article.objects.order_by("pk").values_list("title", flat=True)
    assert list(titles) == ["mine", "also mine"]
    opened = Opened(boss, LIST)
    Article.objects.filter(pk=other.pk).update(title="theirs")
    version = Article.objects.get(pk=other.pk).version
    assert opened.saves(**{mine: "second"})
    assert list(titles.all()) == ["second", "theirs"]
    assert Article.objects.get(pk=other.pk).version == version


def test_an_action_with_a_conflict_is_not_repeated(boss, article):
    data = {"action": "lose", "_selected_action": [article.pk]}
    with pytest.raises(StaleVersion):
        boss.post(LIST, data)
    assert admin.site.get_model_admin(Article).lost == 1


# Deleting


def test_the_admin_confirms_again_before_deleting_a_changed_row(boss, article):
    """A request without a version needs a confirmation too."""
    url = f"{LIST}{article.pk}/delete/"
    response = boss.post(url, {"post": "yes"}, follow=True)
    assert "Are you sure" in page(response)
    assert Article.objects.count() == 1
    ((address, _status),) = boss.get(url, follow=True).redirect_chain
    Article.objects.update(title="theirs")
    response = boss.post(address, {"post": "yes"}, follow=True)
    text = page(response)
    assert "was not deleted" in text
    assert "theirs" in text
    assert Article.objects.count() == 1
    assert boss.post(response.redirect_chain[-1][0], {"post": "yes"}).status_code == 302
    assert not Article.objects.exists()
    assert boss.get(f"{LIST}999999/delete/").status_code == 302


def test_a_deletion_of_ones_own_compares_what_was_shown(boss, article, monkeypatch):
    """An admin may hide a row instead, and not call Django's ``delete_model()``."""

    def hide(request, obj):
        obj.body = "hidden"
        obj.save()

    monkeypatch.setattr(admin.site.get_model_admin(Article), "delete_model", hide)
    url = f"{LIST}{article.pk}/delete/"
    for change, body, said in (
        (lambda: Article.objects.update(title="theirs"), "text", "was not deleted"),
        (lambda: None, "hidden", "was deleted successfully"),
    ):
        ((address, _status),) = boss.get(url, follow=True).redirect_chain
        change()
        assert said in page(boss.post(address, {"post": "yes"}, follow=True))
        assert Article.objects.get().body == body


@pytest.mark.engine("postgresql", "mariadb")
@pytest.mark.django_db(transaction=True)
@for_each("deleted", [False, True])
def test_a_row_changed_just_before_its_deletion_is_kept(
    boss, article, in_other_thread, deleted
):
    url = f"{LIST}{article.pk}/delete/"
    ((address, _status),) = boss.get(url, follow=True).redirect_chain
    others = Article.objects.all()
    admin_ = admin.site.get_model_admin(Article)
    look = admin_.get_deleted_objects

    def looks_and_loses(objs, request):
        found = look(objs, request)
        change = partial(others.update, title="theirs")
        in_other_thread(others.delete if deleted else change)
        del admin_.get_deleted_objects
        return found

    admin_.get_deleted_objects = looks_and_loses
    text = page(boss.post(address, {"post": "yes"}, follow=True))
    assert "was not deleted" in text
    assert ("Perhaps it was deleted?" if deleted else "theirs") in html.unescape(text)
    assert not LogEntry.objects.exists()


# Checks


def test_a_custom_form_without_a_version_is_an_error():
    class Inline(VersionedStackedInline):
        model = Comment
        form = forms.ModelForm

    class Plain(VersionedModelAdmin):
        form = forms.ModelForm
        inlines = [Inline]

    class Rows(VersionedStackedInline):
        model = Comment
        formset = forms.BaseInlineFormSet

    class WithRows(VersionedModelAdmin):
        inlines = [Rows]

    for checked, number in (
        (Plain(Article, admin.site), 2),
        # The admin would render no version, so that no row could be saved.
        (WithRows(Article, admin.site), 1),
        (admin.site.get_model_admin(Article), 0),
    ):
        ids = [message.id for message in checked.check()]
        assert ids.count("dlocks.E025") == number


@pytest.mark.django_db(transaction=True)
@for_each("own", [False, True])
@for_each("what", ["add", "change", "delete", "list"])
def test_a_failing_on_commit_callback_is_not_a_conflict(boss, what, own, monkeypatch):
    """Nothing is written twice, even if an admin writes in a way of its ``own``."""
    monkeypatch.undo()
    if own:
        admin_ = admin.site.get_model_admin(Article)
        monkeypatch.setattr(
            admin_, "save_model", lambda request, obj, form, change: obj.save()
        )
        monkeypatch.setattr(admin_, "delete_model", lambda request, obj: obj.delete())
    Article.objects.all().delete()
    article = Article.objects.create(title="first")
    if what == "list":
        # The callback of the first row comes before that of the second.
        Article.objects.create(title="first")
    one, address = f"{LIST}{article.pk}/", {"add": f"{LIST}add/", "list": LIST}
    asked = page(boss.get(address.get(what, f"{one}{what}/"), follow=True))
    failed = []

    def fail(**kwargs):
        if not failed:
            failed.append(True)
            transaction.on_commit(conflict)

    def conflict():
        raise StaleVersion(Counter, 1, 1, 2)

    signal = post_delete if what == "delete" else post_save
    with received(fail, Article, signal), pytest.raises(StaleVersion):
        if what == "list":
            titles = {f"form-{number}-title": "second" for number in (0, 1)}
            boss.post(LIST, sent(asked, **titles, _save="Save"))
        elif what == "delete":
            token = sign_version(article)
            boss.post(f"{one}delete/?{urlencode({TOKEN: token})}", {"post": "yes"})
        else:
            url = address.get(what, f"{one}{what}/")
            boss.post(url, sent(asked, title="second"))
    titles = {"add": ["first", "second"], "change": ["second"], "delete": []}
    found = sorted(Article.objects.values_list("title", flat=True))
    assert found == titles.get(what, ["second"] * 2)
