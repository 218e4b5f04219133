"""FencedModel: a caller that has lost its lock can no longer write a row."""

from __future__ import annotations

import io
import json
import pickle
import random
import time
from contextlib import nullcontext, suppress
from functools import partial

import pytest
from django.core.management import call_command
from django.db import (
    NotSupportedError,
    OperationalError,
    connection,
    models,
    transaction,
)
from django.test.utils import isolate_apps

from dlocks import LockError, StaleToken, db_lock
from dlocks.optimistic import FencedManager, FencedModel, VersionedModel
from dlocks.optimistic.retry import is_conflict
from tests.for_each import for_each
from tests.models import Crane, Machine, Place, Robot
from tests.processes import together
from tests.promises.optimistic.kinds import own_checks
from tests.volume import volume

pytestmark = [pytest.mark.driver, pytest.mark.django_db]


def step_machine(pipe, pk, token):
    """Claim the row, send its value, and save a new one when notified.

    Return the name of the error, or None.
    """
    machine = Machine.objects.claim(pk, token)
    pipe.pause(machine.steps)
    machine.steps += 1
    try:
        machine.save()
    except LockError as error:
        return type(error).__name__
    return None


def step_with_newer_tokens(pipe, pk, number, times):
    """Increment the row a number of times, each with a new highest token.

    Return the number of refused writes.
    """
    pipe.pause("ready")
    done = refused = 0
    while done < times:
        # Tokens are unique among processes.
        token = time.time_ns() // 1000 * 16 + number
        try:
            machine = Machine.objects.claim(pk, token)
            # This gives other processes a chance.
            time.sleep(0.001)
            machine.steps += 1
            machine.save()
            done += 1
        except LockError:
            refused += 1
            time.sleep(random.uniform(0, 0.02))
    return refused


KINDS = pytest.mark.parametrize("model", [Machine, Robot])
BOTH = for_each("model", [Machine, Robot])

# Transactions of these tests are committed.
COMMITS = pytest.mark.django_db(transaction=True)


def of_snapshots(test):
    """Run a test at REPEATABLE READ where transactions have snapshots."""
    test = pytest.mark.engine("postgresql", "mariadb", "mysql")(COMMITS(test))
    return pytest.mark.usefixtures("repeatable_read")(test)


def delete_all():
    for model in (Machine, Crane):
        models.QuerySet(model).delete()


@pytest.fixture
def machine():
    return Machine.objects.create(state="new")


def is_stale(write, *arguments, **options):
    """Check that a write is refused because a newer token was used."""
    with pytest.raises(StaleToken):
        write(*arguments, **options)


def stored(pk):
    return Machine.objects.values_list("state", "steps", "fence").get(pk=pk)


