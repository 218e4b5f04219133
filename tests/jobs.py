"""The jobs that test processes run, see tests/processes.py."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import random
import signal
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from io import StringIO
from pathlib import Path

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.conf import settings
from django.contrib.auth.models import Group, Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection, connections, transaction
from django.db.models import F

from dlocks import (
    LockBackendError,
    LockError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    resume_hold,
    run_once,
)
from tests.internals import (
    HANDOVER_LEASE,
    Claim,
    LockClaim,
    ResourceLock,
    backends,
    check_tables,
    history,
    keeper,
    operations,
    waiters_of,
)
from tests.models import Counter
from tests.processes import go_far_away
from tests.servers import die_with_parent
from tests.timing import in_time


def hold(pipe, key, **policy):
    """Acquire, send the token, and hold until notified.

    The key may have a mode, as in ``lock_of()``.
    """
    with lock_of(key, **policy) as held:
        pipe.pause(held.token)
    return "released"


def token_of(lock):
    """Acquire and release, and return the token."""
    with lock as held:
        return held.token


def hold_in_transaction(pipe, key, *, roll_back=False, **policy):
    with transaction.atomic(), db_lock(key, **policy) as held:
        pipe.pause(held.token)
        transaction.set_rollback(roll_back)
    return "ended"


def come_at_once(pipe, key, threads, **policy):
    """Let threads acquire and release a key at the same moment.

    They start when the test sends a message. Return the number of threads that
    acquired.
    """
    gate, served = threading.Barrier(threads + 1), []

    def take():
        gate.wait(60)
        try:
            # The first lease of a waiter is short, and may expire in such a crowd.
            with suppress(LockLost), db_lock(key, **policy) as held:
                served.append(held.token)
        finally:
            connections.close_all()

    with in_threads(take for _ in range(threads)):
        pipe.pause("here")
        gate.wait(60)
    return len(served)


@contextmanager
def in_threads(functions):
    """Run each function in a thread. The block ends after them, with their error."""
    functions = [*functions]
    with ThreadPoolExecutor(len(functions)) as pool:
        started = [pool.submit(function) for function in functions]
        yield
    for one in started:
        one.result()


def lock_row(pipe, key, using="default"):
    """Lock a key's row with a separate statement until notified."""
    with transaction.atomic(using=using):
        ResourceLock.objects.using(using).select_for_update().get(key_resource=key)
        pipe.pause("locked")
    return "unlocked"


def lock_claim(pipe, **which):
    """Lock the first of these claims with a separate statement until notified.

    A claim with a version is a shared hold, one without is in the queue.
    """
    with transaction.atomic():
        first = LockClaim.objects.filter(**which).order_by("pk").first()
        LockClaim.objects.select_for_update().get(pk=first.pk)
        pipe.pause("locked")
    return "unlocked"


def try_once(pipe, key, **policy):
    found = db_lock(key, **policy).try_acquire()
    if found is None:
        return None
    found.release()
    return found.token


def outcome(step, *args):
    """Return the result of a step, or the name of its error of dlocks."""
    try:
        return step(*args)
    except LockError as error:
        return type(error).__name__


def acquire(pipe, *keys, **policy):
    """Acquire and never release. Return the token, or the name of the error.

    Of several keys, return the token of each.
    """
    held = outcome(db_lock(*keys, **policy).acquire)
    if isinstance(held, str):
        return held
    _kept.append(held)
    return held.token if len(keys) == 1 else held.tokens


def change_password(pipe, password):
    """Change the password in DATABASES, as a project does when it is rotated."""
    settings.DATABASES["default"]["PASSWORD"] = password


def forget(pipe):
    for held in _kept:
        held.release()
    _kept.clear()


_kept = []


def count(pipe, path, key, *, times, scope, **policy):
    """Increment an unguarded counter in a file under the lock.

    Return the tokens in order. The counter is read and written in two steps, so it
    loses updates if the lock fails.
    """
    tokens = []
    path = Path(path)
    for number in range(times):
        got = time.monotonic()
        try:
            with (
                transaction.atomic() if scope == "transaction" else nullcontext(),
                db_lock(key, **policy) as held,
            ):
                got = time.monotonic()
                value, last = map(int, path.read_text().split())
                assert held.token > last, f"token {held.token} after {last}"
                if number % 50 == 0:
                    time.sleep(0)
                path.write_text(f"{value + 1} {held.token}")
                tokens.append(held.token)
        except LockLost:
            # LockLost is correct if the machine stalled, and no failure of the
            # lock.
            in_time(time.monotonic() - got, 1.0)
            raise
    return tokens


