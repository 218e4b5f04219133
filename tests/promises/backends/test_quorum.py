"""Quorums of five Redis servers, of memory backends and of three databases.

The three databases are of different kinds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import threading
import time
import traceback
from functools import partial
from types import SimpleNamespace

import pytest
from django.test import SimpleTestCase

from dlocks import LockBackendError, LockLost, LockStale, LockTimeout, db_lock
from dlocks.backends.base import Runtime
from dlocks.backends.memory import MemoryBackend
from dlocks.backends.quorum import QuorumBackend
from dlocks.backends.redis import RedisBackend
from tests import jobs, timing
from tests.contract import BackendContract
from tests.models import Counter
from tests.promises.backends.others import (
    MEMORY,
    REDIS,
    claim,
    quorum,
    redis,
    zookeeper,
)
from tests.servers import MariaDB, PostgreSQL, Redis
from tests.timing import in_time
from tests.volume import volume

SECRET = "open-sesame"

eventually = partial(timing.eventually, but=(LockBackendError,))


class Members(Runtime):
    """The members of a quorum that is used without the DLOCKS setting."""

    def __init__(self, backend, members):
        super().__init__(backend)
        self.members = members

    def backend_of(self, alias):
        return self.members[alias]


def quorum_of(members, **options):
    """Return a quorum of these backends. No member is down, so a slow one counts."""
    named = {f"member{number}": member for number, member in enumerate(members)}
    backend = QuorumBackend(
        "quorum", of=list(named), **{"node_timeout": 10.0, **options}
    )
    backend.runtime = Members(backend, named)
    return backend


def members_at(servers, **options):
    options = {"socket_timeout": 5.0, "grace": 0.0, **options}
    return [
        RedisBackend(f"redis{number}", url=server.url, **options)
        for number, server in enumerate(servers)
    ]


@pytest.mark.usefixtures("five")
class TestQuorum(BackendContract, SimpleTestCase):
    def make_backend(self, grace=0.0, **options):
        self.members = members_at(self.servers, grace=grace)
        return quorum_of(self.members, **options)

    def settle(self, key):
        def is_free(member):
            # A slow member may still have an earlier holder that never released. A
            # member whose reply and whose cancellation were lost may have a holder that
            # the other members did not grant. Both end when the lease expires.
            holder = member.holder(key)
            return holder is None or holder.stale

        eventually(lambda: all(map(is_free, self.members)), seconds=45)


@pytest.fixture
def redlock(five):
    """A quorum of five servers, with its members by number."""
    members = members_at(five)
    return SimpleNamespace(backend=quorum_of(members), members=members, servers=five)


@pytest.mark.parametrize("how", ["crashed", "stopped"])
def test_a_quorum_of_five_works_without_two_but_not_three(
    how, five, configured, in_other_thread
):
    def lose(server):
        if how == "crashed":
            server.crash()
        else:
            server.process.send_signal(signal.SIGSTOP)

    configured("quorum", node_timeout=2.0)
    lock = db_lock("key", using="quorum", timeout=0)
    for server in five[:2]:
        lose(server)
    with lock as hold:
        with pytest.raises(LockTimeout, match="held by"):
            in_other_thread(lock.acquire)
        hold.check()
        hold.renew()
    lock.acquire().release()
    lose(five[2])
    began = time.monotonic()
    with pytest.raises(
        LockBackendError,
        match=r"DLOCKS\['quorum'\]: 2 of 5 members answered, and 3 must agree",
    ) as raised:
        lock.acquire()
    # The request and its cancellation each took at most ``node_timeout``. No thread
    # waited for the missing reply.
    in_time(time.monotonic() - began, 10.0)
    assert "redis2" in str(raised.value)


def test_a_hold_on_lost_members_ends_by_its_deadline(five, configured):
    configured("quorum")
    hold = db_lock("key", using="quorum", ttl=3.0).acquire()
    for server in five[:3]:
        server.crash()
    with pytest.raises(LockBackendError):
        hold.check()
    eventually(lambda: not hold.held)
    with pytest.raises(LockLost):
        hold.release()


def test_a_claim_without_a_majority_is_cancelled_on_all_members(redlock):
    other = claim(holder="another")
    for member in redlock.members[:3]:
        assert member.acquire(other)
    assert redlock.backend.acquire(claim()) is None
    for member in redlock.members[3:]:
        eventually(lambda member=member: member.holder("key") is None)


def test_a_claim_is_cancelled_on_members_that_did_not_reply(redlock):
    other = claim(holder="another")
    for member in redlock.members[:3]:
        assert member.acquire(other)
    redlock.members[4].holder("key")
    redlock.backend.node_timeout = 2.0
    redlock.servers[4].process.send_signal(signal.SIGSTOP)
    assert redlock.backend.acquire(claim()) is None
    redlock.servers[4].process.send_signal(signal.SIGCONT)
    # The member receives the claim only now, and could grant it for half a minute.
    redlock.members[4].holder("key")
    eventually(lambda: redlock.members[4].holder("key") is None, 20)
    for member in redlock.members[:3]:
        assert member.release(other)
    assert redlock.backend.acquire(claim())


def test_a_split_vote_does_not_wait_for_silent_members(redlock):
    """The claim is cancelled at once. The next one needs all three members."""
    for member, server in zip(redlock.members[:2], redlock.servers, strict=False):
        member.socket_timeout = 60.0
        server.process.send_signal(signal.SIGSTOP)
    redlock.backend.node_timeout = 2.0
    assert redlock.backend.acquire(claim("other"))
    redlock.backend.node_timeout = 60.0
    rival = claim()
    assert redlock.members[4].acquire(rival)
    began = time.monotonic()
    assert redlock.backend.acquire(claim()) is None
    in_time(time.monotonic() - began, 30.0)
    redlock.members[4].release(rival)
    eventually(lambda: not any(member.holder("key") for member in redlock.members[2:]))


def test_a_claim_with_a_minority_does_not_block_others(redlock):
    other = claim(holder="another")
    for member in redlock.members[:2]:
        assert member.acquire(other)
    mine = claim()
    assert redlock.backend.acquire(mine)
    assert redlock.backend.holder("key").holder == "somebody"
    assert redlock.backend.renew([mine])
    assert redlock.backend.release(mine)


def test_renewals_restore_a_hold_on_members_that_lost_data(redlock):
    """Each of five members loses its data in turn. A lost lease is not restored."""
    mine = claim()
    redlock.backend.acquire(mine)
    for server, member in zip(redlock.servers, redlock.members, strict=True):
        with server.client() as client:
            client.flushall()
        assert member.holder("key") is None
        assert mine.owner in redlock.backend.renew([mine])
        eventually(lambda member=member: member.holder("key") is not None)
    assert redlock.backend.acquire(claim()) is None
    for server in redlock.servers[:3]:
        with server.client() as client:
            client.flushall()
    assert redlock.backend.renew([mine]) == {}
    assert redlock.backend.acquire(claim())


def test_a_shorter_lease_counts_although_no_majority_confirms_it(redlock):
    """Two members have lost the hold, and one does not answer."""
    mine = claim()
    assert redlock.backend.acquire(mine)
    for server in redlock.servers[:2]:
        with server.client() as client:
            client.flushall()
    redlock.servers[4].crash()
    left = redlock.backend.renew([dataclasses.replace(mine, ttl=2.0)])
    assert 0 < left[mine.owner] <= 2.0


def test_a_grant_slower_than_its_ttl_does_not_count(five, configured):
    configured("quorum")
    lock = db_lock("key", using="quorum", ttl=1.0, timeout=20)
    lock.acquire().release()
    for server in five[:3]:
        server.process.send_signal(signal.SIGSTOP)
    sent = threading.Event()

    def go_on():
        sent.wait(10)
        time.sleep(1.3)
        for server in five[:3]:
            server.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    began = time.monotonic()
    sent.set()
    hold = lock.acquire()
    # The first reply arrived too late. The claim was cancelled and sent again.
    assert time.monotonic() - began > 1.3
    assert hold.held
    hold.release()
    thread.join()


def test_a_stale_key_is_not_taken_over_without_takeover(redlock):
    redlock.backend.acquire(claim(ttl=0.05))
    eventually(lambda: all(member.holder("key").stale for member in redlock.members))
    with pytest.raises(LockStale):
        redlock.backend.acquire(claim(takeover=False))
    for member in redlock.members[2:]:
        assert member.acquire(claim(holder="another"))
    assert redlock.backend.acquire(claim(takeover=False)) is None


def test_a_split_vote_is_contention_although_one_member_missed_a_release():
    """The other members know that the last holder has released the key."""
    members = [MemoryBackend(name, grace=0.0) for name in "abc"]
    backend, rival = quorum_of(members), claim()
    assert members[0].acquire(claim(ttl=0.001))
    eventually(lambda: members[0].holder("key").stale)
    # Another claim has the vote of one member, and is about to return it.
    assert members[1].acquire(rival)
    assert backend.acquire(claim(takeover=False)) is None
    assert members[1].release(rival)
    assert backend.acquire(claim(takeover=False))


def test_a_quorum_refuses_takeover_false_if_a_member_does(settings):
    """Such a member does not notice that the last holder has crashed."""
    one = zookeeper(1, connect_timeout=0.1)
    members = {
        "memory": {"BACKEND": MEMORY},
        "redis": {"BACKEND": REDIS},
        "zookeeper": one,
    }
    settings.DLOCKS = {**members, "quorum": quorum(members)}
    with pytest.raises(RuntimeError, match="does not support takeover=False"):
        db_lock("stock:7", using="quorum", takeover=False, timeout=0).acquire()


class ShortMemory(MemoryBackend):
    """A backend that grants leases of four seconds.

    ZooKeeper likewise grants a lease for the length of its session.
    """

    renew_every = 0.3
    answers = True

    def acquire(self, claim):
        grant = super().acquire(claim)
        return grant and dataclasses.replace(grant, lease=self._shortened(claim))

    def renew(self, claims):
        if not self.answers:
            raise LockBackendError("cut off")
        left = super().renew(claims)
        return {
            claim.owner: self._shortened(claim)
            for claim in claims
            if claim.owner in left
        }

    def _shortened(self, claim):
        self.expire(claim, -4.0)
        return 4.0


def test_a_quorum_hold_lasts_no_longer_than_a_majority_grants(
    settings, monkeypatch, until
):
    kind = {"BACKEND": f"{__name__}.ShortMemory", "OPTIONS": {"grace": 0}}
    members = {f"memory{number}": kind for number in range(3)}
    settings.DLOCKS = {
        **members,
        "quorum": quorum(members),
        "other": quorum(members, node_timeout=10.0),
    }
    hold = db_lock("key", using="quorum", ttl=30).acquire()
    first = time.monotonic() + hold.remaining
    assert 1.0 < hold.remaining <= 4.0
    # It is renewed before these seconds have passed, however long the ttl.
    until(lambda: time.monotonic() + hold.remaining > first + 4.0)
    assert hold.held
    monkeypatch.setattr(ShortMemory, "answers", False)
    with db_lock("key", using="other", timeout=10):
        assert not hold.held


def test_a_quorum_works_when_no_thread_can_start(monkeypatch):
    """Some versions of Python start none in exit handlers, which release the holds."""
    members = [MemoryBackend(name) for name in "abc"]
    backend, mine = quorum_of(members), claim()

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert backend.acquire(mine)
    assert backend.release(mine)
    assert not any(member.holder("key") for member in members)


class Noting(MemoryBackend):
    """A backend that notes the threads which send its requests."""

    def __init__(self, alias):
        super().__init__(alias)
        self.threads = []

    def acquire(self, claim):
        self.threads.append(threading.current_thread())
        return super().acquire(claim)


def test_an_interrupted_start_of_a_thread_leaves_no_request_to_callers(
    monkeypatch, until
):
    """In the thread of a caller, a member could use the caller's transaction."""
    members = [Noting(name) for name in "abc"]
    backend, start, started = quorum_of(members), threading.Thread.start, []

    def strike(thread):
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "start", strike)
        backend.acquire(claim("another"))
    until(lambda: not any(thread.is_alive() for thread in started))
    mine = claim()
    assert backend.acquire(mine)
    assert backend.release(mine)
    assert all(threading.current_thread() not in member.threads for member in members)


