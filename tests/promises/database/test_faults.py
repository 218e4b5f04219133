"""Faults of processes, servers, connections and clocks."""

from __future__ import annotations

import itertools
import json
import threading
import time
from functools import partial

import pytest
from django.db import connection

from dlocks import db_lock
from tests import jobs
from tests.clocks import faketime, step
from tests.for_each import ROWS
from tests.processes import Worker
from tests.proxy import Proxy
from tests.servers import SERVERS
from tests.settings import ENGINE, PORT
from tests.timing import eventually, in_time
from tests.volume import volume

# MySQL has the driver of MariaDB. What differs is how a statement finds its own grant,
# and the locks of rows.
pytestmark = [
    pytest.mark.engine("postgresql", "mariadb"),
    pytest.mark.django_db(transaction=True),
]


ALL = pytest.mark.engine("postgresql", "mariadb", "mysql")


@pytest.fixture(scope="module")
def server(django_db_setup):
    """A server for this module only, which the tests can stop and crash."""
    with SERVERS[ENGINE]() as started:
        started.execute("CREATE DATABASE faults")
        worker = Worker(**environment(started))
        worker.call(jobs.migrate_dlocks)
        worker.close()
        yield started


def environment(server, port=None):
    return {
        **server.environment,
        "DLOCKS_TEST_NAME": "faults",
        "DLOCKS_TEST_PORT": str(port or server.port),
    }


@pytest.fixture
def on_server(server, doomed):
    """Return a function that starts a process on that server."""
    yield lambda port=None: doomed(**environment(server, port))
    if server.process is None:
        server.start()


# Processes.


@ALL
def test_a_killed_holder_keeps_its_key_for_its_ttl_and_no_longer(
    doomed, workers, in_queue
):
    """A waiter is granted the key of a killed process after the ttl."""
    victim, waiters, before, first = doomed(), workers(3), {}, {}
    for using in ROWS:
        before[using] = time.monotonic()
        first[using] = victim.call(jobs.acquire, using, using=using, ttl=1.0)
    for using, waiter in zip(ROWS, waiters, strict=True):
        waiter.start(jobs.wait_quietly, using, using=using, timeout=30)
        in_queue(1, using)
    victim.kill()
    for using, waiter in zip(ROWS, waiters, strict=True):
        granted, token = waiter.hear()
        assert token > first[using]
        assert granted - before[using] >= 1.0
        # The victim may have renewed its lease once before the kill.
        in_time(granted - victim.killed_at, 1.0 + 1.0)


@ALL
def test_a_kill_inside_a_transaction_frees_the_key_at_once(doomed, worker, in_queue):
    """The end of the session ends the transaction and its lock."""
    for using in ROWS:
        victim = doomed()
        victim.call(jobs.hold_in_transaction, using, using=using)
        worker.start(jobs.wait_quietly, using, using=using, timeout=30)
        in_queue(1, using)
        victim.kill()
        in_time(worker.hear()[0] - victim.killed_at, 2.0)


# The server.


@pytest.mark.engine("mariadb")
def test_innodb_rollback_on_timeout_is_refused_in_transactions(server, on_server):
    """The error gives the reason, and nothing is rolled back.

    A lease works as on any other server.
    """
    server.options = ("--innodb-rollback-on-timeout=ON",)
    server.restart()
    try:
        worker, other = on_server(), on_server()
        for using in ROWS:
            kept, key = f"kept {using}", f"new {using}"
            # The "default" backend keeps the row after the release.
            other.call(jobs.acquire, kept)
            with other.doing(jobs.lock_row, kept):
                for asked in kept, key:
                    asks = jobs.write_and_ask, asked
                    refusal, written = worker.call(*asks, using=using)
                    assert "innodb_rollback_on_timeout=ON" in refusal
                    assert "scope='lease'" in refusal
                    assert written == 1
            policy = {"using": using, "scope": "lease"}
            leased = worker.call(jobs.write_and_ask, f"lease {using}", **policy)
            assert leased == ("", 1)
        ((id, warning),) = worker.call(jobs.what_the_check_says)
        assert id == "dlocks.W004"
        assert "innodb_rollback_on_timeout=ON" in warning
    finally:
        server.options = ()
        server.restart()


