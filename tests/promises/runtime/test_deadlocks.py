"""Deadlocks: callers that wait for each other's keys are told at once."""

import asyncio
import contextlib
import pickle
import re
import threading
import time

import pytest
from django.db import connection, transaction

from dlocks import LockDeadlock, LockLost, LockTimeout, db_lock, db_semaphore
from dlocks.backends.database import PessimisticBackend
from dlocks.models import LockClaim
from dlocks.testing import held_elsewhere
from tests import jobs
from tests.for_each import for_each
from tests.promises.admin.names import LIST
from tests.promises.admin.pages import detail, page
from tests.promises.commands.running import listed, run
from tests.timing import in_time
from tests.volume import volume

# The tests that are marked storage run each statement that looks for deadlocks on every
# engine. What follows from its rows is the same everywhere. Locks of sessions ask
# PostgreSQL and MySQL in different ways.
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.engine("postgresql")]

SERVERS = pytest.mark.engine("postgresql", "mysql")
BOTH = ["default", "session"] if connection.vendor == "postgresql" else ["session"]


@pytest.fixture(autouse=True)
def nothing_left(transactional_db, has_failed):
    """Check after each test that no claim is left."""
    yield
    if not has_failed():
        assert not LockClaim.objects.values_list("key_resource", "holder", "version")


@pytest.fixture
def queued(waiting):
    """Return a function that returns the number of waiters of all processes."""

    def count(using="default", keys="abcdky"):
        if using == "session":
            return sum(waiting(key, "session") for key in keys)
        return LockClaim.objects.filter(version__isnull=True).count()

    return count


@pytest.fixture
def nested(workers, until, queued):
    """Return a function that lets processes nest keys, one after the other.

    Each process holds its first key before any of them asks for its second. They join
    the queue in the given order. The function returns the processes, and their results
    by ``results()``.
    """

    def start(*pairs, **policy):
        started = workers(len(pairs))
        keys = {key if isinstance(key, str) else key[0] for _, key in pairs}
        for worker, (first, second) in zip(started, pairs, strict=True):
            worker.start(jobs.nest, first, second, **policy)
        for worker in started:
            assert worker.hear() == "first"
        for number, worker in enumerate(started, 1):
            worker.tell()
            until(lambda number=number: queued(policy.get("using"), keys) >= number)
        return started

    return start


def results(started):
    return [worker.hear() for worker in started]


def let_them_meet(*started):
    """Let processes that nest keys go on when all of them have the first one."""
    for worker in started:
        assert worker.hear() == "first"
    for worker in started:
        worker.tell()


def one_is_refused(outcomes):
    """Return whether one of two callers was refused, and the other was not."""
    return sorted(one.partition(":")[0] for one in outcomes) == ["LockDeadlock", "both"]


CASES = (
    [("default", "a"), ("optimistic", "a"), ("insert", "a")]
    if connection.vendor == "sqlite"
    else [
        ("default", "a"),
        ("session", "*/ DROP %s %(x)s '\"\\ü/*dlocks x*/"),
        ("session", "ü" * 255),
    ]
)


@pytest.mark.storage
@for_each("case", CASES)
def test_two_callers_that_wait_for_each_other_are_told(nested, case):
    """The younger one gets LockDeadlock, which names both; the other one goes on.

    The key of a session lock may have any text, and the note of each lock.
    """
    using, key = case
    note = "recount " + "ü*%" * 90
    started = nested((key, "b"), ("b", key), using=using, note=note)
    began = time.monotonic()
    refused = started[1].hear()
    in_time(time.monotonic() - began, 3)
    assert started[0].hear() == "both"
    names = [f"{worker.process.pid}" for worker in started]
    assert refused.startswith(
        f"LockDeadlock: {key!r} could not be acquired because of a"
    )
    assert f"holds {key!r} and has waited for 'b' for" in refused
    assert f"holds 'b' and has waited for {key!r} for" in refused
    assert refused.index(names[0]) < refused.index(names[1])
    assert refused.count("[recount ü*%") == 2
    keys = ", ".join(map(repr, sorted([key, "b"])))
    assert refused.endswith(f"or together: db_lock({keys}).")


