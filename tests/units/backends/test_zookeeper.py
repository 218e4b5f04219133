"""Requests of the ZooKeeper backend that are late, lost or coincide with others."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from contextlib import contextmanager

import pytest
from kazoo.exceptions import ConnectionLoss

from dlocks import LockBackendError, LockLost, db_lock
from tests.finalizers import by_finalizer, noting
from tests.internals import (
    ZooKeeperBackend,
    backends,
    clock,
    disconnect,
    tickets,
    waiters_of,
    zookeeper,
)
from tests.promises.backends.others import at, claim, client_of
from tests.timing import in_time


def lock(key="key", **policy):
    return db_lock(key, using="zookeeper", **{"timeout": 20, **policy})


@pytest.fixture(autouse=True)
def sessions_closed():
    """Close all sessions at the end of each test."""
    yield
    # This includes backends that other settings have replaced.
    for backend in list(zookeeper.all_backends):
        disconnect(backend)


@pytest.fixture
def server(zookeeper_server):
    return zookeeper_server


@pytest.fixture
def backend(server, zookeeper_at):
    zookeeper_at(server.port)
    return backends["zookeeper"]


def end_session(backend, server):
    """End the session of this process from the servers' side."""
    session = backend.ensemble._client.client_id
    while True:
        # Closing the client ends the session, unless the process has reconnected
        # meanwhile.
        with client_of(server.port, client_id=session) as client:
            if client.client_id != session:
                return


# Sessions that end.


def test_the_end_of_a_session_is_reported_at_once(server, zookeeper_at, until):
    """The loss of a session is reported at once, not at the next renewal."""
    zookeeper_at(server.port, session_timeout=60.0)
    told = threading.Event()
    hold = lock(ttl=60, on_lost=lambda hold: told.set()).acquire()
    backend = backends["zookeeper"]
    first = hold._parts[0].lease.deadline
    # The first renewal may be due soon. The loss must be reported before the second.
    until(lambda: hold._parts[0].lease.deadline > first, seconds=30)
    renewed = hold._parts[0].lease.deadline
    began = time.monotonic()
    end_session(backend, server)
    assert told.wait(30)
    in_time(time.monotonic() - began, backend.renew_every / 2)
    assert not hold.held
    assert hold._parts[0].lease.deadline == renewed
    with pytest.raises(LockLost, match="ZooKeeper session that held it has ended"):
        hold.release()
    with lock(timeout=5) as again:
        assert again.token > hold.token


async def test_waiters_queue_again_when_their_session_ends(
    server, backend, person, root, nodes
):
    """One of them is a thread, and the other one is a task."""
    person.ensure_path(f"{root}/key")
    first = person.create(
        f"{root}/key/{'0' * 32}.alone..", sequence=True, ephemeral=True
    )

    def work():
        with lock(timeout=30) as hold:
            return hold.held

    async def until_queued(*, without):
        while not (
            len(found := set(nodes()) - without) == 2
            and sum(bool(one.watched) for one in list(backend.claims.entries.values()))
            == 2
        ):
            await asyncio.sleep(0.01)
        return found

    thread = asyncio.create_task(asyncio.to_thread(work))
    task = asyncio.create_task(lock().aacquire())
    foreign = {first.rpartition("/")[2]}
    ended = await until_queued(without=foreign)
    await asyncio.to_thread(end_session, backend, server)
    await until_queued(without=foreign | ended)
    await asyncio.to_thread(person.delete, first)
    hold = await task
    assert hold.held
    await hold.arelease()
    assert await thread
    assert nodes() == []


def test_a_waiter_that_queues_again_without_a_reply_is_granted(
    server, backend, root, until, threads, monkeypatch
):
    """It finds its node, instead of waiting behind it."""
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    holder, lost, send = claim(), [], backend.ensemble.send
    assert other.acquire(holder)
    waiting = threads(lambda: lock(timeout=30).acquire().release())
    queued = waiters_of(backend)._waiters
    until(lambda: any(one.is_queued for one in list(queued.values())))

    def send_without_reply(*requests, **options):
        began, answers = clock.real_now(), send(*requests, **options)
        if requests[0][0] == "create" and not lost:
            until(lambda: clock.real_now() > began + zookeeper.SOON)
            lost.append(answers)
            raise backend.ensemble._unanswered(None) from ConnectionLoss()
        return answers

    monkeypatch.setattr(zookeeper, "SOON", 0.5)
    monkeypatch.setattr(backend.ensemble, "send", send_without_reply)
    end_session(backend, server)
    until(lambda: lost)
    until(lambda: any(one.ticket for one in list(backend.claims.entries.values())))
    assert other.release(holder)
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_failed_client_does_not_end_the_next_session(backend, monkeypatch):
    """Several threads notice that a client has failed, and one replaces it."""
    with lock() as hold:
        ensemble = backend.ensemble
        client, live = ensemble._client, ensemble._live
        failed = ensemble._make()

        class Replaced:
            def wait(self, seconds):
                ensemble._client, ensemble._live = client, live

        ensemble._client, ensemble._live = failed, Replaced()
        with pytest.raises(LockBackendError):
            ensemble.ask(("exists", "/"), timeout=0.0)
        assert ensemble._client is client
        hold.check()


