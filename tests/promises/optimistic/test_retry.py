"""retry_on_conflict: run a transaction again, as a whole, after a conflict.

The number of attempts is limited.
"""

from __future__ import annotations

import time

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import IntegrityError, OperationalError, connection, transaction
from django.db.models import F

from dlocks import LockError, StaleVersion
from dlocks.optimistic import retry_on_conflict
from dlocks.optimistic.retry import is_conflict
from tests import models
from tests.for_each import for_each
from tests.models import Article, Badge, Counter
from tests.processes import together
from tests.volume import volume

pytestmark = [pytest.mark.front, pytest.mark.django_db]


def increment(pipe, kind, times, **policy):
    """Increment all rows repeatedly, and return the number of retries."""
    model, field, how = kind
    model, runs = getattr(models, model), 0

    @retry_on_conflict(**policy)
    def once():
        nonlocal runs
        runs += 1
        instances = list(model.objects.order_by("pk"))
        for instance in instances:
            setattr(instance, field, getattr(instance, field) + 1)
        if how == "bulk_update":
            model.objects.bulk_update(instances, [field])
        else:
            for instance in instances:
                instance.save(
                    **({"update_fields": [field]} if how == "update_fields" else {})
                )

    pipe.pause("ready")
    for _ in range(times):
        once()
    return runs - times


def cross(pipe, first, second, **policy):
    """Write two rows in one transaction.

    Another process writes them in the opposite order, so that one of the two deadlocks.
    """
    runs = 0

    @retry_on_conflict(**policy)
    def both():
        nonlocal runs
        runs += 1
        Counter.objects.filter(pk=first).update(value=F("value") + 1)
        if runs == 1:
            pipe.pause("has the first")
        Counter.objects.filter(pk=second).update(value=F("value") + 1)

    both()
    return runs


def delete_or_save(pipe, pk, action):
    """Read the row, and delete or save it when notified.

    Return the name of the error, or None.
    """
    report = models.Report.objects.get(pk=pk)
    pipe.pause("read")
    try:
        getattr(report, action)()
    except LockError as error:
        return type(error).__name__
    return None


# Transactions of these tests are committed.
COMMITS = pytest.mark.django_db(transaction=True)


def stale():
    return StaleVersion(Article, 1, 1, 2)


def failing(times, error=stale):
    """Return a function that fails ``times`` times, and the list of its calls."""
    calls = []

    def function(*args, **kwargs):
        calls.append((args, kwargs))
        if len(calls) <= times:
            raise error()
        return "done"

    return function, calls


@pytest.mark.engine("postgresql", "mariadb")
@COMMITS
@for_each(
    "case",
    [
        (("Restaurant", "stars", "save"), 1),
        (("Report", "pages", "update_fields"), 1),
        (("Report", "pages", "bulk_update"), 3),
    ],
)
def test_four_processes_with_retries_lose_no_increment(workers, case):
    kind, rows = case
    model, field, _how = kind
    model, times = getattr(models, model), volume(3)
    Article.objects.all().delete()
    for _ in range(rows):
        model.objects.create()
    counters = workers(4)
    policy = {"attempts": 400, "backoff": 0.002, "max_backoff": 0.05}
    for worker in counters:
        worker.start(increment, kind, times, **policy)
    repeated = sum(together(counters))
    found = list(model.objects.values_list(field, flat=True))
    assert found == [4 * times] * rows
    assert repeated > 0, "no transaction was in the way of another one"