def write_again_and_again(pipe, key):
    """Write the row of a key in very short transactions until notified.

    Return the number of writes.
    """
    if connection.vendor == "mysql":
        with connection.cursor() as cursor:
            cursor.execute("SET innodb_lock_wait_timeout = 1")
    pipe.say("writing")
    done = 0
    while not pipe.poll():
        with suppress(OperationalError):
            done += ResourceLock.objects.filter(pk=key).update(owner_ip="192.0.2.7")
            done += ResourceLock.objects.filter(pk=key).update(owner_ip="192.0.2.8")
    pipe.hear()
    connection.close()
    return done


def ask_again_and_again(pipe, key, *, times):
    """Request a key repeatedly in one transaction.

    The transaction stays open until the test sends a message. Return how many requests
    were granted.
    """
    claim = Claim(key=key, ttl=30.0, scope="transaction")
    with transaction.atomic():
        granted = sum(
            backends["default"].acquire(claim) is not None for _ in range(times)
        )
        pipe.pause("asked")
    return granted


def write_and_ask(pipe, key, **policy):
    """Write a row in a transaction, then try to acquire a key there.

    Return the reason why the lock was refused, or the name of an error of dlocks, and
    the number of rows written.
    """
    refusal = ""
    with transaction.atomic():
        Group.objects.create(name=key)
        try:
            db_lock(key, **policy).acquire().release()
        except LockError as error:
            refusal = type(error).__name__
        except RuntimeError as error:
            refusal = str(error)
    return refusal, Group.objects.filter(name=key).count()


def what_the_check_says(pipe):
    return [
        (message.id, message.msg) for message in check_tables(databases=["default"])
    ]


def migrate_dlocks(pipe):
    """Create the tables of dlocks and of permissions."""
    call_command("migrate", "dlocks", verbosity=0)
    # All migrations of Django would take longer than the tests.
    with connection.schema_editor() as editor:
        for model in ContentType, Permission, Group:
            editor.create_model(model)


def migrate_databases(pipe, *names):
    for name in names:
        call_command("migrate", "dlocks", database=name, verbosity=0)


def hold_again_and_again(pipe, path, key, **policy):
    """Acquire and release repeatedly until notified, and log each hold.

    The log has the times at which a hold was first and last known to be held, on the
    clock that all processes share. Return how many attempts failed.
    """
    troubles = 0
    with Path(path).open("a") as notes:
        while not pipe.poll():
            try:
                with db_lock(key, **policy) as hold:
                    got = until = time.monotonic()
                    if not hold.held:
                        # The process was stopped after the grant until the lease had
                        # expired.
                        continue
                    stop = got + random.uniform(0, 0.03)
                    while until < stop and hold.held:
                        time.sleep(0.002)
                        now = time.monotonic()
                        if hold.held:
                            until = now
                    notes.write(f"{got} {until} {hold.token} {os.getpid()}\n")
                    notes.flush()
            except LockError:
                troubles += 1
                time.sleep(0.02)
    pipe.hear()
    return troubles


def state(pipe, key):
    """Return the row as it is committed now."""
    return (
        ResourceLock.objects.by_clock()
        .filter(pk=key)
        .values("status", "state", "hold_count", "version")
        .first()
    )


def hold_timed(pipe, key, **policy):
    """Hold, and send the times of the request and the reply.

    Both are on the clock that all processes share.
    """
    before = time.monotonic()
    held = db_lock(key, **policy).acquire()
    pipe.pause((before, time.monotonic(), held.token))
    held.release()


def hold_here_and_elsewhere(pipe, key, ttl, **policy):
    """Hold a key on the server and another one in memory.

    Send the time at which the loss of the first is reported. Return the state of the
    other.
    """
    told = queue.SimpleQueue()
    other = db_lock("elsewhere", using="memory", ttl=3.0).acquire()
    held = db_lock(
        key, ttl=ttl, on_lost=lambda hold: told.put(time.monotonic()), **policy
    ).acquire()
    pipe.say(held.token)
    pipe.say(told.get(timeout=30))
    other.check()
    return "held"


def hold_until_lost(pipe, key, **policy):
    """Hold, send the token, and return when the hold was last held.

    The time is on the clock that all processes share.
    """
    held = db_lock(key, **policy).acquire()
    # Before the message, after which the test may stop this process.
    moment = until = time.monotonic()
    pipe.say(held.token)
    while held.held:
        until = moment
        time.sleep(0.002)
        moment = time.monotonic()
    return until