# Servers that do not reply.


def test_a_cancelled_claim_on_silent_servers_leaves_no_node(
    server, zookeeper_at, person, root, nodes, until
):
    zookeeper_at(server.port, connect_timeout=20.0)
    with lock():
        # The server does not delete the node of the key while it has a child.
        person.create(f"{root}/key/other", ephemeral=True)
    backend = backends["zookeeper"]
    backend.ensemble.timeout = 0.4
    server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        for _ in range(2):
            with pytest.raises(LockBackendError, match="zookeeper"):
                lock().acquire()
        in_time(time.monotonic() - began, 6.0)
    finally:
        server.process.send_signal(signal.SIGCONT)
    # The server processes the requests, although no caller waits for them any more.
    until(lambda: not backend.claims.orphans)
    assert nodes() == ["other"]


def test_a_session_that_ends_during_a_request_leaves_no_node(
    backend, nodes, until, monkeypatch
):
    """The node is created in the next session, and the reply to that is lost."""
    send = backend.ensemble.send

    def send_in_next_session(*requests, **options):
        if requests[0][0] != "create":
            return send(*requests, **options)
        backend._session_ended()
        send(*requests, timeout=20.0)
        sent = clock.real_now()
        until(lambda: clock.real_now() > sent + backend.ensemble.timeout)
        raise backend.ensemble._unanswered(None) from ConnectionLoss()

    first, mine = claim(), claim()
    # Now the root exists.
    assert backend.acquire(first)
    assert backend.release(first)
    with monkeypatch.context() as patched:
        patched.setattr(backend.ensemble, "timeout", 0.5)
        patched.setattr(backend.ensemble, "send", send_in_next_session)
        with pytest.raises(LockBackendError):
            backend.acquire(mine)
    assert len(nodes()) == 1
    # The session does not end as long as the process uses it.
    other = claim("another")
    assert backend.acquire(other)
    backend.release(mine)
    until(lambda: nodes() == [])
    assert backend.release(other)


def test_a_busy_key_is_no_error_when_the_server_then_leaves(
    backend, nodes, until, monkeypatch
):
    """The caller knows that the key is busy, and waits. Its node is deleted later."""
    holder, send = claim(), backend.ensemble.send
    assert backend.acquire(holder)

    def unreachable(*requests, **options):
        if requests[0][0] == "delete":
            raise backend.ensemble._unanswered(None) from ConnectionLoss()
        return send(*requests, **options)

    with monkeypatch.context() as patched:
        patched.setattr(zookeeper, "SOON", 0.05)
        patched.setattr(backend.ensemble, "send", unreachable)
        assert backend.acquire(claim()) is None
    until(lambda: len(nodes()) == 1)
    assert backend.release(holder)


def test_a_key_is_not_granted_without_a_remaining_lease(backend, nodes, monkeypatch):
    """The session is uncertain when the replies arrive."""
    mine, send = claim(), backend.ensemble.send

    def send_slowly(*requests, **how):
        answers = send(*requests, **how)
        backend.ensemble.certain_until = clock.now()
        return answers

    @contextmanager
    def answered_late():
        with monkeypatch.context() as patched:
            patched.setattr(backend.ensemble, "send", send_slowly)
            yield

    with answered_late():
        assert backend.acquire(mine) is None
    assert nodes() == []
    assert backend.acquire(mine)
    with answered_late():
        backend.holder("key")
        assert backend.acquire(mine) is None
    assert nodes() == []
    # A grant from the queue is requested again.
    with answered_late():
        for ticket in (backend.enqueue(mine), backend.poll([mine])[mine.owner]):
            assert (ticket.grant, ticket.must_retry) == (None, True)
    assert backend.acquire(mine).lease > 0
    assert backend.release(mine)


def test_a_finalizer_in_a_thread_of_the_backend_is_refused(backend, monkeypatch, until):
    """The garbage collector may call it while this thread changes the tables."""
    answers, entries = [], backend.claims.all

    other = lock("another", timeout=0)
    strike = by_finalizer(noting(answers, other.try_acquire))

    def all_entries():
        if threading.current_thread().name == "dlocks-zookeeper" and not answers:
            strike()
        return entries()

    monkeypatch.setattr(backend.claims, "all", all_entries)
    with lock():
        until(lambda: answers)
    assert "__del__" in answers[0]


def test_a_finalizer_in_the_thread_of_kazoo_is_refused(
    server, backend, monkeypatch, until
):
    """The garbage collector may call it while this thread notices a lost session."""
    answers, end = [], backend.ensemble._end_session
    strike = by_finalizer(noting(answers, lock("another", timeout=0).try_acquire))

    def end_and_collect():
        if not answers:
            strike()
        end()

    with pytest.raises(LockLost), lock() as hold:
        monkeypatch.setattr(backend.ensemble, "_end_session", end_and_collect)
        end_session(backend, server)
        until(lambda: answers)
        until(lambda: not hold.held)
    assert "__del__" in answers[0]


