"""Locking sends no signal of Django's models.

A project may have receivers for all models, as audit logs do. One that acquires a lock
would be called again by its own lock.
"""

import pytest
from django.core.management import call_command
from django.db.models import signals

from dlocks import db_lock, db_rwlock, db_semaphore

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]
SENT = [signals.pre_save, signals.post_save, signals.pre_delete, signals.post_delete]


@pytest.fixture
def seen():
    found = []

    def note(sender, **_):
        found.append(sender)

    for signal in SENT:
        signal.connect(note)
    yield found
    for signal in SENT:
        signal.disconnect(note)


@pytest.mark.parametrize("alias", ["default", "insert"])
def test_locks_send_no_signals_of_models(seen, alias):
    with db_lock("stock:7", using=alias), db_rwlock("price:7", using=alias).read():
        db_lock("stock:8", "stock:9", using=alias).acquire().release()
    with db_semaphore("stock:10", 2, using=alias):
        pass
    call_command("reap_locks", "--idle-for", "0s", using=alias)
    assert seen == []
