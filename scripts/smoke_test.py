"""Acquire a lock with the installed package.

The current directory contains a new Django project called "trial". Only the package and
its dependencies need to be installed.
"""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import django
from django.core.management import call_command
from django.db import connections

import dlocks


def main() -> None:
    assert dlocks.__file__.startswith(sys.prefix), dlocks.__file__
    required = importlib.metadata.requires("dlocks") or []
    needed = [re.split(r"\W", one)[0] for one in required if "extra ==" not in one]
    assert needed == ["django"], needed
    with Path("trial/settings.py").open("a") as settings:
        settings.write('\nINSTALLED_APPS += ["dlocks"]\n')
    sys.path.insert(0, str(Path.cwd()))
    os.environ["DJANGO_SETTINGS_MODULE"] = "trial.settings"
    django.setup()
    call_command("check")
    call_command("makemigrations", check_changes=True, dry_run=True)
    call_command("migrate", verbosity=0)
    with ThreadPoolExecutor() as other:
        with dlocks.db_lock("stock:7") as hold:
            assert hold.held
            assert not other.submit(is_free, "stock:7").result()
            listing = io.StringIO()
            call_command("list_locks", stdout=listing)
            assert "stock:7" in listing.getvalue(), listing.getvalue()
        assert not hold.held
        assert other.submit(is_free, "stock:7").result()
    # An exit status other than 0 would be an exception.
    call_command("dlocks_health")
    print(listing.getvalue().rstrip(), django.get_version(), sep="\n")


def is_free(key: str) -> bool:
    try:
        with dlocks.db_lock(key, timeout=0):
            return True
    except dlocks.LockTimeout:
        return False
    finally:
        connections.close_all()


if __name__ == "__main__":
    main()