# Leases that expire meanwhile.


def test_a_release_is_false_once_the_expired_lease_has_ended(backend, monkeypatch):
    """Another caller may have the key before this process has forgotten its claim."""
    send = backend.ensemble.send
    for rest_for in (0.0, 60.0):
        deleted, forgets = threading.Event(), threading.Event()

        def send_and_wait(*requests, deleted=deleted, forgets=forgets, **options):
            answers = send(*requests, **options)
            if requests[0][0] == "delete" and not deleted.is_set():
                deleted.set()
                assert forgets.wait(30)
            return answers

        mine = claim(f"key {rest_for}", ttl=0.2)
        assert backend.acquire(mine)
        monkeypatch.setattr(backend.ensemble, "send", send_and_wait)
        assert deleted.wait(30)
        released = backend.release(mine, rest_for=rest_for)
        forgets.set()
        monkeypatch.setattr(backend.ensemble, "send", send)
        assert not released, rest_for


def test_a_renewal_under_way_makes_no_loss_of_a_release_without_a_reply(
    backend, monkeypatch
):
    """It finds that the node is gone before the deletion is sent again."""
    mine, send = claim(), backend.ensemble.send
    assert backend.acquire(mine)

    def send_without_reply(*requests, **options):
        answers = send(*requests, **options)
        if requests[0][0] == "delete":
            monkeypatch.undo()
            backend.renew([mine])
            raise backend.ensemble._unanswered(None) from ConnectionLoss()
        return answers

    monkeypatch.setattr(backend.ensemble, "send", send_without_reply)
    assert backend.release(mine)


def test_a_key_that_rests_until_its_release_is_noticed_is_not_lost(
    backend, monkeypatch, until
):
    """The rest of min_hold may be shorter than a pause of this thread."""
    mine, check = claim(), backend._check
    assert backend.acquire(mine)

    def pause(entries):
        (entry,) = entries
        until(lambda: entry.gone or not entry.resting)
        check(entries)

    monkeypatch.setattr(backend, "_check", pause)
    assert backend.release(mine, rest_for=0.01)


def test_a_key_rests_no_longer_because_of_a_late_renewal(backend, monkeypatch, until):
    """The renewal was under way when the holder released the key."""
    mine, check = claim(), backend._check
    assert backend.acquire(mine)

    def check_and_release(entries, timeout=None):
        monkeypatch.undo()
        check(entries, timeout)
        assert backend.release(mine, rest_for=0.1)

    monkeypatch.setattr(backend, "_check", check_and_release)
    backend.renew([mine])
    until(lambda: backend.acquire(claim()), seconds=5)


@pytest.fixture
def late(server, root):
    """A backend whose process goes on after a pause in which its lease has expired."""
    return ZooKeeperBackend("late", hosts=at(server.port), root=root, grace=0.0)


def test_a_late_renewal_and_a_takeover_exclude_each_other(
    late, server, root, monkeypatch
):
    # The request gets its reply, however long the server takes.
    monkeypatch.setattr(zookeeper, "SOON", 20.0)
    other = ZooKeeperBackend("other", hosts=at(server.port), root=root)
    mine, left, done = claim(ttl=2.0), {}, threading.Event()
    end = late._end

    def end_after_a_renewal(entry):
        left.update(late.renew([mine]))
        end(entry)
        done.set()

    monkeypatch.setattr(late, "_end", end_after_a_renewal)
    assert other.acquire(claim("warm"))
    assert late.acquire(mine)
    assert done.wait(10)
    assert left[mine.owner] > 0
    assert other.acquire(claim()) is None
    monkeypatch.undo()


@pytest.mark.parametrize("certain", [True, False])
def test_a_claim_that_is_being_cancelled_is_not_granted(
    late, until, certain, monkeypatch
):
    mine, begun, go_on = claim(ttl=2.0), threading.Event(), threading.Event()
    leave = late._release_entry

    def leave_slowly(entry, **how):
        begun.set()
        assert go_on.wait(30)
        return leave(entry, **how)

    assert late.acquire(mine)
    monkeypatch.setattr(late, "_release_entry", leave_slowly)
    try:
        assert begun.wait(10)
        if not certain:
            late.ensemble.certain_until = -math.inf
        assert late.acquire(mine) is None
        assert late.enqueue(mine) is None
        assert late.poll([mine]) == {}
    finally:
        go_on.set()
    until(lambda: mine.owner not in late.claims.entries)
    assert late.acquire(mine)
    assert late.release(mine)


def test_the_queue_stays_ordered_when_sequence_numbers_wrap():
    """ZooKeeper's sequence numbers are signed 32-bit integers and wrap around."""
    numbers = [2**31 - 2, 2**31 - 1, -(2**31), -(2**31) + 1]
    names = [f"{'a' * 32}.alone..{number:010d}" for number in numbers]
    line = tickets.NodeQueue([*reversed(names), "lock-0000000001", "a.b.c.d"])
    assert [ticket.number for ticket in line.tickets] == numbers
    assert line.granted == line.tickets[:1]