def wait_quietly(pipe, key, **policy):
    """Acquire. Return the time, on the clock that processes share, and the token."""
    held = db_lock(key, **policy).acquire()
    granted = time.monotonic()
    with suppress(LockLost):
        # The lease may have been short and have expired.
        held.release()
    return granted, held.token


def checks(pipe):
    """Return "held", or the name of the error, for each hold of ``acquire()``."""
    return [outcome(held.check) or "held" for held in _kept]


def check(pipe):
    """Return "held", or the name of the first error."""
    return next((said for said in checks(pipe) if said != "held"), "held")


def release_all(pipe):
    answers = [outcome(held.release) or "released" for held in _kept]
    _kept.clear()
    return answers


def count_by_threads(pipe, paths, *, threads, times, **policy):
    """Increment unguarded counters by threads with different timeouts.

    Return how much was added to each.
    """
    done = [0] * len(paths)
    mutex = threading.Lock()

    def add(number):
        draw = random.Random(number)
        for _ in range(times):
            chosen = draw.randrange(len(paths))
            timeout = draw.choice([None, None, None, 30, 0.02])
            try:
                with db_lock(paths[chosen], timeout=timeout, **policy):
                    path = Path(paths[chosen])
                    value = int(path.read_text())
                    time.sleep(draw.choice([0, 0.0005]))
                    path.write_text(str(value + 1))
            except LockTimeout:
                continue
            with mutex:
                done[chosen] += 1

    with in_threads(partial(add, number) for number in range(threads)):
        pass
    return done


def count_through_trouble(pipe, path, key, *, times, **policy):
    """Increment the counter, and go on when the server is unavailable.

    Return the number of increments and of failed attempts.
    """
    path, done, troubles = Path(path), 0, 0
    for number in range(times):
        if number == times // 3:
            pipe.say("a third")
        if number == 2 * times // 3:
            pipe.say("two thirds")
        try:
            with db_lock(key, **policy) as held:
                value, last = map(int, path.read_text().split())
                assert held.token > last, f"token {held.token} after {last}"
                path.write_text(f"{value + 1} {held.token}")
                done += 1
        except (LockBackendError, LockTimeout):
            troubles += 1
            time.sleep(0.05)
    return done, troubles


def other_sessions(pipe=None):
    """Return the server's ids of all sessions on this database but our own."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND"
            " datname = current_database() AND backend_type = 'client backend'"
            if connection.vendor == "postgresql"
            else "SELECT id FROM information_schema.processlist WHERE"
            " id <> CONNECTION_ID() AND db = DATABASE()"
        )
        return {session for (session,) in cursor.fetchall()}


def kill_other_sessions(pipe, but=()):
    """Close other sessions from the server's side. Return their number."""
    sessions = other_sessions() - set(but)
    is_postgresql = connection.vendor == "postgresql"
    with connection.cursor() as cursor:
        for session in sessions:
            try:
                cursor.execute(
                    f"SELECT pg_terminate_backend({session})"
                    if is_postgresql
                    else f"KILL {session}"
                )
            except OperationalError as error:
                # The session has just ended by itself.
                if error.args[0] != 1094:
                    raise
    return len(sessions)


def wall_clock(pipe):
    return time.time()


def hold_and_time_releases(pipe, key, *, seconds, **policy):
    """Acquire a lease repeatedly. Return the longest release in seconds."""
    end, longest = time.monotonic() + seconds, 0.0
    while time.monotonic() < end:
        with db_lock(key, timeout=None, **policy):
            started = time.monotonic()
        longest = max(longest, time.monotonic() - started)
    return longest