@pytest.mark.engine("mariadb")
def test_locks_work_with_innodb_snapshot_isolation(doomed, count_together):
    """Newer servers do this by default."""
    option = {"init_command": "SET SESSION innodb_snapshot_isolation = ON"}
    crowd = [doomed(DLOCKS_TEST_OPTIONS=json.dumps(option)) for _ in range(2)]
    for using in ROWS:
        for scope in "lease", "transaction":
            policy = {"scope": scope, "using": using, "timeout": None}
            count_together(crowd, volume(8), **policy)
        assert len(crowd[0].call(jobs.whole_cycle, using)) == 5


# A server takes seconds to start, so these tests restart it once for all backends.


def test_a_hold_outlives_a_restart_of_the_server(server, on_server):
    """A planned restart and a crash end no lease of a running process."""
    holder, other = on_server(), on_server()
    for how in server.stop, server.crash:
        keys = {using: f"held {using} {how.__name__}" for using in ROWS}
        first = {}
        for using, key in keys.items():
            first[using] = holder.call(jobs.acquire, key, using=using)
            assert other.call(jobs.try_once, key, using=using) is None
        how()
        server.start()
        for using, key in keys.items():
            assert other.call(jobs.try_once, key, using=using) is None, key
        assert holder.call(jobs.check) == "held"
        assert holder.call(jobs.release_all) == ["released"] * len(ROWS)
        for using, key in keys.items():
            assert other.call(jobs.try_once, key, using=using) > first[using]


@pytest.mark.engine("postgresql")
def test_a_grant_is_durable_before_it_is_reported():
    """A crash at any later moment does not make the key free for another caller.

    Other sessions of the server, such as autovacuum, may write at the same moment. So
    some grants may appear not to be written.
    """
    for using in ROWS:
        written = []
        for number in range(10):
            with db_lock(f"stock:{number}", using=using), connection.cursor() as cursor:
                cursor.execute(
                    "SELECT pg_current_wal_insert_lsn() <= pg_current_wal_flush_lsn()"
                )
                written += cursor.fetchone()
        assert written.count(True) > 5, using


def test_a_server_that_is_down_is_not_taken_for_a_busy_key(server, on_server):
    """The error comes in bounded time, and the next call after a restart works."""
    worker = on_server()
    for using in ROWS:
        assert isinstance(worker.call(jobs.try_once, f"down {using}", using=using), int)
    server.stop()
    for using in ROWS:
        started = time.monotonic()
        error = worker.call(jobs.acquire, f"down {using}", using=using)
        assert error == "LockBackendError"
        in_time(time.monotonic() - started, 10)
    server.start()
    for using in ROWS:
        assert isinstance(worker.call(jobs.try_once, f"down {using}", using=using), int)


def test_a_release_fails_if_the_server_is_down(server, on_server):
    holders, other = {using: on_server() for using in ROWS}, on_server()
    first = {
        using: holder.call(jobs.acquire, using, using=using, ttl=6.0)
        for using, holder in holders.items()
    }
    server.crash()
    for holder in holders.values():
        holder.start(jobs.release_all)
    for holder in holders.values():
        assert holder.hear() == ["LockBackendError"]
    server.start()
    for using, token in first.items():
        later = other.call(jobs.wait_quietly, using, using=using, timeout=20)
        assert later[1] > token


def test_a_crashing_server_never_causes_two_holders(server, on_server, tmp_path):
    """A counter survives crashes: errors are raised, and no increment is lost."""
    crowds = {using: [on_server() for _ in range(2)] for using in ROWS}
    # The ttl is longer than the start of the server.
    policy = {"times": volume(15), "ttl": 2.0}
    for using, crowd in crowds.items():
        path = tmp_path / using
        path.write_text("0 0")
        for worker in crowd:
            worker.start(
                jobs.count_through_trouble, str(path), using, using=using, **policy
            )
    for _ in range(2):
        for crowd in crowds.values():
            crowd[0].hear()
        server.crash()
        server.start()
    for using, crowd in crowds.items():
        done = 0
        for worker in crowd:
            while not isinstance(answer := worker.hear(), tuple):
                pass
            done += answer[0]
        value, last = map(int, (tmp_path / using).read_text().split())
        assert value == done
        assert last > 0


# Replies.


@pytest.fixture
def proxy():
    """A proxy in front of the server of the other tests."""
    proxy = Proxy(int(PORT))
    yield proxy
    proxy.cut.clear()
    proxy.close()


