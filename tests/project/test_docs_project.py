"""The examples of the documentation in a project that is not this checkout."""

from __future__ import annotations

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


@pytest.mark.engine("sqlite")
@pytest.mark.once
def test_the_examples_of_a_page_run_in_a_project(tmp_path):
    """A reader can copy each block of each page. tests/reader.py is the reader."""
    (tmp_path / "settings.py").write_text(SETTINGS)
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").write_text("urlpatterns = []\n")
    (tmp_path / "shop" / "models.py").write_text(MODELS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    plugins = ("tests.reader", "no:django", "no:randomly", "no:cacheprovider")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", pages.DOCS,
            *(f"-p{plugin}" for plugin in plugins),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        env={
            "PATH": os.environ["PATH"], "PYTHONPATH": f".:{pages.DOCS.parent}",
            "DJANGO_SETTINGS_MODULE": "settings",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