def wait_in_transactions(pipe, key, *, seconds, **policy):
    """Wait for the key in transactions that go on after a failure to acquire it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with transaction.atomic():
            try:
                with db_lock(key, **policy):
                    pass
            except LockError:
                time.sleep(2.5)


def nest(pipe, first, second, *, in_transaction=False, **policy):
    """Acquire a key, and another one inside, which may end in a deadlock.

    A key is a name, or a name with a mode: "read", "write", or a number of permits. Say
    "first" when the first one is held, and go on when told. Return "both", or the name
    of the error with its message.
    """
    using = policy.get("using", "default")
    with transaction.atomic(using) if in_transaction else nullcontext():
        try:
            with lock_of(first, timeout=60, **policy):
                pipe.pause("first")
                with lock_of(second, **{"timeout": 60, **policy}):
                    return "both"
        except LockTimeout as error:
            return f"{type(error).__name__}: {error}"


def nest_behind(pipe, first, second, **policy):
    """Nest as ``nest()`` does, while a thread already waits for the second key."""
    thread = threading.Thread(
        target=token_of, args=[lock_of(second, timeout=60, **policy)]
    )

    class Later:
        def pause(self, place):
            pipe.pause(place)
            backend = backends[policy["using"]]
            before = backend.waiting(second)
            thread.start()
            while backend.waiting(second) == before:
                time.sleep(0.01)

    outcome = nest(Later(), first, second, **policy)
    thread.join(60)
    return outcome


def nest_at_random(pipe, seed, *, threads, times, keys, **policy):
    """Let threads nest random pairs of keys, and return the sorted outcomes."""
    outcomes = []

    def work(number):
        choice = random.Random(seed * 100 + number)
        for _ in range(times):
            first, second = choice.sample(keys, 2)
            try:
                with db_lock(first, **policy):
                    time.sleep(choice.random() / 50)
                    with db_lock(second, **policy):
                        outcomes.append("both")
            except LockTimeout as error:
                outcomes.append(type(error).__name__)

    with in_threads(partial(work, one) for one in range(threads)):
        pass
    return outcomes


def wait_and_release(pipe, first, second, **policy):
    """Release the first key while its caller waits for the second, and take it again.

    A thread waits for the second key. The main thread then holds the first one.
    """
    held, ready = [], threading.Event()

    def wait():
        held.append(lock_of(first, **policy).acquire())
        ready.set()
        token_of(lock_of(second, timeout=60, **policy))

    with in_threads([wait]):
        ready.wait(60)
        pipe.pause("waits")
        held[0].release()
        with lock_of(first, **policy):
            pipe.pause("taken again")
    return "released"


def lock_of(key, **policy):
    """Return the lock of a key, given by its name or by name and mode."""
    name, mode = (key, None) if isinstance(key, str) else key
    if mode is None:
        return db_lock(name, **policy)
    if isinstance(mode, int):
        return db_semaphore(name, mode, **policy)
    return getattr(db_rwlock(name, **policy), mode)()


def run_job(pipe, key, *, wait=False, **policy):
    """Start a job that every node starts. Return whether it ran here."""

    @run_once(key, **policy)
    def job():
        if wait:
            pipe.pause("running")
        return True

    return bool(job())


def resume(pipe, text):
    """Resume a hold, send its token, and release it when notified."""
    with resume_hold(text) as held:
        pipe.pause(held.token)
        held.check()
    return "released"


def try_to_resume(pipe, text):
    return outcome(lambda: token_of(resume_hold(text)))


def detach(pipe, key, within=None, **policy):
    return db_lock(key, **policy).acquire().detach(within=within)


def write_under(pipe, key, name, value, *, guard, stop_inside=False, **policy):
    """Acquire, wait for a message, and write the row.

    The write is in ``hold.atomic()``, or in a transaction that does not check the lock.
    """
    hold = db_lock(key, **policy).acquire()
    pipe.say(hold.token)
    try:
        if not stop_inside:
            pipe.hear()
        with hold.atomic() if guard else transaction.atomic():
            Counter.objects.filter(name=name).update(value=value)
            if stop_inside:
                pipe.pause("inside")
    except LockLost as error:
        return "LockLost", str(error)
    try:
        hold.release()
    except LockLost:
        return "written, and lost", ""
    return "written", ""


@contextmanager
def isolated(level, using="default"):
    """Run this thread's transactions at an isolation level."""
    connection = connections[using]
    scope = (
        "SESSION CHARACTERISTICS AS" if connection.vendor == "postgresql" else "SESSION"
    )
    with connection.cursor() as cursor:
        cursor.execute(f"SET {scope} TRANSACTION ISOLATION LEVEL {level}")
    try:
        yield
    finally:
        if connection.vendor == "postgresql" and connection.is_usable():
            # A pool would hand this session to the next caller.
            connection.cursor().execute("RESET default_transaction_isolation")
        connection.close()


def share_under_guard(pipe, key, *, level="READ COMMITTED", **policy):
    """Acquire a read lock, and stay in ``hold.atomic()`` until notified."""
    with db_rwlock(key, **policy).read() as hold, isolated(level), hold.atomic():
        pipe.pause(hold.token)
    return "ended"