@pytest.fixture
def proxied(proxy, doomed):
    """Return a process behind the proxy, and another one that is not."""
    return doomed(DLOCKS_TEST_PORT=str(proxy.port)), doomed()


@ALL
def test_an_acquire_whose_reply_is_lost_is_held_by_its_caller(proxy, proxied):
    """The caller finds its grant in the row, and its lost release too."""
    worker, other = proxied
    for using in ROWS:
        key = f"reply {using}"
        assert isinstance(worker.call(jobs.try_once, key, using=using), int)
        proxy.swallow(key.encode())
        token = worker.call(jobs.acquire, key, using=using)
        assert proxy.swallowed.wait(10)
        assert isinstance(token, int), token
        assert other.call(jobs.try_once, key, using=using) is None
        assert other.call(jobs.state, key)["version"] == token
        assert worker.call(jobs.check) == "held"
        proxy.swallow(key.encode())
        assert worker.call(jobs.release_all) == ["released"]
        assert proxy.swallowed.wait(10)
        assert other.call(jobs.try_once, key, using=using) > token


@pytest.mark.engine("postgresql")
def test_a_grant_after_the_end_of_its_connection_is_bounded(server, on_server):
    """A waiter receives the grant. Without a waiter, the key is free after its ttl."""
    # Commits wait for a standby, in the sessions that want it.
    proxy = Proxy(server.port)
    worker, other = on_server(proxy.port), on_server()
    stuck = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    for sql in (
        "ALTER SYSTEM SET synchronous_commit = local",
        "ALTER SYSTEM SET synchronous_standby_names = absent",
        "SELECT pg_reload_conf()",
    ):
        server.execute(sql)
    for timeout in 0, 60:
        key = f"timeout {timeout}"
        before = worker.call(jobs.try_once, key)
        worker.call(jobs.run_sql, "SET synchronous_commit = on")
        worker.start(jobs.acquire, key, timeout=timeout, ttl=2.0)
        eventually(lambda: server.execute(stuck))
        proxy.disconnect()
        if timeout:
            eventually(lambda key=key: other.call(jobs.waiters, key)[0] == 1)
        else:
            assert worker.hear() == "LockTimeout"
        assert other.call(jobs.state, key)["version"] == before
        # The wait ends, and the transaction is committed.
        server.execute(stuck.replace("1", "pg_cancel_backend(pid)"))
        if timeout:
            assert worker.hear() > before
            assert worker.call(jobs.release_all) == ["released"]
        else:
            eventually(lambda key=key: other.call(jobs.state, key)["state"] == "held")
        assert isinstance(other.call(jobs.acquire, key, timeout=20), int)
    proxy.close()
    for sql in "ALTER SYSTEM RESET ALL", "SELECT pg_reload_conf()":
        server.execute(sql)


HELD = ["alone", "from the line", "with another"]


def take(held, worker, other, key, using):
    """Acquire a key in the given way and return its token.

    The way in which a key is acquired affects its release.
    """
    if held == "alone":
        return worker.call(jobs.acquire, key, using=using)
    if held == "with another":
        return worker.call(jobs.acquire, key, f"with {key}", using=using)[key]
    # A holder that has waited assumes that there are more waiters.
    with other.doing(jobs.hold, key, using=using):
        assert worker.call(jobs.acquire_after_another, key, using=using) == "in line"
    token = worker.hear()
    # The queue thread may lock the row for a moment.
    eventually(lambda: "dlocks-waiting" not in worker.call(jobs.threads))
    return token


@ALL
def test_a_release_whose_reply_is_lost_is_a_release(proxy, proxied):
    """The retried release succeeds, although another process holds the key by then."""
    worker, other = proxied
    for using, held in itertools.product(ROWS, HELD):
        taken, key = threading.Event(), f"taken {using} {held}"
        first = take(held, worker, other, key, using)
        # Several keys are released by a transaction, and so is the row of the insert
        # backend that may have waiters. Else the key is named in a single request.
        steps = {"with another"} if using != "insert" else {"from the line"}
        text = b"COMMIT" if held in steps else key.encode()
        try:
            proxy.swallow(text, until=taken)
            worker.start(jobs.release_all)
            assert proxy.swallowed.wait(10), key
            later = other.call(jobs.acquire, key, using=using)
        finally:
            taken.set()
        assert isinstance(later, int), (later, worker.hear())
        assert later > first
        assert worker.hear() == ["released"], key
        assert other.call(jobs.check) == "held", key
        assert other.call(jobs.release_all) == ["released"]


