"""Management commands that tests call or run as processes."""

from __future__ import annotations

from django.core.management.base import BaseCommand

from dlocks import SingleInstance, db_lock


class Plain(SingleInstance, BaseCommand):
    def handle(self, *args, **options):
        self.hold.check()
        return self.hold.key


class WithTimeout(SingleInstance, BaseCommand):
    lock_key = "outer"

    def handle(self, *args, **options):
        db_lock("inner", timeout=0).acquire()
