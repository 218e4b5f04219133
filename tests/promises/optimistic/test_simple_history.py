"""django-simple-history with versioned and fenced models.

It runs in a process of its own.
"""

from __future__ import annotations

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.front

CODE = """
from django.conf import settings
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.auth", "django.contrib.contenttypes", "dlocks", "simple_history"
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    # Without its migrations, an app also gets the tables of the models below.
    MIGRATION_MODULES={"auth": None, "contenttypes": None, "dlocks": None},
    USE_TZ=True,
)
import django; django.setup()
from django.core.management import call_command
from django.db import connection, models
from simple_history.models import HistoricalRecords
from simple_history.utils import bulk_create_with_history, bulk_update_with_history
from dlocks.optimistic import FencedModel, VersionedModel, VersionField

class Article(VersionedModel):
    title = models.CharField(max_length=50)
    history = HistoricalRecords()
    class Meta:
        app_label = "dlocks"

class Page(VersionedModel):
    version = None
    revision = VersionField()
    history = HistoricalRecords()
    class Meta:
        app_label = "dlocks"

class Machine(FencedModel):
    history = HistoricalRecords()
    class Meta:
        app_label = "dlocks"

call_command("migrate", run_syncdb=True, verbosity=0)

def recorded(model, *names):
    return list(model.history.order_by("history_id").values_list(*names))
"""


WRITES = """
article, written = Article(), []
for title in "abc":
    article.title = title
    article.save()
    written.append((title, article.version))
page, pages = Page(), []
for _ in range(2):
    page.save()
    pages.append((page.revision,))
machine = Machine.objects.fenced(7).create()
machine = Machine.objects.claim(machine.pk, 9)
machine.save()
print(recorded(Article, "title", "version") == written)
print(recorded(Page, "revision") == pages)
print(recorded(Machine, "fence") == [(7,), (9,)])
Article.history.all().delete()
both = bulk_create_with_history([Article(title=title) for title in "xy"], Article)
written = [(one.title, one.version) for one in both]
bulk_update_with_history(both, Article, ["title"])
written += [(one.title, one.version) for one in both]
with connection.cursor() as cursor:
    cursor.execute("UPDATE dlocks_article SET version = 0")
old = Article.objects.first()
Article.history.model.objects.create(
    id=old.pk, title="old", version=old.version,
    history_date="2026-01-01T00:00Z", history_type="~",
)
print(recorded(Article, "title", "version") == [*written, ("old", 0)])
print(len({version for _, version in written}) == 3)
"""


def test_a_history_records_the_version_of_each_write():
    """Also of a fence, of bulk writes, and of a row older than the column."""
    done = run_python("-c", CODE + WRITES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 5