@ALL
def test_a_reader_whose_release_has_no_reply_has_released(proxy, proxied):
    """Its retry finds the row locked by the transaction of the next writer."""
    reader, writer = proxied
    key, go_on = "reply to a reader", threading.Event()
    assert isinstance(reader.call(jobs.acquire, key, shared=True), int)
    try:
        proxy.swallow(b"COMMIT", until=go_on)
        reader.start(jobs.release_all)
        assert proxy.swallowed.wait(10)
        writer.start(jobs.hold_in_transaction, key, timeout=30)
        assert isinstance(writer.hear(), int)
    finally:
        go_on.set()
    assert reader.hear() == ["released"]
    writer.tell()
    assert writer.hear() == "ended"


@pytest.fixture
def killing(doomed):
    """Return two processes, and a function that kills the sessions of the first."""
    admin = doomed()
    # Processes that later tests use again must keep their sessions.
    others = admin.call(jobs.other_sessions)

    def kill():
        assert admin.call(jobs.kill_other_sessions, but=others) >= 1

    return doomed(), admin, kill


@pytest.mark.engine("postgresql", "mysql")
def test_a_release_after_a_clear_and_a_lost_session_raises(killing):
    """A retried release only finds that another process holds the key."""
    worker, other, kill = killing
    for using, held in itertools.product(ROWS, HELD):
        key = f"taken away {using} {held}"
        first = take(held, worker, other, key, using)
        assert other.call(jobs.clear, key, first)
        assert other.call(jobs.acquire, key, using=using) > first
        # The grant of the other process must be older than one query takes under load.
        time.sleep(0.5)
        kill()
        assert worker.call(jobs.release_all) == ["LockLost"], key
        assert other.call(jobs.check) == "held", key
        assert other.call(jobs.release_all) == ["released"]
        assert isinstance(other.call(jobs.try_once, f"with {key}", using=using), int)


def test_a_clear_whose_reply_is_lost_is_reported_as_done(proxy, proxied):
    """``clear_lock`` says what has happened, although it had to ask twice."""
    operator, holder = proxied
    for shared, words, done in (
        (False, [], "'cleared False' was cleared"),
        (True, ["--share"], "1 shared hold of 'cleared True' was ended"),
    ):
        key = f"cleared {shared}"
        token = holder.call(jobs.acquire, key, shared=shared)
        words += [str(token)] * shared
        # The connection is open before the reply is lost.
        operator.call(jobs.try_once, "other")
        proxy.swallow(b"COMMIT")
        words += ["--yes", "--reason", "tests"]
        said = operator.call(jobs.run_command, "clear_lock", key, *words)
        assert proxy.swallowed.wait(10)
        assert done in said
        assert holder.call(jobs.release_all) == ["LockLost"]


def test_a_session_killed_by_the_server_is_replaced(killing):
    """A check, a release and an acquire each open a new session."""
    worker, _admin, kill = killing
    for using in ROWS:
        key = f"session {using}"
        token = worker.call(jobs.acquire, key, using=using)
        kill()
        assert worker.call(jobs.check) == "held"
        kill()
        assert worker.call(jobs.release_all) == ["released"]
        kill()
        assert worker.call(jobs.try_once, key, using=using) > token


def test_a_cut_off_holder_is_lost_before_the_key_is_taken_over(proxy, doomed, workers):
    """No data passes, and neither side is notified.

    The holder relies on its own clock, whichever backend it uses.
    """
    holders = {using: doomed(DLOCKS_TEST_PORT=str(proxy.port)) for using in ROWS}
    first, waiters = {}, workers(3)
    for using, holder in holders.items():
        first[using] = holder.call(jobs.hold_until_lost, using, using=using, ttl=2.0)
    proxy.cut.set()
    since = time.monotonic()
    for using, waiter in zip(ROWS, waiters, strict=True):
        waiter.start(jobs.wait_quietly, using, using=using, timeout=20)
    for (using, holder), waiter in zip(holders.items(), waiters, strict=True):
        granted, token = waiter.hear()
        assert since < holder.hear() < granted
        assert token > first[using]
        in_time(granted - since, 2.0 + 1.0)