def keep_share(pipe, key, **policy):
    """Guard a transaction with a read lock, and keep it after the commit."""
    with db_rwlock(key, **policy).read() as hold:
        with hold.atomic():
            pipe.pause(hold.token)
        pipe.pause("committed")
        hold.check()
    return "ended"


def use_keys(pipe, *keys, timeout):
    """Write, read and queue for each key. Return the seconds of each step."""
    took = {}

    def time_out(key):
        try:
            with suppress(LockTimeout):
                db_lock(key, timeout=0.05).acquire()
        finally:
            connections.close_all()

    for key in keys:
        began = time.monotonic()
        with db_lock(key, timeout=timeout):
            took[f"write {key}"] = time.monotonic() - began
            queued = time.monotonic()
            with in_threads([partial(time_out, key)]):
                pass
            took[f"queue for {key}"] = time.monotonic() - queued
        began = time.monotonic()
        with db_rwlock(key, timeout=timeout).read():
            took[f"read {key}"] = time.monotonic() - began
    return took


def hang_in_queue(pipe, key, tasks, **policy):
    """Let tasks wait for a key in an event loop that is blocked until notified.

    Return the outcome of each task.
    """

    async def wait():
        async with db_lock(key, **policy):
            return "had it"

    async def hang():
        waiting = [asyncio.create_task(wait()) for _ in range(tasks)]
        while await LockClaim.objects.filter(key_resource=key).acount() < tasks:
            await asyncio.sleep(0.01)
        pipe.pause("waiting")
        return [
            type(one).__name__
            for one in await asyncio.gather(*waiting, return_exceptions=True)
        ]

    return asyncio.run(hang())


def write_by_second_alias(pipe, key, *, level="READ COMMITTED", **policy):
    """Write in ``hold.atomic()`` through another alias of the same database.

    Return the reasons why other aliases are refused.
    """
    usual = connections.databases["default"]
    connections.databases["second"] = {**usual}
    connections.databases["elsewhere"] = {**usual, "NAME": "elsewhere"}
    try:
        with db_lock(key, **policy) as held:
            with isolated(level, "second"), held.atomic(using="second"):
                Counter.objects.using("second").update(value=3)
                pipe.pause("inside")
                # The row is locked by another session, which belongs to the hold.
                held.check()
                with db_lock(key, **policy) as again:
                    assert again.token == held.token
            held.check()
            refused = []
            with transaction.atomic(), db_lock("of the transaction") as of_it:
                for hold, using in ((held, "elsewhere"), (of_it, "second")):
                    try:
                        with hold.atomic(using=using):
                            return "not refused"
                    except RuntimeError as error:
                        refused.append(str(error))
            return refused
    finally:
        connections["second"].close()


def leave_by_second_alias(pipe, *keys, **policy):
    """Leave a lock block within a transaction of another alias.

    That transaction keeps the keys. It ends when the test sends a message.
    """
    connections.databases["second"] = {**connections.databases["default"]}
    try:
        with transaction.atomic(using="second"):
            with db_lock(*keys, **policy) as held, held.atomic(using="second"):
                pass
            pipe.pause("left")
        return "ended"
    finally:
        connections["second"].close()


def crowd(pipe, number, directory, key, **policy):
    """Fork processes that queue for a key repeatedly and log the results.

    About half of them behave as if they were on other hosts. The message "more" adds a
    process. The message "end" waits until every process has been served once more.
    Return the processes that did not end.
    """
    directory, ended = Path(directory), {}
    connections.close_all()

    def one():
        pid = os.fork()
        if pid == 0:
            die_with_parent(signal.SIGKILL)
            if os.getpid() % 2:
                go_far_away()
            status = 1
            try:
                _join_queue(directory, key, policy)
                status = 0
            except BaseException:
                (directory / f"failed-{os.getpid()}").write_text(traceback.format_exc())
            finally:
                os._exit(status)
        return pid

    pids = {one() for _ in range(number)}
    pipe.say(sorted(pids))
    while pipe.hear() == "more":
        pid = one()
        pids.add(pid)
        pipe.say(pid)
    (directory / "end").touch()
    deadline = time.monotonic() + 100
    while pids - set(ended):
        for pid in pids - set(ended):
            if os.waitpid(pid, os.WNOHANG)[0]:
                ended[pid] = True
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    lost = pids - set(ended)
    for pid in lost:
        os.kill(pid, signal.SIGKILL)
    return sorted(lost)


