"""django-simple-history with versioned and fenced models.

It runs in a process of its own.
"""

from __future__ import annotations

import json

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.front

CODE = """
import json
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
from dlocks.optimistic import FencedModel, VersionedModel, VersionField, microseconds

class Article(VersionedModel):
    title = models.CharField(max_length=50)
    history = HistoricalRecords()
    class Meta:
        app_label = "dlocks"

class Page(VersionedModel):
    version = None
    revision = VersionField(start=microseconds)
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
article = Article.objects.create(title="a")
for title in "bc":
    article.title = title
    article.save()
page = Page.objects.create()
page.save()
machine = Machine.objects.fenced(7).create()
machine = Machine.objects.claim(machine.pk, 9)
machine.save()
starts = [revision - page.revision for (revision,) in recorded(Page, "revision")]
articles = recorded(Article, "title", "version")
Article.history.all().delete()
written = bulk_create_with_history([Article(title=title) for title in "xy"], Article)
bulk_update_with_history(written, Article, ["title"])
with connection.cursor() as cursor:
    cursor.execute("UPDATE dlocks_article SET version = 0")
old = Article.objects.first()
Article.history.model.objects.create(
    id=old.pk, title="old", version=old.version,
    history_date="2026-01-01T00:00Z", history_type="~",
)
bulk = recorded(Article, "title", "version")
print(json.dumps([articles, starts, recorded(Machine, "fence"), bulk]))
"""


def test_a_history_records_the_version_of_each_write():
    """Versions 1, 2 and 3, another start value and a fence are recorded.

    Versions of bulk writes are recorded too. So is version 0 of a row that is older
    than the column.
    """
    done = run_python("-c", CODE + WRITES)
    assert done.returncode == 0, done.stderr
    articles, pages, machines, bulk = json.loads(done.stdout)
    assert articles == [["a", 1], ["b", 2], ["c", 3]]
    assert pages == [-1, 0]
    assert machines == [[7], [9]]
    assert bulk == [["x", 1], ["y", 1], ["x", 2], ["y", 2], ["old", 0]]