@SERVERS
@for_each("using", BOTH)
def test_only_the_last_caller_of_a_cycle_is_refused(nested, using):
    """All others go on. A caller behind a cycle is not part of it."""
    permit = ("pool", 2)
    cycles = [
        (4, [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a")]),
        (2, [("a", "b"), ("c", "a"), ("b", "a")]),
    ]
    if using == "default" or connection.vendor == "postgresql":
        readers = [(("a", "read"), ("b", "write")), (("b", "read"), ("a", "write"))]
        cycles.append((2, readers))
    if using == "default":
        cycles.append((3, [(permit, "y"), (permit, "y"), ("y", permit)]))
    for members, pairs in cycles:
        *others, refused = results(nested(*pairs, using=using))
        assert others == ["both"] * len(others), pairs
        assert refused.startswith("LockDeadlock"), pairs
        assert refused.count("holds") == members, pairs
        assert ("'c'" in refused) == (members == 4), pairs


@pytest.mark.engine("postgresql", "mariadb")
def test_transactions_deadlock_with_each_other_and_leases(nested, workers):
    """The keys of transactions are visible to no one, but their callers are."""
    outcomes = results(nested(("a", "b"), ("b", "a"), in_transaction=True))
    assert outcomes[0] == "both"
    assert outcomes[1].startswith("LockDeadlock")
    started = inside, outside = workers(2)
    inside.start(jobs.nest, "a", "b", in_transaction=True)
    outside.start(jobs.nest, "b", "a")
    let_them_meet(*started)
    assert one_is_refused(results(started))


@for_each("using", BOTH)
def test_a_reader_behind_a_writer_is_part_of_a_deadlock(workers, until, using, queued):
    """It waits for all readers, because the writer ahead of it does."""
    reader, other, writer = workers(3)
    reader.start(jobs.nest, ("k", "read"), "y", using=using)
    other.start(jobs.nest, "y", ("k", "read"), using=using)
    for worker in (reader, other):
        assert worker.hear() == "first"
    writer.start(jobs.hold, "k", timeout=60, using=using)
    until(lambda: queued(using) == 1)
    reader.tell()
    until(lambda: queued(using) == 2)
    other.tell()
    assert other.hear().startswith("LockDeadlock")
    assert reader.hear() == "both"
    writer.hear()
    writer.tell()
    assert writer.hear() == "released"


def test_a_semaphore_deadlocks_when_all_its_permits_wait(workers, until):
    """A permit that is held by a caller outside of the cycle will be released."""
    one, other, last = workers(3)
    permit = ("pool", 2)
    one.start(jobs.nest, permit, "y")
    other.start(jobs.nest, "y", permit)
    last.start(jobs.hold, ("pool", 2), timeout=60)
    last.hear()
    let_them_meet(one, other)
    waiting = LockClaim.objects.filter(version__isnull=True)
    until(lambda: waiting.count() == 2)
    wait_for_looks()
    assert waiting.count() == 2
    last.tell()
    last.hear()
    assert results([one, other]) == ["both", "both"]


def wait_for_looks():
    """Wait until a deadlock would have been found and confirmed a second later."""
    time.sleep(2.5)


@pytest.mark.front
def test_a_second_permit_of_the_only_one_is_a_deadlock():
    """A caller that waits for itself gets the same error."""
    only = db_semaphore("pool", 1, reentrant=False, timeout=30)
    began = time.monotonic()
    with only, pytest.raises(LockDeadlock) as caught:
        only.acquire()
    in_time(time.monotonic() - began, 3)
    (member,) = caught.value.members
    assert (member.holds, member.waits_for) == (("pool",), "pool")
    assert isinstance(caught.value, LockTimeout)
    assert pickle.loads(pickle.dumps(caught.value)).members == (member,)


def test_a_deadlock_of_one_of_two_threads_with_a_hold_is_found(threads, until, queued):
    """The other thread with the hold waits too, for a caller that will go on."""
    hold = db_lock("a").acquire()
    entered = threading.Event()

    def use(key):
        with hold, db_lock(key, timeout=60):
            return key

    def nest():
        with db_lock("b", timeout=60):
            entered.set()
            assert use_queued.wait(60)
            with pytest.raises(LockDeadlock) as caught:
                db_lock("a", timeout=60).acquire()
            return caught.value

    use_queued = threading.Event()
    with held_elsewhere("c"):
        patient = threads(lambda: use("c"))
        until(lambda: queued() == 1)
        other = threads(nest)
        assert entered.wait(60)
        user = threads(lambda: use("b"))
        until(lambda: queued() == 2)
        use_queued.set()
        other.join(60)
        user.join(60)
        assert not patient.results
    patient.join(60)
    (error,) = other.results
    assert [one.waits_for for one in error.members] == ["b", "a"]
    hold.release()


@SERVERS
@for_each("using", BOTH)
async def test_tasks_that_wait_for_each_other_are_told(using):
    """The error names both tasks."""
    both = asyncio.Barrier(2)

    async def nest(first, second):
        async with db_lock(first, timeout=30, using=using):
            await both.wait()
            async with db_lock(second, timeout=30, using=using):
                return "both"

    tasks = [
        asyncio.create_task(nest(*keys), name=f"nest-{keys}") for keys in ("ab", "ba")
    ]
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    (error,) = (one for one in outcomes if one != "both")
    assert isinstance(error, LockDeadlock)
    names = {member.holder.rpartition(":")[2] for member in error.members}
    assert names == {"nest-ab", "nest-ba"}


@SERVERS
@for_each("using", BOTH)
def test_an_expired_hold_is_no_part_of_a_deadlock(
    workers, threads, until, using, queued
):
    """Its key is about to be granted, although its caller still waits."""
    (other,) = workers(1)
    other.start(jobs.nest, "b", "a", using=using)
    other.hear()

    def lose():
        with db_lock("a", ttl=0.7, renew=False, using=using):
            other.tell()
            until(lambda: queued(using))
            with db_lock("b", timeout=30, using=using):
                pass

    loser = threads(lose)
    assert other.hear() == "both"
    with pytest.raises(LockLost):
        loser.join(30)


@pytest.mark.parametrize("using", ["default", "session"])
@pytest.mark.parametrize("how", ["found", "switched off"])
def test_deadlocks_are_found_unless_detection_is_off(threads, settings, using, how):
    """Otherwise the callers wait for their timeouts.

    A prefix that is known only in the calling threads is no obstacle.
    """
    tenant, both = threading.local(), threading.Barrier(2)
    options = {"prefix": lambda: tenant.name}
    if how == "switched off":
        options["deadlock_after"] = None
    settings.DLOCKS = {
        **settings.DLOCKS,
        using: {**settings.DLOCKS[using], "OPTIONS": options},
    }

    def nest(first, second, timeout):
        tenant.name = "acme:"
        with db_lock(first, using=using):
            both.wait(30)
            try:
                with db_lock(second, timeout=timeout, using=using):
                    return "both"
            except LockDeadlock as error:
                return sorted(member.waits_for for member in error.members)
            except LockTimeout:
                return "late"

    late = 30 if how == "found" else 2
    callers = [threads(lambda: nest(*"ab", 30)), threads(lambda: nest(*"ba", late))]
    for caller in callers:
        caller.join(60)
    outcomes = sorted(str(caller.results[0]) for caller in callers)
    assert outcomes == (["['a', 'b']", "both"] if how == "found" else ["both", "late"])


class Looking(PessimisticBackend):
    """A backend that records when it looks for deadlocks, and its heartbeats."""

    looks: list[float]
    heartbeats: list[int]

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        read = self.inspector.waiting_claims
        self.inspector.waiting_claims = lambda: (
            self.looks.append(time.monotonic()) or read()
        )

    def poll(self, claims, *, heartbeat=True):
        self.heartbeats.append(heartbeat)
        return super().poll(claims, heartbeat=heartbeat)


@pytest.mark.front
def test_an_impatient_process_does_not_look_all_the_time(
    settings, in_queue, threads, until
):
    """With ``deadlock_after=0`` it looks at once, and then ten times a second.

    No statement looks for deadlocks while only callers wait that hold nothing.
    """
    looks, heartbeats = Looking.looks, Looking.heartbeats = [], []
    impatient = {"BACKEND": f"{__name__}.Looking", "OPTIONS": {"deadlock_after": 0.0}}
    settings.DLOCKS = {"default": impatient}

    def nest():
        with db_lock("a"), db_lock("stock:7", timeout=30):
            pass

    with db_lock("stock:7"):
        waiter = threads(lambda: db_lock("stock:7", timeout=30).acquire().release())
        in_queue(1)
        until(lambda: heartbeats.count(True) >= 3)
        assert not looks
        nesting = threads(nest)
        in_queue(2)
        until(lambda: len(looks) >= 5)
        assert looks[4] - looks[0] > 0.3
    waiter.join(30)
    nesting.join(30)


@pytest.fixture
def chain(workers, until):
    """Let a process hold "b", and another one hold "a" and wait for "b"."""
    last, holder = workers(2)
    last.start(jobs.hold, "b", timeout=60)
    last.hear()
    holder.start(jobs.nest, "a", "b")
    holder.hear()
    holder.tell()
    until(LockClaim.objects.filter(version__isnull=True).exists)
    yield
    last.tell()
    assert last.hear() == "released"
    assert holder.hear() == "both"


@pytest.mark.storage
def test_list_locks_shows_who_waits_for_whom(chain):
    """A timeout also says what the holder waits for, although nothing deadlocks."""
    with pytest.raises(LockTimeout, match="held by .*, and has waited for 'b' for"):
        db_lock("a", timeout=0.5).acquire()
    lines = run("list_locks", "--waiting").splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("a "))
    said = r"    its holder \S+:\d+:\S+ has waited for 'b' for .*"
    assert re.fullmatch(said, lines[at + 1])
    assert lines[-1].endswith(", exclusive, holds 'a'")
    first, second = listed("--waiting").values()
    assert first["holders_wait_for"] == ["b"]
    assert second["holders_wait_for"] == []
    assert second["queue"][0]["holds"] == ["a"]


@pytest.mark.front
def test_the_admin_shows_who_waits_for_whom(chain, admin_client):
    a, b, live = (page(admin_client.get(at)) for at in (detail("a"), detail("b"), LIST))
    assert "has waited for" in a
    assert f'href="{detail("b")}"' in a
    assert f'href="{detail("a")}"' in b
    assert 'holds <bdi class="dlocks-key">a</bdi>' in live
    # The owners in the claim's row control the holds.
    for held in LockClaim.objects.get(version__isnull=True).holding.split('"'):
        assert len(held) != 32 or held not in a + b + live


# Locks of sessions.


@SERVERS
@for_each("pair", [(jobs.nest_behind, jobs.nest), (jobs.nest_behind,) * 2])
def test_waiters_behind_others_of_their_process_deadlock(workers, until, pair, queued):
    """Only the first waiter of a key and process waits in the engine's queue."""
    started = workers(2)
    for worker, job, keys in zip(started, pair, ["ab", "ba"], strict=True):
        worker.start(job, *keys, using="session")
    let_them_meet(*started)
    expected = 2 + pair.count(jobs.nest_behind)
    until(lambda: queued("session") == expected)
    began = time.monotonic()
    assert one_is_refused(results(started))
    in_time(time.monotonic() - began, 3)


@SERVERS
@for_each("block", [contextlib.nullcontext, transaction.atomic])
def test_the_newest_of_many_session_locks_deadlocks(
    threads, workers, block, all_released
):
    """The server shows only the beginning of a long statement.

    This also holds in a transaction, whose caller waits for a lease.
    """
    (other,) = workers(1)
    other.start(jobs.nest, "b", "a", using="session")
    other.hear()
    outcomes = []

    def nest():
        lease = db_lock("b", using="session", scope="lease", timeout=30)
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(block())
                for key in (*(f"a long key {number}" for number in range(60)), "a"):
                    stack.enter_context(db_lock(key, using="session"))
                other.tell()
                with lease:
                    outcomes.append("both")
        except LockDeadlock:
            outcomes.append("LockDeadlock")

    thread = threads(nest)
    outcomes.append(other.hear())
    thread.join(30)
    assert one_is_refused(outcomes)
    # After a rollback, leases that were left in the transaction are released.
    all_released()


@SERVERS
@for_each("how", ["released", "killed"])
def test_a_hold_that_has_ended_is_no_part_of_a_deadlock(
    workers, doomed, until, how, queued
):
    """Its caller still waits, but another one that does not wait has the key."""
    waiter, (other,) = doomed(), workers(1)
    other.start(jobs.nest, "b", "a", using="session")
    other.hear()
    waiter.start(jobs.wait_and_release, "a", "b", using="session")
    waiter.hear()
    until(lambda: queued("session", "b") == 1)
    if how == "released":
        waiter.tell()
        waiter.hear()
        held = contextlib.nullcontext()
    else:
        waiter.kill()
        held = db_lock("a", using="session", timeout=5)
    with held:
        other.tell()
        until(lambda: queued("session", "a") == 1)
        wait_for_looks()
        assert queued("session", "a") == 1
    if how == "released":
        waiter.tell()
    assert other.hear() == "both"


@SERVERS
def test_random_deadlocks_of_session_locks_end_without_timeouts(workers):
    """Several threads of several processes queue for the same keys.

    Whether there is a deadlock is left to chance, so the test waits for one.
    """
    started, times, outcomes = workers(2), volume(2), []
    policy = {"threads": 4, "times": times, "keys": "abcd", "using": "session"}
    for number in range(10):
        for seed, worker in enumerate(started, 2 * number):
            worker.start(jobs.nest_at_random, seed, timeout=30, **policy)
        outcomes += [one for worker in started for one in worker.hear(150)]
        if "LockDeadlock" in outcomes:
            break
    assert len(outcomes) == 2 * 4 * times * (number + 1)
    assert set(outcomes) == {"both", "LockDeadlock"}
