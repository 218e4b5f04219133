"""The page of an optimistic conflict in a real browser, with and without scripts."""

from __future__ import annotations

from datetime import datetime

import pytest
from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminSplitDateTime, FilteredSelectMultiple
from django.utils.timezone import get_current_timezone

from dlocks.optimistic.forms import VersionedModelForm
from tests.models import Article, Comment, Counter
from tests.promises.admin.pages import person

pytestmark = [pytest.mark.engine("sqlite"), pytest.mark.pages]

LIST = "/admin/tests/article/"


@pytest.fixture
def article(transactional_db):
    return Article.objects.create(title="first", body="text", views=3)


@pytest.fixture
def boss(transactional_db):
    return person("boss", is_superuser=True)


def take(page, label):
    return page.get_by_role("button", name=f"Use theirs: {label}")


def save(page):
    page.locator("[name=_save]").click()


@pytest.mark.smoke
def test_one_click_takes_their_value_and_one_more_undoes_it(browser, boss, article):
    """Your value stays in the field until you take theirs.

    It works in the form, in inlines, in the list and in a form outside the admin. The
    tables of the object and of its inline rows have the same type size.
    """
    comment = Comment.objects.create(article=article)
    page = browser.page(boss)
    change = f"{LIST}{article.pk}/change/"
    outside = f"/article/{article.pk}/"
    for address, labels in (
        (change, {"title": "Title", "comments-0-text": "Text"}),
        (LIST, {"form-0-title": "Title"}),
        (outside, {"title": "Title"}),
    ):
        Article.objects.update(title="first")
        Comment.objects.update(text="old")
        page.goto(address)
        fields = {name: page.locator(f"[name={name}]") for name in labels}
        for field in fields.values():
            field.fill("yours")
        Article.objects.update(title="theirs")
        Comment.objects.update(text="theirs")
        save(page)
        if address == change:
            browser.expect(page.locator(".dlocks-conflict")).to_have_count(2)
            sizes, colors = page.evaluate(MEASURE)
            assert (sizes, len(colors)) == (["13px"], 1)
        for name, field in fields.items():
            browser.expect(field).to_have_value("yours")
            take(page, labels[name]).click()
            browser.expect(field).to_have_value("theirs")
            page.get_by_role("button", name=f"Use yours: {labels[name]}").click()
            browser.expect(field).to_have_value("yours")
            take(page, labels[name]).click()
        save(page)
        browser.expect(page.locator(".dlocks-conflict")).to_have_count(0)
        for shown in (article, comment):
            shown.refresh_from_db()
            assert str(shown) == "theirs", address


# The type sizes of all texts, and the colors of the values.
MEASURE = """() => {
    const all = [...document.querySelectorAll(".dlocks-conflict *")]
        .filter((one) => one.matches("p, th, div, button"));
    const values = all.filter((one) => one.matches("td > div"));
    return [
        [...new Set(all.map((one) => getComputedStyle(one).fontSize))],
        [...new Set(values.map((one) => getComputedStyle(one).color))],
    ];
}"""


def test_all_of_theirs_can_be_taken_without_scripts(browser, boss, article):
    """The page has no dead buttons then, but a link that discards your values."""
    page = browser.page(boss, java_script_enabled=False)
    page.goto(f"{LIST}{article.pk}/change/")
    page.locator("[name=title]").fill("yours")
    Article.objects.update(title="theirs")
    save(page)
    browser.expect(page.locator(".dlocks-take")).not_to_be_visible()
    page.get_by_role("link", name="Discard my values").click()
    browser.expect(page.locator("[name=title]")).to_have_value("theirs")
    save(page)
    browser.expect(page.locator(".success")).to_be_visible()
    assert Article.objects.get().title == "theirs"


