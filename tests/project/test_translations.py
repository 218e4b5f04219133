"""The translations of the admin are complete, and have the right plurals."""

from __future__ import annotations

import ast
import functools
import gettext
import re
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone
from django.utils.translation import ngettext, override
from django.utils.translation.template import templatize

from dlocks import LockTimeout, db_lock
from tests import rows
from tests.internals import duration, shown_duration

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]

PACKAGE = Path(__file__).parent.parent.parent / "dlocks"
FUNCTIONS = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy"}
STRING = r"u?('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
# A call in the code that Django makes of a template.
CALL = re.compile(rf"\b(?:n?gettext|_)\({STRING}(?:, {STRING})?")
PLACEHOLDER = re.compile(r"%(?:\(\w+\))?[sd]")


@functools.cache
def marked():
    """Return the marked texts of the package, each with its plural or None."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if getattr(getattr(node, "func", None), "id", None) in FUNCTIONS:
                texts = [n.value for n in node.args if isinstance(n, ast.Constant)]
                if texts and isinstance(texts[0], str):
                    found.add((texts[0], texts[1] if len(texts) > 1 else None))
    for path in PACKAGE.rglob("*.html"):
        for call in CALL.finditer(templatize(path.read_text())):
            text, plural = (ast.literal_eval(one or "None") for one in call.groups())
            found.add((text, plural))
    return found


@pytest.mark.django_db
def test_each_text_is_translated():
    """With its placeholders. Otherwise a page would fail, or leave out a number."""
    assert len(marked()) > 200
    assert {("Force release", None), ("lock", None)} < marked()
    assert any(plural for _, plural in marked())
    directory = PACKAGE / "locale" / "zh_Hans" / "LC_MESSAGES"
    with (directory / "django.mo").open("rb") as stream:
        catalog = gettext.GNUTranslations(stream)._catalog
    # Chinese has one form for all numbers.
    missing = [
        text
        for text, plural in sorted(marked(), key=str)
        if not catalog.get((text, 0) if plural else text)
    ]
    assert missing == []
    for text, plural in marked():
        found = sorted(PLACEHOLDER.findall(catalog[(text, 0) if plural else text]))
        assert found == sorted(PLACEHOLDER.findall(plural or text)), text
    source = (directory / "django.po").read_text(encoding="utf-8")
    compiled = {text for key, text in catalog.items() if key and isinstance(text, str)}
    lines = re.findall(r"^msgstr(?:\[\d\])? (\".+\")$", source, re.MULTILINE)
    assert set(map(ast.literal_eval, lines)) == compiled
    assert "fuzzy" not in source


def test_plurals_are_right():
    for number, text in ((1, "已清除 1 个"), (2, "已清除 2 个")):
        with override("zh-hans"):
            translated = ngettext(
                "%(count)d stale lock was cleared: %(keys)s",
                "%(count)d stale locks were cleared: %(keys)s",
                number,
            )
        assert text in translated % {"count": number, "keys": "a"}


@pytest.mark.django_db
def test_the_admin_speaks_the_language(admin_client, settings):
    """Durations are in the language too."""
    now = timezone.now()
    begin = now - timedelta(hours=4)
    rows.write("stock:7", rows.P, now + timedelta(minutes=5), begin_time=begin)

    settings.LANGUAGE_CODE = "zh-hans"
    address = "/admin/dlocks/resourcelock/"
    for name in ("", "?part=now", "stock_3A7/change/"):
        page = admin_client.get(address + name).content.decode()
        for text in ("持有者", "强制释放", "4 小时", "5 分钟"):
            assert text in page
        assert not re.search(r"\d (?:hours|minutes)", page)


def test_only_pages_translate_durations():
    """Logs and errors stay in English, also while a translated page is made."""
    seconds = [3.5, 42, 300, 4 * 3600, 3 * 86400]
    english = ["3.5 s", "42 s", "5 minutes", "4 hours", "3 days"]
    for language, texts in (
        ("en", english),
        ("zh-hans", ["3.5 秒", "42 秒", "5 分钟", "4 小时", "3 天"]),
    ):
        with override(language):
            assert [shown_duration(one) for one in seconds] == texts
            assert [duration(one) for one in seconds] == english


@pytest.mark.django_db
def test_errors_and_commands_stay_in_english(settings):
    """A request in Chinese does not translate an error, nor a setting a command."""
    settings.LANGUAGE_CODE = "zh-hans"
    now = timezone.now()
    since = now - timedelta(hours=4)
    rows.write("stock:7", rows.P, now + timedelta(minutes=5), begin_time=since)
    rows.waits("stock:7", begin_time=now - timedelta(minutes=3))
    out = StringIO()
    with override("zh-hans"):
        with pytest.raises(LockTimeout, match=r"for 4 hours, 5 minutes left on its"):
            db_lock("stock:7", timeout=0).acquire()
        call_command("list_locks", "--waiting", stdout=out, no_color=True)
        with pytest.raises(CommandError, match="is held. To force its release"):
            call_command("clear_lock", "stock:7", "--yes", stdout=out, no_color=True)
    for text in ("held", "4 hours", "5 minutes left", "waiting for 3 minutes"):
        assert text in out.getvalue()