def _join_queue(directory, key, policy):
    note = partial(
        _note, os.open(directory / "log", os.O_APPEND | os.O_WRONLY | os.O_CREAT)
    )
    counter = os.open(directory / "counter", os.O_RDWR)
    lock, last = db_lock(key, timeout=None, **policy), False
    while not last:
        # Acquire once more after the end, to show that every process is served.
        last = (directory / "end").exists()
        asked = time.monotonic()
        try:
            hold = lock.acquire()
        except LockBackendError as error:
            note("refused", asked, time.monotonic(), str(error))
            time.sleep(0.05)
            last = False
            continue
        note("granted", asked, time.monotonic(), hold.token)
        value = int(os.pread(counter, 20, 0))
        time.sleep(0.02)
        # A process that may have lost the lock does not touch the counter.
        counted = hold.held
        if counted:
            os.pwrite(counter, b"%020d" % (value + 1), 0)
        note(
            "left",
            min(hold._parts[0].lease.deadline, time.monotonic()),
            hold.token,
            counted,
        )
        try:
            hold.release()
        except LockError as error:
            note("trouble", time.monotonic(), type(error).__name__, str(error))
    connections.close_all()


def _note(log, *facts):
    os.write(log, (json.dumps([os.getpid(), *facts]) + "\n").encode())


def line(pipe, key):
    """Return the processes queued for a key in order, and its holder."""

    def process(holder):
        return int(holder.split(":")[1]) if holder else 0

    claims = (
        LockClaim.objects.by_clock()
        .filter(key_resource=key, version=None, seconds_left__gt=0)
        .order_by("id")
    )
    lock = (
        ResourceLock.objects.by_clock()
        .filter(pk=key, status="P", seconds_left__gt=0)
        .first()
    )
    return [process(claim.holder) for claim in claims], (
        process(lock.holder) if lock else 0
    )


def threads(pipe):
    return [thread.name for thread in threading.enumerate()]


def waiters(pipe, key):
    """Return the number of claims, and the number that the lock row has counted."""
    rows = ResourceLock.objects.filter(pk=key).values_list("waiters", "shares")
    return LockClaim.objects.filter(key_resource=key).count(), sum(
        sum(row) for row in rows
    )


def write_channels(pipe, channel):
    LockClaim.objects.update(channel=channel)


def read_or_write(pipe, path, key, *, times, write, **policy):
    """Add two to the counter in two steps, or check that it is even."""
    path = Path(path)
    for _ in range(times):
        with db_lock(key, shared=not write, timeout=None, **policy):
            value = int(path.read_text())
            assert value % 2 == 0, "a writer is active"
            if write:
                path.write_text(str(value + 1))
                time.sleep(0.001)
                path.write_text(str(value + 2))


