"""Imports for the fork server from which all test processes are forked."""

import os

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
django.setup()

import pytest  # noqa: E402, F401
from django.core.management import get_commands  # noqa: E402, F401

from tests import jobs  # noqa: E402, F401
