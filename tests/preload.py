"""What a process of the tests needs, imported in the one that they are all forked from."""

import os

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
django.setup()

import pytest  # noqa: E402, F401
from django.core.management import get_commands  # noqa: E402, F401

from tests import jobs  # noqa: E402, F401