@pytest.mark.driver
@COMMITS
def test_one_of_concurrent_deletes_and_saves_succeeds(workers):
    """A deleted row stays deleted in both of its tables."""
    for _ in range(volume(4)):
        pk = models.Report.objects.create().pk
        actors, actions = workers(4), ["delete", "save", "delete", "save"]
        for worker, action in zip(actors, actions, strict=True):
            worker.start(delete_or_save, pk, action)
        refusals = together(actors)
        assert sorted(map(str, refusals)) == ["None", *["StaleVersion"] * 3]
        winner = actions[refusals.index(None)]
        for model in (models.Report, Article):
            assert model.objects.filter(pk=pk).exists() == (winner == "save")


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@COMMITS
@pytest.mark.usefixtures("repeatable_read")
@for_each("model", [Article, Badge])
def test_an_old_snapshot_does_not_hide_a_conflict(in_other_thread, model):
    """The row still looks unchanged, also to Django's ``select_on_save``."""
    model.objects.create()
    with (
        pytest.raises((StaleVersion, OperationalError)) as caught,
        transaction.atomic(),
    ):
        row = model.objects.get()
        in_other_thread(lambda: model.objects.update(title="meanwhile"))
        assert model.objects.get().version == row.version
        row.save()
    assert is_conflict(caught.value)
    if isinstance(caught.value, StaleVersion):
        assert caught.value.held == row.version != caught.value.found
    assert model.objects.get().title == "meanwhile"


@pytest.mark.engine("postgresql", "mariadb")
@COMMITS
def test_a_deadlock_is_retried(workers):
    rows = [Counter.objects.create(name=name).pk for name in "ab"]
    one, two = workers(2)
    one.start(cross, *rows, attempts=5)
    two.start(cross, *reversed(rows), attempts=5)
    runs = together([one, two])
    # The second run may lock its first row before the other transaction, just woken,
    # locks it. Then they deadlock again.
    assert max(runs) > 1
    assert list(Counter.objects.values_list("value", flat=True)) == [2, 2]


@pytest.mark.engine("sqlite", "postgresql")
@COMMITS
def test_a_serialization_failure_is_retried(in_other_thread):
    """So is a write on SQLite in a transaction that began as a reader."""
    Counter.objects.create(name="a")
    runs = []
    if connection.vendor == "sqlite":
        # Begin as a reader, as without the ``transaction_mode`` that dlocks recommends.
        mode, connection.transaction_mode = connection.transaction_mode, None

    @retry_on_conflict(backoff=0)
    def add():
        runs.append(1)
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        value = Counter.objects.get().value
        if len(runs) == 1:
            in_other_thread(lambda: Counter.objects.update(value=10))
        Counter.objects.update(value=value + 1)

    try:
        add()
    finally:
        if connection.vendor == "sqlite":
            connection.transaction_mode = mode
    assert (len(runs), Counter.objects.get().value) == (2, 11)


@pytest.mark.engine("postgresql", "mariadb")
@COMMITS
def test_a_lock_wait_timeout_is_not_retried(in_other_thread):
    Counter.objects.create(name="a")
    runs = []

    @retry_on_conflict(backoff=0)
    def wait():
        runs.append(1)
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SET LOCAL lock_timeout = '100ms'")
            else:
                cursor.execute("SET SESSION innodb_lock_wait_timeout = 1")
        Counter.objects.update(value=5)

    with transaction.atomic():
        Counter.objects.update(value=1)
        with pytest.raises(OperationalError):
            in_other_thread(wait)
    assert len(runs) == 1


@COMMITS
def test_the_whole_transaction_is_retried():
    runs = []

    @retry_on_conflict(backoff=0)
    def work(name):
        """Make a row, then lose."""
        assert connection.in_atomic_block
        Counter.objects.create(name=name)
        runs.append(1)
        if len(runs) < 3:
            raise stale()
        return "done"

    assert work("a") == "done"
    assert Counter.objects.count() == 1, (
        "the writes of failed attempts were rolled back"
    )
    assert (work.__name__, work.__doc__) == ("work", "Make a row, then lose.")


def test_the_last_error_is_raised_with_a_note():
    """The function gets its arguments in each attempt, also in a TestCase."""
    function, calls = failing(2)
    assert retry_on_conflict(backoff=0)(function)(7, by="name") == "done"
    assert calls == [((7,), {"by": "name"})] * 3
    function, calls = failing(10)
    with pytest.raises(StaleVersion) as caught:
        retry_on_conflict(3, backoff=0)(function)()
    assert len(calls) == 3
    assert "failed in all 3 attempts" in caught.value.__notes__[0]
    function, calls = failing(10)
    with pytest.raises(StaleVersion) as caught:
        retry_on_conflict(1)(function)()
    assert len(calls) == 1