class Ahead(MemoryBackend):
    """A backend whose clock is an hour ahead of that of the others."""

    def acquire(self, claim):
        grant = super().acquire(claim)
        return grant and dataclasses.replace(grant, token=grant.token + 3_600_000_000)


def test_the_largest_token_of_a_majority_may_not_grow():
    """The documentation explains this."""
    members = [Ahead("ahead"), MemoryBackend("one"), MemoryBackend("two")]
    backend, tokens = quorum_of(members), []
    for absent in (2, 0):
        other, mine = claim(holder="another"), claim()
        assert members[absent].acquire(other)
        tokens.append(backend.acquire(mine).token)
        assert backend.release(mine)
        members[absent].release(other)
    assert tokens[0] > tokens[1]


# Use cases and limits.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("using", "guard"), [("quorum", False), ("brisk", True)])
def test_a_pause_breaks_a_quorum_but_not_a_guarded_commit(using, guard, configured):
    """Only the guarded commit detects this, however many members had agreed."""
    row = Counter.objects.create(name="stock", value=7)
    late = configured("quorum")()
    late.call(jobs.write_under, "stock", "stock", 1, guard=guard, ttl=0.6, using=using)
    late.stop()
    with db_lock("stock", using=using, timeout=20):
        Counter.objects.filter(pk=row.pk).update(value=8)
        late.resume()
        outcome, _ = late.go_on()
        row.refresh_from_db()
        if guard:
            assert (outcome, row.value) == ("LockLost", 8)
        else:
            assert (outcome, row.value) == ("written, and lost", 1)