@KINDS
def test_an_older_token_can_no_longer_write(model):
    pk = model.objects.create().pk
    paused = model.objects.claim(pk, 5)
    successor = model.objects.claim(pk, 6)
    successor.steps = 10
    successor.save()
    paused.steps = 1
    message = "has token 6, which is newer than token 5"
    some = partial(paused.save, update_fields=["state"])
    for write in (paused.save, paused.delete, some):
        with pytest.raises(StaleToken, match=message) as caught:
            write()
    error = caught.value
    assert (error.model, error.pk, error.token, error.found) == (model, pk, 5, 6)
    assert isinstance(error, LockError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert stored(pk) == ("", 10, 6)


@KINDS
def test_a_claim_fences_off_and_reads_the_latest_values(
    model, django_assert_num_queries
):
    """Reading before claiming would lose updates. ``claim()`` reads afterwards.

    The same token may write several times.
    """
    pk = model.objects.create(state="new").pk
    first, second = model.objects.claim(pk, 5), model.objects.get(pk=pk)
    for _ in range(3):
        first.steps += 1
        first.save()
    assert model.objects.claim(pk, 5).steps == 3
    with django_assert_num_queries(2) if model is Machine else nullcontext():
        second.claim(6)
    assert (second.steps, second.fence) == (3, 6)
    second.steps += 1
    with django_assert_num_queries(1) if model is Machine else nullcontext():
        second.save()
    for write in (first.save, lambda: first.claim(5)):
        is_stale(write)
    other = model.objects.create()
    with transaction.atomic():
        is_stale(model.objects.claim, pk, 5)
        is_stale(second.save, token=5)
        with pytest.raises(StaleToken):
            model.objects.fenced(5).update(steps=1)
        # The transaction goes on, and an older token may write other rows.
        assert model.objects.fenced(5).filter(pk=other.pk).update(steps=1) == 1
    assert (stored(pk), stored(other.pk)) == (("new", 4, 6), ("", 1, 5))


@pytest.mark.front
@COMMITS
def test_a_hold_can_be_used_as_its_token(machine):
    with db_lock("machine") as first:
        machine.claim(first)
        machine.state = "first"
        machine.save()
    with db_lock("machine") as second:
        Machine.objects.claim(machine.pk, second)
    with pytest.raises(StaleToken) as caught:
        machine.save()
    assert (caught.value.token, caught.value.found) == (first.token, second.token)


@pytest.mark.engine("postgresql", "mariadb")
@COMMITS
def test_a_stopped_process_cannot_overwrite_its_successor(doomed, worker):
    pk, paused = Machine.objects.create(steps=10).pk, doomed()
    assert paused.call(step_machine, pk, 5) == 10
    paused.stop()
    assert worker.call(step_machine, pk, 6) == 10
    assert worker.go_on() is None
    paused.resume()
    assert paused.go_on() == "StaleToken"
    assert stored(pk) == ("", 11, 6)


@pytest.mark.engine("postgresql", "mariadb")
@COMMITS
def test_four_competing_processes_lose_no_step(workers):
    """A saved value was read after the claim, or the save is refused."""
    pk, times = Machine.objects.create().pk, volume(4)
    actors = workers(4)
    for number, worker in enumerate(actors):
        worker.start(step_with_newer_tokens, pk, number, times)
    refused = sum(together(actors))
    assert stored(pk)[1] == 4 * times
    assert refused > 0, "no process took the row from another one"


@pytest.mark.front
def test_without_a_token_nothing_is_written(machine, django_assert_num_queries):
    with django_assert_num_queries(0):
        for write in (
            machine.save,
            lambda: machine.save(update_fields=["state"]),
            lambda: Machine.objects.update(state="x"),
        ):
            with pytest.raises(RuntimeError, match="only be written with a token"):
                write()
    with pytest.raises(RuntimeError, match="only be written with a token"):
        machine.delete()
    with pytest.raises(RuntimeError, match="only be written with a token"):
        Machine.objects.update_or_create(state="new", defaults={"steps": 1})


@pytest.mark.front
def test_an_invalid_token_is_refused_before_any_query(
    machine, django_assert_num_queries
):
    invalid = [None, "5", True, object(), 0]
    with django_assert_num_queries(0):
        for hold in invalid:
            error = ValueError if hold == 0 and hold is not False else TypeError
            for use in (
                machine.claim,
                Machine.objects.fenced,
                lambda hold: Machine.objects.claim(1, hold),
                *([] if hold is None else [lambda hold: machine.save(token=hold)]),
            ):
                with pytest.raises(error):
                    use(hold)


def test_one_call_and_a_new_row_may_have_a_token(machine):
    """Without one, a new row can be inserted, and no other write is possible."""
    machine.state = "set"
    machine.save(token=5)
    assert stored(machine.pk) == ("set", 0, 5)
    with pytest.raises(RuntimeError, match="only be written with a token"):
        machine.save()
    is_stale(machine.save, token=4)
    is_stale(machine.delete, token=4)
    machine.delete(token=5)
    assert not Machine.objects.exists()
    assert Machine.objects.create().fence == 0
    with transaction.atomic():
        crane = Crane.objects.fenced(6).create(name="theirs")
        unread = Crane(pk=crane.pk, name="mine")
        is_stale(unread.save, token=5, force_update=True)
        assert Place.objects.get().name == "theirs", "no parent was written"
        transaction.set_rollback(True)
    made = Machine(state="made")
    made.save(token=7)
    assert stored(made.pk) == ("made", 0, 7)
    is_stale(Machine.objects.claim, made.pk, 6)


@KINDS
def test_a_row_created_with_a_token_refuses_an_older_one(model):
    rows = model.objects.fenced(6)
    created = [rows.create(state="one"), rows.get_or_create(state="two")[0]]
    assert set(model.objects.values_list("fence", flat=True)) == {6}
    for row in model.objects.all():
        is_stale(model.objects.claim, row.pk, 5)
    # Its creator may write it until a newer token is used.
    for one in created:
        one.steps = 1
        one.save()
        model.objects.claim(one.pk, 7)
        is_stale(one.save)


@pytest.mark.front
def test_bulk_methods_are_refused(machine, django_assert_num_queries):
    """They cannot compare a token with each row. Inserts without a token can."""
    with django_assert_num_queries(0):
        for rows in (Machine.objects.all(), Machine.objects.fenced(7)):
            for write in (
                rows.delete,
                lambda rows=rows: rows.bulk_update([machine], ["state"]),
                lambda rows=rows: rows.bulk_create(
                    [machine], None, False, True, ["state"], ["id"]
                ),
            ):
                with pytest.raises(NotSupportedError, match="claim each row"):
                    write()
        with pytest.raises(NotSupportedError, match="claim each row"):
            Machine.objects.fenced(7).bulk_create([Machine()])
    (made,) = Machine.objects.bulk_create([Machine(state="made")])
    assert made.fence == 0


@pytest.mark.parametrize("model", [Machine, Crane, Robot])
def test_a_deleted_row_is_not_inserted_again(model):
    row = model.objects.create()
    row.claim(5)
    model.objects.claim(row.pk, 6).delete()
    for write in (row.save, row.delete):
        with pytest.raises(StaleToken, match="is gone"):
            write()
    with pytest.raises(model.DoesNotExist):
        row.claim(7)
    with pytest.raises(model.DoesNotExist):
        model.objects.claim(row.pk, 7)
    assert not model.objects.exists()
    assert not Place.objects.exists()


@KINDS
def test_update_writes_all_rows_or_none_with_a_token(model):
    rows = [model.objects.create(state="new") for _ in range(3)]
    model.objects.claim(rows[1].pk, 9)
    with pytest.raises(StaleToken) as caught:
        model.objects.fenced(8).filter(state="new").update(steps=1)
    error = caught.value
    assert (error.pk, error.token, error.found) == (rows[1].pk, 8, 9)
    values = Machine.objects.values_list("state", "steps", "fence")
    assert sorted(values) == [("new", 0, 0), ("new", 0, 0), ("new", 0, 9)]
    new = model.objects.fenced(10).filter(state="new")
    assert new.update(steps=models.F("steps") + 1) == 3
    assert set(values.all()) == {("new", 1, 10)}
    assert not new.filter(state="other").update(steps=2)


@COMMITS
def test_a_row_that_starts_to_match_later_is_not_written():
    delete_all()
    Machine.objects.create(state="new")
    second = Machine.objects.create(state="old")
    fenced = []

    def then_another_writes(execute, sql, params, many, context):
        written = execute(sql, params, many, context)
        if sql.startswith("UPDATE") and not fenced:
            # The first statement sets the fence of the rows that match.
            fenced.append(sql)
            Machine.objects.claim(second.pk, 1)
            models.QuerySet(Machine).filter(pk=second.pk).update(state="new")
        return written

    rows = Machine.objects.fenced(2).filter(state="new")
    with connection.execute_wrapper(then_another_writes):
        assert rows.update(steps=22) == 1
    assert '"fence" = ' in fenced[0].replace("`", '"')
    assert stored(second.pk) == ("new", 0, 1)


@of_snapshots
@for_each("seen", [5, 7])
@for_each("write", ["update", "claim", "refresh"])
@BOTH
def test_an_old_snapshot_does_not_hide_a_newer_token(
    model, write, seen, in_second_connection
):
    """A holder that has lost its lock is refused at REPEATABLE READ too.

    Its transaction began before its successor wrote, and writes nothing at all.
    PostgreSQL refuses the write itself.
    """
    delete_all()
    first, second = model.objects.create(), model.objects.create()
    row = model.objects.claim(first.pk, seen)

    def succeed():
        mine = model.objects.claim(first.pk, 9)
        mine.steps = 9
        mine.save()

    with (
        pytest.raises((StaleToken, OperationalError)) as caught,
        transaction.atomic(),
    ):
        assert model.objects.get(pk=first.pk).fence == seen
        model.objects.fenced(7).filter(pk=second.pk).update(state="other")
        in_second_connection(succeed)
        rows = model.objects.fenced(7)
        if write == "update":
            rows.update(steps=1)
        elif write == "claim":
            rows.claim(first.pk, 7)
        else:
            row.claim(7)
    if isinstance(caught.value, StaleToken):
        assert (caught.value.pk, caught.value.found) == (first.pk, 9)
    else:
        assert is_conflict(caught.value)
    assert (stored(first.pk), stored(second.pk)) == (("", 9, 9), ("", 0, 0))


@of_snapshots
@for_each("use", ["queryset", "instance"])
def test_a_claim_of_a_row_that_is_not_in_the_snapshot(use, in_second_connection):
    """A deleted row is not claimed. One that was inserted later is fenced."""

    def claim(row):
        if use == "queryset":
            type(row).objects.claim(row.pk, 7)
        else:
            row.claim(7)

    delete_all()
    machine = Machine.objects.create(state="new")
    with (
        pytest.raises((Machine.DoesNotExist, OperationalError)),
        transaction.atomic(),
    ):
        assert Machine.objects.exists()
        in_second_connection(lambda: Machine.objects.claim(machine.pk, 5).delete())
        claim(machine)
    with transaction.atomic():
        assert not Crane.objects.exists()
        in_second_connection(lambda: Crane.objects.fenced(5).create(pk=1))
        try:
            claim(Crane(pk=1))
            claimed = True
        except (Crane.DoesNotExist, OperationalError):
            claimed = False
            transaction.set_rollback(True)
    assert Crane.objects.get().fence == (7 if claimed else 5)


@pytest.fixture
def in_old_snapshot(in_second_connection):
    """Return a function that works in a transaction after another connection's write.

    The snapshot of the transaction is older. Return the result, or None if PostgreSQL
    refuses the work.
    """

    def run(model, meanwhile, work):
        try:
            with transaction.atomic():
                assert model.objects.exists()
                in_second_connection(meanwhile)
                return work()
        except OperationalError as error:
            assert is_conflict(error)
            return None

    return run


@of_snapshots
@for_each("use", ["queryset", "instance"])
@for_each("token", [6, 7])
@BOTH
def test_a_claim_in_an_old_snapshot_reads_the_last_values(
    model, token, use, in_old_snapshot
):
    """At REPEATABLE READ a save after a claim loses no update either.

    The last writer was an earlier holder, or the same hold in another connection.
    PostgreSQL refuses the claim itself.
    """
    delete_all()
    row = model.objects.create()
    name = "arms" if model is Robot else "steps"

    def write():
        mine = model.objects.claim(row.pk, token)
        setattr(mine, name, 10)
        mine.save()

    def add():
        mine = model.objects.claim(row.pk, 7) if use == "queryset" else row
        if mine is row:
            row.claim(7)
        setattr(mine, name, getattr(mine, name) + 1)
        mine.save()
        return 1

    added = in_old_snapshot(model, write, add)
    assert getattr(model.objects.get(), name) == 10 + (added or 0)


@of_snapshots
@BOTH
def test_a_hold_in_two_connections_writes_all_rows(model, in_old_snapshot):
    """At REPEATABLE READ the hold's own token in another connection hides no row."""
    delete_all()
    model.objects.create()
    rows = model.objects.fenced(7)
    written = in_old_snapshot(
        model, lambda: rows.update(state="other"), lambda: rows.update(steps=1)
    )
    assert written != 0
    assert model.objects.get().steps == (1 if written else 0)


@of_snapshots
@for_each("token", [5, 9])
@BOTH
def test_a_row_that_has_changed_since_the_snapshot_is_kept(
    model, token, in_old_snapshot
):
    """At REPEATABLE READ a filter is compared with the last committed values."""
    name = "arms" if model is Robot else "steps"
    delete_all()
    model.objects.create(**{name: 1}).claim(min(token, 7))

    def work():
        rows = model.objects.fenced(7).filter(**{name: 1})
        assert rows.update(**{name: 3}) == 0

    change = partial(model.objects.fenced(token).update, **{name: 2})
    with suppress(StaleToken):
        in_old_snapshot(model, change, work)
    assert getattr(model.objects.get(), name) == 2


@pytest.mark.engine("postgresql", "mariadb", "mysql")
@COMMITS
def test_holders_of_different_rows_do_not_block_each_other(machine, in_other_thread):
    """A write with a token does not wait for rows that its filter leaves out."""
    Machine.objects.create(state="other")

    def write_the_other():
        Machine.objects.fenced(5).filter(state="other").update(steps=1)

    with transaction.atomic():
        assert Machine.objects.fenced(5).filter(state="new").update(steps=1) == 1
        in_other_thread(write_the_other)
        assert Machine.objects.fenced(5).filter(state="new").update(steps=2) == 1


@pytest.mark.front
def test_a_fenced_queryset_is_evaluated_again_after_its_write(machine):
    rows = Machine.objects.fenced(1).filter(state="new")
    assert [row.steps for row in rows] == [0]
    rows.update(steps=9)
    assert [row.steps for row in rows] == [9]


def test_the_fence_itself_cannot_be_written(machine):
    with pytest.raises(ValueError, match="fence"):
        Machine.objects.fenced(5).update(fence=1)
    with pytest.raises(TypeError, match="slice"):
        Machine.objects.fenced(5)[:1].update(steps=1)
    machine.claim(5)
    machine.fence = 1
    machine.save()
    assert stored(machine.pk)[2] == 5


def test_loading_a_fixture_lowers_no_fence(machine, tmp_path):
    dumped = io.StringIO()
    call_command("dumpdata", "tests.Machine", stdout=dumped)
    machine.claim(5)
    (row,) = json.loads(dumped.getvalue())
    row["fields"]["state"] = "loaded"
    path = tmp_path / "machines.json"
    path.write_text(json.dumps([row]))
    call_command("loaddata", path, verbosity=0)
    assert stored(machine.pk) == ("loaded", 0, 5)


@pytest.mark.front
async def test_async_methods_are_fenced_too():
    machine = await Machine.objects.acreate()
    await machine.aclaim(5)
    claimed = await Machine.objects.aclaim(machine.pk, 6)
    await claimed.asave()
    with pytest.raises(StaleToken):
        await machine.asave()
    await machine.asave(token=7)
    with pytest.raises(StaleToken):
        await claimed.adelete()
    await machine.adelete(token=7)


@pytest.mark.front
@isolate_apps("tests")
def test_the_checks_report_wrong_managers_and_base_classes():
    class Plain(FencedModel):
        objects = models.Manager()

        class Meta:
            app_label = "tests"

    class Both(VersionedModel, FencedModel):
        objects = FencedManager()

        class Meta:
            app_label = "tests"

    assert own_checks(Plain) == ["dlocks.E024"]
    assert "dlocks.E023" in own_checks(Both)
    assert own_checks(Machine) == own_checks(Robot) == []
