"""Kinds of versioned models, and what the tests of versions share."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.db import connection, transaction

from dlocks import StaleVersion
from tests.for_each import for_each
from tests.models import Article, ArticleProxy, Report, Restaurant

# Transactions of these tests are committed.
COMMITS = pytest.mark.django_db(transaction=True)

KINDS = [
    (Article, "title"),
    (Report, "pages"),
    (ArticleProxy, "title"),
    (Restaurant, "stars"),
]


def for_each_kind(test):
    """Run a test for each kind of model in turn, and roll each one back."""

    def run(kind):
        with transaction.atomic():
            test(*kind)
            transaction.set_rollback(True)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return for_each("kind", KINDS)(run)


def is_stale(write, *arguments, **options):
    """Check that a write is refused because the row has changed or is gone."""
    with pytest.raises(StaleVersion) as caught:
        write(*arguments, **options)
    error = caught.value
    assert error.held != error.found
    return error


@contextmanager
def received(handler, sender, *signals):
    """Connect a handler to signals of a model."""
    for signal in signals:
        signal.connect(handler, sender=sender)
    try:
        yield
    finally:
        for signal in signals:
            signal.disconnect(handler, sender=sender)


def stored(model, pk=None, name="version"):
    rows = model.objects.values_list(name, flat=True)
    return rows.get() if pk is None else rows.get(pk=pk)


def own_checks(model):
    """Return the ids of the messages of dlocks about a model."""
    found = sorted(message.id for message in model.check())
    return [one for one in found if one.startswith("dlocks")]


def execute(sql, *values):
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
