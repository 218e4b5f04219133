"""The examples of the documentation in a project that is not this checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests import pages

pytestmark = pytest.mark.front

SETTINGS = """
SECRET_KEY = "of a reader"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "reader.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }
}
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "dlocks",
    "shop",
]
ROOT_URLCONF = "shop"
ASGI_APPLICATION = "shop"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

MODELS = """
from django.db import models

class Product(models.Model):
    name = models.CharField(max_length=100)
    stock = models.PositiveIntegerField()

class Sale(models.Model):
    product = models.ForeignKey(Product, models.CASCADE)
    buyer = models.CharField(max_length=100)
"""

# Run the blocks of one page as a module of the app. Names that the page takes for
# granted, such as ``amount``, stand for any object.
RUN = """
import builtins, gc, json, os, sys, types
from unittest.mock import MagicMock

import django
import dramatiq
from django.core.management import call_command
from django.db import connection, models
from dramatiq.brokers.stub import StubBroker

django.setup()
# A reader has a broker. Without one, Dramatiq needs the client of RabbitMQ or Redis.
dramatiq.set_broker(StubBroker())
call_command("migrate", run_syncdb=True, verbosity=0)

class Names(dict):
    def __missing__(self, name):
        return self.setdefault(name, MagicMock(name=name))

# Each page runs in a process of its own, which inherits these imports.
import dlocks.optimistic
import dlocks.testing
from dlocks.conf import backends
for name in dlocks.__all__:
    getattr(dlocks, name)
MagicMock(backend=backends["default"])
gc.freeze()
connection.close()
failed = []
for page, blocks in json.load(sys.stdin):
    if not (pid := os.fork()):
        break
    if os.waitpid(pid, 0)[1]:
        failed.append(page)
else:
    sys.exit(", ".join(failed) or None)

module = types.ModuleType("shop.page")
sys.modules[module.__name__] = module
names = vars(module)
names["__builtins__"] = Names(vars(builtins))
names["__builtins__"]["run_due_tasks"] = lambda token: module.election.stop()
names["__builtins__"]["serve_forever"] = lambda: None
names["__builtins__"]["order"] = MagicMock(lines=[MagicMock(product_id=7)])

def create(sender, **kwargs):
    with connection.schema_editor() as editor:
        editor.create_model(sender)
    sender.objects.create(pk=7)

models.signals.class_prepared.connect(create)
for code in blocks:
    try:
        exec(compile(code, page, "exec"), names)
    except Exception as error:
        # The page announces the error in a comment at the end of the line.
        line = code.splitlines()[error.__traceback__.tb_next.tb_lineno - 1]
        if not line.endswith(f"# {type(error).__name__}"):
            raise
# The end of an interpreter takes longer than most pages.
os._exit(0)
"""


PAGES = [
    page
    for path in sorted(pages.DOCS.rglob("*.md"))
    if (page := path.relative_to(pages.DOCS).with_suffix("").as_posix())
    # The tutorial has its own test, which makes a project too. A test of the backends
    # has a worker of RQ, and SQLite has no session locks.
    not in {"tutorial", "how-to/workers", "how-to/session-locks"}
    and pages.blocks(page)
]


@pytest.mark.engine("sqlite")
@pytest.mark.once
def test_the_examples_of_a_page_run_in_a_project(tmp_path):
    """A reader can copy each block of a page, one after the other.

    The project has an app ``shop``, as readers have it.
    """
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "run.py").write_text(RUN)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("urlpatterns = []\n")
    (tmp_path / "shop" / "models.py").write_text(MODELS)
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "run.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": str(pages.DOCS.parent),
            "DJANGO_SETTINGS_MODULE": "settings",
        },
        input=json.dumps([[page, pages.blocks(page)] for page in PAGES]),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