def test_other_errors_are_not_retried():
    errors = ZeroDivisionError, IntegrityError, KeyboardInterrupt, Counter.DoesNotExist
    for error in errors:
        function, calls = failing(10, error)
        with pytest.raises(error):
            retry_on_conflict(backoff=0)(function)()
        assert len(calls) == 1, error


@COMMITS
def test_a_retry_inside_a_transaction_is_refused():
    """A further attempt could not see the write of the other transaction."""
    function, calls = failing(0)

    @retry_on_conflict(backoff=0)
    async def work():
        await sync_to_async(function)()

    said = "Put retry_on_conflict.. around the outermost"
    with transaction.atomic(), pytest.raises(RuntimeError, match=said):
        retry_on_conflict(backoff=0)(function)()
    said = "open one on 'default'"
    with transaction.atomic(), pytest.raises(RuntimeError, match=said):
        async_to_sync(work)()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(RuntimeError, match=said):
            retry_on_conflict(backoff=0)(function)()
    finally:
        transaction.set_autocommit(True)
    with pytest.raises(RuntimeError, match="outermost"):
        retry_on_conflict()(lambda: retry_on_conflict(backoff=0)(function)())()
    assert calls == []
    async_to_sync(work)()
    assert len(calls) == 1


# Coroutines


async def test_a_whole_coroutine_is_retried():
    runs = []

    @retry_on_conflict(backoff=0)
    async def work(number):
        article = await Article.objects.aget()
        runs.append(article.version)
        if len(runs) == 1:
            await Article.objects.aupdate(title="meanwhile")
        article.views = number
        await article.asave()
        return article.views

    article = await Article.objects.acreate()
    assert await work(7) == 7
    assert len(runs) == 2
    assert runs[0] == article.version < runs[1]


# Invalid options


def test_invalid_options_and_functions_are_refused():
    """The parentheses must not be missing, and a generator cannot be retried."""
    for options, error in (
        ({"attempts": 0}, ValueError),
        ({"attempts": 2.5}, TypeError),
        ({"attempts": True}, TypeError),
        ({"backoff": -1}, ValueError),
        ({"backoff": "1"}, TypeError),
        ({"max_backoff": float("inf")}, ValueError),
    ):
        with pytest.raises(error):
            retry_on_conflict(**options)
    with pytest.raises(TypeError, match="parentheses"):
        retry_on_conflict(lambda: None)

    def generator():
        yield 1

    async def asynchronous():
        yield 1

    for function in (generator, asynchronous):
        with pytest.raises(TypeError, match="generator"):
            retry_on_conflict(backoff=0)(function)


@pytest.mark.django_db(transaction=True)
def test_a_function_that_returns_a_coroutine_is_refused():
    """Its body would run after the transaction, and would not be retried."""

    async def work():
        raise AssertionError

    with pytest.raises(TypeError, match=r"<lambda> returned a coroutine, which would"):
        retry_on_conflict()(lambda: work())()


def test_retries_sleep_between_attempts():
    slept = time.monotonic()
    delays = retry_on_conflict(2, backoff=0.05, jitter=False)

    @delays
    async def work():
        raise stale()

    with pytest.raises(StaleVersion) as caught:
        async_to_sync(work)()
    assert time.monotonic() - slept >= 0.05
    assert "failed in all 2 attempts" in caught.value.__notes__[0]


@COMMITS
def test_a_failing_callback_does_not_repeat_a_commit():
    """Everything is committed. Another run would write it again."""
    article = Article.objects.create(views=1)

    def conflict():
        raise stale()

    @retry_on_conflict(backoff=0)
    def read():
        Article.objects.filter(pk=article.pk).update(views=F("views") + 1)
        transaction.on_commit(conflict)

    with pytest.raises(StaleVersion):
        read()
    article.refresh_from_db()
    assert article.views == 2


def test_a_testcase_sees_only_the_functions_own_callbacks(
    django_capture_on_commit_callbacks,
):
    """The tests of a project count its own callbacks."""

    @retry_on_conflict(backoff=0)
    def read():
        transaction.on_commit(int)

    with django_capture_on_commit_callbacks() as callbacks:
        read()
    assert callbacks == [int]