class EveryKindForm(VersionedModelForm):
    """A field of each kind of control."""

    counters, choices = Counter.objects.order_by("name"), [("a", "A"), ("b", "B")]
    lists = forms.ModelMultipleChoiceField(
        counters, widget=FilteredSelectMultiple("counters", False)
    )
    several = forms.ModelMultipleChoiceField(counters)
    boxes = forms.MultipleChoiceField(
        choices=choices, widget=forms.CheckboxSelectMultiple
    )
    radio = forms.ChoiceField(choices=choices, widget=forms.RadioSelect)
    flag = forms.BooleanField(required=False)
    moment = forms.SplitDateTimeField(widget=AdminSplitDateTime)

    class Meta:
        model = Article
        fields = ["title", "author"]


YOURS = {
    "title": ["yours"], "author": ["Ada"], "lists": ["Ada"], "several": ["Ada"],
    "boxes": ["a"], "radio": ["a"], "flag": ["on"],
    "moment_0": ["2026-11-21"], "moment_1": ["12:30:00"],
}  # fmt: skip
THEIRS = {
    "title": ["theirs"], "author": ["Bob"], "lists": ["Bob", "Cid"],
    "several": ["Bob", "Cid"], "boxes": ["b"], "radio": ["b"], "flag": [],
    "moment_0": ["2027-01-02"], "moment_1": ["03:04:05"],
}  # fmt: skip

# What the form would send.
SENT = """() => {
    const form = document.getElementById("article_form");
    for (const box of form.querySelectorAll("[id$=_to]")) {
        window.SelectBox.select_all(box.id);
    }
    const sent = {};
    for (const [name, value] of new FormData(form)) (sent[name] ??= []).push(value);
    return sent;
}"""


def test_theirs_can_be_taken_in_every_kind_of_control(
    browser, boss, article, monkeypatch
):
    """Choices, lists, boxes, dates and fields with autocompletion have the button."""
    names = ("Ada", "Bob", "Cid")
    counters = {name: Counter.objects.create(name=name) for name in names}
    # The values that are not the model's.
    stored = {}

    class Form(EveryKindForm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **{**kwargs, "initial": dict(stored)})

    found = {"search_fields": ["name"], "ordering": ["name"]}
    edited = {"form": Form, "autocomplete_fields": ["author"], "fieldsets": None}
    edited |= {"inlines": [], "readonly_fields": []}
    for model, options in ((Counter, found), (Article, edited)):
        for name, value in options.items():
            monkeypatch.setattr(admin.site.get_model_admin(model), name, value)
    page = browser.page(boss)
    page.goto(f"{LIST}{article.pk}/change/")
    page.locator("[name=title]").fill("yours")
    page.locator(".field-author .select2").click()
    page.locator(".select2-results").get_by_text("Ada").click()
    page.locator("#id_lists_from").select_option(label="Ada")
    page.locator("#id_lists_add, #id_lists_add_link").first.click()
    page.locator("[name=several]").select_option(label="Ada")
    page.locator("[name=boxes][value=a]").check()
    page.locator("[name=radio][value=a]").check()
    page.locator("[name=flag]").check()
    page.locator("[name=moment_0]").fill("2026-11-21")
    page.locator("[name=moment_1]").fill("12:30:00")
    Article.objects.update(title="theirs", author=counters["Bob"])
    both = [counters["Bob"].pk, counters["Cid"].pk]
    moment = datetime(2027, 1, 2, 3, 4, 5, tzinfo=get_current_timezone())
    stored.update(lists=both, several=both, boxes=["b"], radio="b", moment=moment)
    stored["flag"] = None
    save(page)

    browser.expect(page.locator(".dlocks-conflict")).to_be_visible()

    def sent():
        names = {str(one.pk): name for name, one in counters.items()}
        found = page.evaluate(SENT)
        return {
            name: sorted(names.get(value, value) for value in found.get(name, []))
            for name in YOURS
        }

    assert sent() == YOURS
    for name in ("title", "author", "lists", "several", "boxes", "radio", "flag"):
        take(page, name.capitalize()).click()
    take(page, "Moment").click()
    browser.expect(page.locator(".field-author .select2")).to_contain_text("Bob")
    assert sent() == THEIRS
