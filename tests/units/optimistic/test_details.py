"""Pauses of retries, marks of hidden values in forms, and the state of a copy."""

from __future__ import annotations

import copy
import sys
import time

import pytest
from django import forms
from django.db import OperationalError, transaction

import dlocks.transactions
from dlocks import StaleVersion
from dlocks.optimistic import retry as retry_module
from dlocks.optimistic import retry_on_conflict
from dlocks.optimistic.forms import VersionedModelForm
from dlocks.optimistic.retry import is_conflict
from dlocks.optimistic.version_field import new_version
from tests.models import Article
from tests.promises.test_forks import in_child

pytestmark = [pytest.mark.front, pytest.mark.django_db]
transactions = dlocks.transactions.__file__


def stale():
    return StaleVersion(Article, 1, 1, 2)


def test_the_backoff_doubles_up_to_its_limit_with_full_jitter(monkeypatch):
    slept, bounds = [], []

    def fail(times, **policy):
        left = [stale() for _ in range(times)]

        @retry_on_conflict(times + 1, backoff=0.1, **policy)
        def work():
            if left:
                raise left.pop()

        work()

    def uniform(low, high):
        bounds.append((low, high))
        return 0.0

    monkeypatch.setattr(retry_module.time, "sleep", slept.append)
    monkeypatch.setattr(retry_module.random, "uniform", uniform)
    fail(5, max_backoff=0.5)
    assert bounds == [(0, 0.1), (0, 0.2), (0, 0.4), (0, 0.5), (0, 0.5)]
    assert slept == [0.0] * 5
    fail(3, jitter=False)
    assert slept[5:] == [0.1, 0.2, 0.4]


def test_only_lost_races_are_conflicts():
    assert is_conflict(stale())
    assert not is_conflict(ValueError(1213))
    assert not is_conflict(OperationalError())
    assert not is_conflict(OperationalError(1205, "Lock wait timeout exceeded"))
    assert is_conflict(OperationalError(1213, "Deadlock found"))
    assert is_conflict(OperationalError(1020, "Record has changed since last read"))


def test_forked_processes_have_different_versions(monkeypatch):
    """Their clock may be behind the last version of their parent."""
    new_version()
    ahead = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: ahead() - 10**12)
    assert len({in_child(new_version) for _ in range(2)}) == 2


def test_equal_secrets_have_different_marks():
    """The token does not show a password, or that two of them are the same."""

    class SecretForm(VersionedModelForm):
        class Meta:
            model = Article
            fields = ["title", "body"]
            widgets = {"body": forms.PasswordInput}

    marks = set()
    for title in ("first", "text"):
        one = Article.objects.create(title=title, body="text")
        marks |= set(SecretForm(instance=one)._values.values())
    assert len(marks) == 4


@pytest.mark.parametrize("adding", [True, False])
def test_a_copy_with_a_state_of_its_own_starts_with_a_new_version(adding):
    """Django documents this way to copy an instance."""
    article = Article.objects.create(title="first")
    article.save()
    clone = copy.copy(article)
    clone._state = copy.copy(article._state)
    clone.pk, clone._state.adding = None, adding
    clone.save()
    assert clone.pk != article.pk
    assert clone.version > article.version
    article.save()
    clone.save()


@pytest.mark.django_db(transaction=True)
def test_an_insert_does_not_look_through_the_callbacks_of_its_transaction():
    """Many transactions register a callback for each row that they insert."""

    def lines_of_insert():
        lines = 0

        def count(frame, event, _):
            nonlocal lines
            lines += event == "line" and frame.f_code.co_filename == transactions
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            Article.objects.create(title="one")
        finally:
            sys.settrace(before)
        return lines

    with transaction.atomic():
        Article.objects.create(title="first")
        few = lines_of_insert()
        for _ in range(100):
            transaction.on_commit(int)
        assert lines_of_insert() == few > 0