def test_a_cut_off_holder_is_notified_and_keeps_its_other_holds(proxy, proxied):
    """The renewal gets no reply, and no driver times out."""
    holder, _other = proxied
    holder.call(jobs.hold_here_and_elsewhere, "told", ttl=4.0)
    proxy.cut.set()
    since = time.monotonic()
    told = holder.hear()
    assert since < told
    # The other hold was renewed meanwhile, because its ttl has passed.
    assert holder.hear() == "held"
    in_time(told - since, 4.0 + 1.0)


# Clocks.


def is_ahead(process, seconds):
    """Return whether the clock of a process is ahead by a number of seconds."""
    return abs(process.call(jobs.wall_clock) - time.time() - seconds) < 60


def test_the_clock_of_the_application_host_does_not_matter(
    doomed, worker, monkeypatch, tmp_path
):
    """A process whose clock is hours fast or slow excludes others as usual."""
    honest, steps = worker, tmp_path / "clock"
    with monkeypatch.context() as patch:
        here = {**faketime(steps=steps), "FAKETIME_CACHE_DURATION": "1"}
        for name, value in here.items():
            patch.setenv(name, value)
        # Its imports would read the file for each of their looks at the clock.
        patch.delenv("FAKETIME_NO_CACHE")
        liar = doomed()
    for seconds in 5 * 3600, -5 * 3600:
        step(steps, seconds)
        eventually(partial(is_ahead, liar, seconds), pause=0.2)
        for using in ROWS:
            key = f"{using} {seconds}"
            first = honest.call(jobs.acquire, key, using=using)
            assert liar.call(jobs.try_once, key, using=using) is None, key
            honest.call(jobs.release_all)
            second = liar.call(jobs.acquire, key, using=using)
            assert second > first, key
            assert honest.call(jobs.try_once, key, using=using) is None, key
            assert liar.call(jobs.check) == "held", key
            liar.call(jobs.release_all)
            assert honest.call(jobs.try_once, key, using=using) > second, key


def test_a_clock_step_below_the_grace_causes_no_second_holder(server, doomed):
    """The second alias is the control: without the grace there is an overlap."""
    ttl = 2.4
    aliases = {
        using: {
            "BACKEND": "dlocks.backends.database.PessimisticBackend",
            "OPTIONS": {"grace": grace},
        }
        for using, grace in (("with grace", 2.0), ("without grace", 0.0))
    }
    there = {**environment(server), "DLOCKS_TEST_ALIASES": json.dumps(aliases)}
    steps = server.directory / "clock"
    server.stop()
    server.start(**faketime(steps=steps))
    try:
        for number, using in enumerate(aliases, 1):
            holder, waiter, key = doomed(**there), doomed(**there), f"clock {using}"
            for process in holder, waiter:
                process.call(jobs.try_once, key, using=using)
            holder.start(jobs.hold_timed, key, ttl=ttl, renew=False, using=using)
            before, _, first = holder.hear()
            step(steps, number * 1.5)
            granted, token = waiter.call(
                jobs.wait_quietly, key, timeout=20, using=using
            )
            assert token > first
            # The first holder relies on its hold for its ttl, counted from before the
            # request.
            if using == "without grace":
                in_time(granted - before, ttl)
            else:
                assert granted - before >= ttl
    finally:
        server.stop()
        server.start()


@ALL
def test_several_keys_that_came_too_late_are_free(proxy, proxied, in_queue):
    """The reply is lost, and a waiter has joined before the request is repeated."""
    worker, other = proxied
    for using in ("default", "optimistic"):
        keys = [f"{name} {using}" for name in ("first", "second")]
        worker.call(jobs.acquire, *keys, using=using)
        assert worker.call(jobs.release_all) == ["released"]
        joined = threading.Event()
        try:
            proxy.swallow(b"COMMIT", until=joined)
            began = time.monotonic()
            worker.start(jobs.acquire, *keys, using=using, timeout=1)
            assert proxy.swallowed.wait(10)
            other.start(jobs.wait_quietly, keys[0], using=using, timeout=20)
            in_queue(1, keys[0])
            eventually(lambda began=began: time.monotonic() > began + 1)
        finally:
            joined.set()
        assert worker.hear() == "LockTimeout"
        ended = time.monotonic()
        granted, _token = other.hear()
        in_time(granted - ended, 3.0)
        assert isinstance(other.call(jobs.try_once, keys[1], using=using), int)