# Databases.


def test_a_quorum_of_three_different_databases(start, doomed, tmp_path, count_together):
    """It survives the loss of one. Without two of them, acquiring raises an error."""
    postgresql, mariadb = start(PostgreSQL()), start(MariaDB())
    mariadb.execute("CREATE DATABASE dlocks")
    engines = "django.db.backends."
    there = {"HOST": "127.0.0.1", "NAME": "dlocks"}
    one = {"NAME": "postgres", "PORT": postgresql.port, "USER": "dlocks"}
    two = {"PORT": mariadb.port, "USER": "root"}
    databases = {
        "one": {"ENGINE": f"{engines}postgresql", **there, **one},
        "two": {"ENGINE": f"{engines}mysql", **there, **two},
        "three": {
            "ENGINE": f"{engines}sqlite3",
            "NAME": str(tmp_path / "three.sqlite3"),
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        },
    }
    members = {
        name: {
            "BACKEND": "dlocks.backends.database.PessimisticBackend",
            "OPTIONS": {"database": name},
        }
        for name in databases
    }
    environment = {
        "DLOCKS_TEST_DATABASES": json.dumps(databases),
        "DLOCKS_TEST_ALIASES": json.dumps(
            {**members, "quorum": quorum(members, node_timeout=10.0)}
        ),
    }
    crowd = [doomed(**environment) for _ in range(2)]
    crowd[0].call(jobs.migrate_databases, *databases)
    count_together(crowd, volume(15), using="quorum")
    postgresql.crash()
    count_together(crowd, volume(15), using="quorum")
    mariadb.crash()
    assert crowd[0].call(jobs.acquire, "key", using="quorum") == "LockBackendError"


def test_errors_of_quorum_members_contain_no_secret(start, aliases, caplog):
    """The members refuse this password."""
    servers = [start(Redis()) for _ in range(3)]
    members = {
        f"redis{number}": redis(
            server, url=f"redis://:{SECRET}@127.0.0.1:{server.port}/0"
        )
        for number, server in enumerate(servers)
    }
    aliases(**members, quorum=quorum(members))
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(LockBackendError, match="0 of 3 members answered") as raised,
    ):
        db_lock("key", using="quorum").acquire()
    told = "".join(traceback.format_exception(raised.value)) + caplog.text
    assert "DLOCKS['redis1']" in told
    assert SECRET not in told