def count_several(pipe, directory, keys, *, seed, seconds, scope, **policy):
    """Increment the counters of several keys at a time, in any order.

    Return the number of increments of each.
    """
    chance = random.Random(seed)
    added = dict.fromkeys(keys, 0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        some = chance.sample(keys, chance.randint(2, min(4, len(keys))))
        with (
            transaction.atomic() if scope == "transaction" else nullcontext(),
            db_lock(*some, **policy) as held,
        ):
            for key in some:
                path = Path(directory, key)
                value, last = map(int, path.read_text().split())
                assert held.tokens[key] > last, (
                    f"token {held.tokens[key]} after {last} of {key}"
                )
                path.write_text(f"{value + 1} {held.tokens[key]}")
                added[key] += 1
    return added


def acquire_after_another(pipe, key, **policy):
    """Wait for a held key, and report when the claim has joined the queue.

    Keep the key until its lease has been renewed for the full ttl.
    """
    backend = backends[policy["using"]]

    def look():
        while not backend.waiting(key):
            time.sleep(0.01)
        connections.close_all()
        pipe.say("in line")

    threading.Thread(target=look).start()
    token = acquire(pipe, key, **policy)
    # The first lease after a handover is short.
    while _kept[-1].remaining < HANDOVER_LEASE:
        _kept[-1].check()
        time.sleep(0.01)
    return token


def clear(pipe, key, token):
    """Clear a stale hold, as an operator does."""
    return backends["default"].clear(key, token)


def run_sql(pipe, sql):
    with connections["default"].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else []


def run_command(pipe, *words):
    """Run a command of dlocks. Return its output, or the message of its error."""
    out = StringIO()
    try:
        call_command(*words, stdout=out)
    except CommandError as error:
        return str(error)
    return out.getvalue()


def hold_and_fork(pipe, key, **policy):
    """Hold a lock and fork a child that keeps running.

    Send the child's pid and the state of the lock in the child.
    """
    held = db_lock(key, **policy).acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        found = db_lock(key, **policy).try_acquire()
        os.write(writing, f"{found is None} {held.held}".encode())
        while True:
            time.sleep(1)
    free, has = os.read(reading, 100).decode().split()
    pipe.pause((child, None if free == "True" else "granted", has == "True"))


def take_turns(pipe, key, *, times, **policy):
    """Acquire the key a number of times, and return the number of polls."""
    backend, looked = backends["default"], []
    look = backend.poll
    # An earlier job may have started polling.
    waiters_of(backend)._schedule._frequent_until = 0.0

    def counting(claims, *, heartbeat=True):
        looked.append(claims)
        return look(claims, heartbeat=heartbeat)

    backend.poll = counting
    try:
        for _ in range(times):
            with db_lock(key, timeout=60, **policy):
                time.sleep(0.001)
    finally:
        del backend.poll
    return len(looked)


def whole_cycle(pipe, using):
    """Use locks in all the ways an application does. Return the steps done."""
    done, own = [], f"least:{os.getpid()}"

    def wait():
        try:
            with db_lock(f"{own}:a", using=using, timeout=5):
                done.append("waited")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        with db_lock(f"{own}:a", using=using) as held:
            waiter = pool.submit(wait)
            while not (waiter.done() or held.queue_length()):
                time.sleep(0.005)
            with db_lock(f"{own}:a", using=using):
                held.renew()
                held.check()
        waiter.result()
    with transaction.atomic(), db_lock(f"{own}:b", using=using):
        done.append("transaction")
    with db_lock(f"{own}:c", f"{own}:d", using=using):
        done.append("several")
    with (
        db_semaphore(f"{own}:e", 2, using=using) as share,
        db_rwlock(f"{own}:f", using=using).read(),
    ):
        share.renew()
        done.append("shared")
    with db_lock(f"{own}:g", using=using) as held, held.atomic():
        done.append("guarded")
    resume_hold(db_lock(f"{own}:h", using=using).acquire().detach()).release()
    history.flush()
    return done


def rights(pipe, name):
    """Run an operation of maintenance or of the admin.

    Return its result or its error.
    """
    backend = backends["default"]
    end = partial(operations.end, backend, reason="tests", by="tests", via="tests")
    calls = {
        "purge": lambda: sum(backend.maintenance.purge(0)),
        "reap": lambda: sum(backend.maintenance.reap()),
        "forget": lambda: sum(backend.records.delete_older_than(0)),
        "look": lambda: sum(
            len(list(operations.with_claims(backend, page)))
            for page in operations.pages(backend, ["held"])
        ),
        "clear": lambda: end("lock", "held", 1000).pk,
        "end_share": lambda: end("share", "shared", 1001).version,
    }
    try:
        return calls[name]()
    except LockBackendError as error:
        return f"LockBackendError: {error}"


def write_after_reads(pipe, key):
    """Write in a transaction, also after each read of a key that fails.

    Return the errors.
    """
    lock, errors = db_lock(key), []
    show = partial(call_command, "list_locks", stdout=StringIO())
    with transaction.atomic():
        Counter.objects.update(value=F("value") + 1)
        for read in (lock.holder, lock.holders, lock.waiters, lock.locked, show):
            try:
                read()
            except (LockBackendError, CommandError) as error:
                errors.append(str(error))
            Counter.objects.update(value=F("value") + 1)
    return errors


def lease_in_a_transaction(pipe, key):
    """Acquire a lease beside a transaction that uses this thread's connection.

    Return the number of rows that show it as held.
    """
    with transaction.atomic():
        with db_lock(key, scope="lease"):
            return ResourceLock.objects.filter(pk=key, status="P").count()


def outwait_a_row(pipe, key, locked, **policy):
    """Lock a key in a transaction, then wait for a row until the server gives up.

    Return the server's error number, and the results of ``check()`` and ``release()``
    after it.
    """
    outcomes = []
    with transaction.atomic():
        hold = db_lock(key, scope="transaction", **policy).acquire()
        try:
            ResourceLock.objects.select_for_update().get(key_resource=locked)
        except OperationalError as error:
            outcomes.append(error.args[0])
        outcomes += [outcome(hold.check), outcome(hold.release)]
        transaction.set_rollback(True)
    return outcomes


class Turns:
    """Turns under a busy lock, like requests that close their connections."""

    def __init__(
        self,
        kind="lock",
        *,
        using="default",
        query_before="never",
        query=False,
        close=False,
    ):
        self.lock = partial(LOCKS_IN_TURN[kind], using=using, timeout=20)
        # How often the database is used before the lock is acquired, whether it is used
        # under the lock, and whether connections are closed there.
        self.query_before, self.query, self.close = query_before, query, close
        self.holders = 0
        self.done = 0
        self.errors = []

    def take(self, number=0):
        try:
            if self.asks_before(number):
                self.ask()
            with self.lock():
                self.enter()
                if self.close:
                    connections.close_all()
                if self.query:
                    self.ask()
                time.sleep(0.02)
                self.leave()
        except Exception as error:
            self.errors.append(repr(error))
        finally:
            connections.close_all()

    async def atake(self, number=0):
        async with ThreadSensitiveContext():
            try:
                if self.asks_before(number):
                    await sync_to_async(self.ask)()
                async with self.lock():
                    self.enter()
                    if self.query:
                        await sync_to_async(self.ask)()
                    await asyncio.sleep(0.02)
                    self.leave()
            except Exception as error:
                self.errors.append(repr(error))
            finally:
                await sync_to_async(connections.close_all)()

    def asks_before(self, number):
        return self.query_before == "always" or (
            self.query_before == "sometimes" and number % 2 == 0
        )

    def ask(self):
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1")

    def enter(self):
        self.holders += 1
        if self.holders > 1:
            self.errors.append("two holders at a time")

    def leave(self):
        self.holders -= 1
        self.done += 1


LOCKS_IN_TURN = {
    "lock": partial(db_lock, "stock:7"),
    "unfair": partial(db_lock, "stock:7", fair=False),
    "several": partial(db_lock, "stock:7", "stock:8"),
    "semaphore": partial(db_semaphore, "stock:7", 1),
}


def take_turns_in_threads(pipe, threads, number, *args, **kwargs):
    """Take turns in threads.

    Return the number of turns, their duration in seconds, and the errors.
    """
    turns, began = Turns(*args, **kwargs), time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(turns.take, range(number)))
    return turns.done, time.monotonic() - began, turns.errors


def take_turns_in_coroutines(pipe, tasks, number, *args, context=True, **kwargs):
    """Take turns in tasks of an event loop.

    Each task has its own context, as each request of Django's ASGI handler has. Without
    ``context``, it runs sync code with ``thread_sensitive=False``.
    """
    turns, began = Turns(*args, **kwargs), time.monotonic()

    async def run():
        executor = ThreadPoolExecutor(tasks)
        bound = asyncio.Semaphore(tasks)

        async def one(place):
            async with bound:
                if context:
                    await turns.atake(place)
                else:
                    await sync_to_async(
                        turns.take, thread_sensitive=False, executor=executor
                    )(place)

        await asyncio.gather(*map(one, range(number)))
        executor.shutdown()

    asyncio.run(run())
    return turns.done, time.monotonic() - began, turns.errors


def release_while_the_pool_is_exhausted(pipe, key, waiters):
    """Release a key without a connection while the pool is exhausted.

    All connections of the pool belong to transactions that wait for the key. Return the
    seconds that the release took, and the number of grants.
    """
    granted = queue.SimpleQueue()

    def wait():
        with transaction.atomic(), connections["default"].cursor() as cursor:
            cursor.execute("SELECT 1")
            with db_lock(key, scope="lease", release_at="exit", timeout=20):
                granted.put(True)
        connections.close_all()

    hold = db_lock(key).acquire()
    connections.close_all()
    with in_threads(wait for _ in range(waiters)):
        while (
            backends["default"].runtime.run(partial(backends["default"].waiting, key))
            < waiters
        ):
            time.sleep(0.005)
        began = time.monotonic()
        hold.check()
        hold.renew()
        hold.release()
        seconds = time.monotonic() - began
    return seconds, granted.qsize()


def hold_at_exit(pipe, key):
    """Acquire, close the connection, and keep the hold until the process ends."""
    _kept.append(db_lock(key).acquire())
    connections.close_all()
    keeper.exit()


def be_patient(pipe, seconds):
    """Set the seconds after which unreachable servers are reported to waiters."""
    from tests.internals import waiters

    waiters.CONNECT_TIMEOUT = seconds
