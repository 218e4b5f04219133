"""Quorums of five Redis servers, of memory backends and of three databases.

The three databases are of different kinds.
"""

from __future__ import annotations

import contextlib
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
from django.core.exceptions import ImproperlyConfigured
from django.test import SimpleTestCase, override_settings

from dlocks import LockBackendError, LockLost, LockStale, LockTimeout, db_lock
from tests import jobs, timing
from tests.contract import BackendContract
from tests.internals import Claim, MemoryBackend, backends, check_settings
from tests.models import Counter
from tests.servers import MariaDB, PostgreSQL, Redis
from tests.timing import in_time
from tests.volume import volume

QUORUM = "dlocks.backends.quorum.QuorumBackend"
MEMORY = "dlocks.backends.memory.MemoryBackend"
SECRET = "open-sesame"


def redis_alias(server, **options):
    return {
        "BACKEND": "dlocks.backends.redis.RedisBackend",
        "OPTIONS": {
            "url": server.url,
            "socket_timeout": 5.0,
            "grace": 0,
            **options,
        },
    }


def quorum_of(members, **options):
    return {"BACKEND": QUORUM, "OPTIONS": {"of": list(members), **options}}


def claim(key="key", **options):
    return Claim(key=key, **{"ttl": 60.0, "holder": "somebody", **options})


eventually = partial(timing.eventually, but=(LockBackendError,))


@pytest.fixture(scope="module")
def redises():
    """Five independent Redis servers that keep their grants."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Redis(appendonly="yes", appendfsync="always"))
            for _ in range(5)
        ]


@pytest.fixture
def five(request, redises):
    for server in redises:
        if server.process is None:
            server.start()
        with server.client() as client:
            client.flushall()
    if request.cls is not None:
        request.cls.servers = redises
    yield redises
    for server in redises:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.usefixtures("five")
class TestQuorum(BackendContract, SimpleTestCase):
    def make_backend(self, grace=0.0, **options):
        members = {
            f"redis{number}": redis_alias(server, grace=grace)
            for number, server in enumerate(self.servers)
        }
        # No member is down here, so a slow one is waited for.
        options = {"node_timeout": 10.0, **options}
        changed = override_settings(
            DLOCKS={**members, "quorum": quorum_of(members, **options)}
        )
        changed.enable()
        self.addCleanup(changed.disable)
        return backends["quorum"]

    def settle(self, key):
        def is_free(alias):
            # A slow member may still have an earlier holder that never released. A
            # member whose reply and whose cancellation were lost may have a holder that
            # the other members did not grant. Both end when the lease expires.
            holder = backends[alias].holder(key)
            return holder is None or holder.stale

        eventually(lambda: all(map(is_free, self.backend.of)), seconds=45)


@pytest.fixture
def redlock(five, aliases):
    """The quorum, with its members by number.

    ``process`` starts another process with the same settings.
    """
    members = {
        f"redis{number}": redis_alias(server) for number, server in enumerate(five)
    }
    # The timeout is longer than a machine stalls. Tests in which a member does
    # not reply set their own.
    process = aliases(**members, quorum=quorum_of(members, node_timeout=10.0))

    return SimpleNamespace(
        backend=backends["quorum"],
        members=[backends[alias] for alias in members],
        servers=five,
        process=process,
    )


def test_a_quorum_loses_no_updates(redlock, count_together):
    crowd = [redlock.process() for _ in range(3)]
    count_together(crowd, volume(30), using="quorum")


@pytest.mark.parametrize("how", ["crashed", "stopped"])
def test_a_quorum_of_five_works_without_two_but_not_three(
    how, redlock, in_other_thread
):
    def lose(server):
        if how == "crashed":
            server.crash()
        else:
            server.process.send_signal(signal.SIGSTOP)

    redlock.backend.node_timeout = 2.0
    lock = db_lock("key", using="quorum", timeout=0)
    for server in redlock.servers[:2]:
        lose(server)
    with lock as hold:
        with pytest.raises(LockTimeout, match="held by"):
            in_other_thread(lock.acquire)
        hold.check()
        hold.renew()
    lock.acquire().release()
    lose(redlock.servers[2])
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


def test_a_hold_on_lost_members_ends_by_its_deadline(redlock):
    hold = db_lock("key", using="quorum", ttl=3.0).acquire()
    for server in redlock.servers[:3]:
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
    # The member receives the claim only now. A minute of its ttl is left.
    redlock.members[4].holder("key")
    eventually(lambda: redlock.members[4].holder("key") is None)
    for member in redlock.members[:3]:
        assert member.release(other)
    assert redlock.backend.acquire(claim())


def test_a_split_vote_does_not_wait_for_silent_members(redlock):
    """A claim with two of the three replies is cancelled at once.

    The next claim needs all three members.
    """
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
    """The hold survives while each of five members loses its data in turn.

    Renewals restore the hold on members that have lost it, but do not restore a lost
    lease.
    """
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


def test_a_grant_slower_than_its_ttl_does_not_count(redlock):
    redlock.backend.node_timeout = 10.0
    for member in redlock.members:
        member.holder("key")
    for server in redlock.servers[:3]:
        server.process.send_signal(signal.SIGSTOP)
    sent = threading.Event()

    def go_on():
        sent.wait(10)
        time.sleep(1.3)
        for server in redlock.servers[:3]:
            server.process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    began = time.monotonic()
    sent.set()
    hold = db_lock("key", using="quorum", ttl=1.0, timeout=20).acquire()
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


def test_a_quorum_hold_lasts_no_longer_than_a_majority_grants(settings, until):
    members = {
        f"memory{number}": {
            "BACKEND": f"{__name__}.ShortMemory",
            "OPTIONS": {"grace": 0},
        }
        for number in range(3)
    }
    settings.DLOCKS = {
        **members,
        "quorum": quorum_of(members),
        "other": quorum_of(members, node_timeout=10.0),
    }
    hold = db_lock("key", using="quorum", ttl=30).acquire()
    first = hold._state.lease.deadline
    assert 1.0 < hold.remaining <= 4.0
    # It is renewed before these seconds have passed, however long the ttl.
    until(lambda: hold._state.lease.deadline > first + 4.0)
    assert hold.held
    for alias in members:
        backends[alias].answers = False
    with db_lock("key", using="other", timeout=10).acquire():
        assert not hold.held


def test_the_largest_token_of_a_majority_may_not_grow(settings):
    """A quorum has no fencing token, although its members have.

    The documentation explains this.
    """
    members = {f"memory{number}": {"BACKEND": MEMORY} for number in range(3)}
    settings.DLOCKS = members
    ahead, one, other = (backends[alias] for alias in members)
    first = claim()
    ahead.acquire(claim("warm"))
    granted = {member: member.acquire(first) for member in (ahead, one)}
    # The first member's clock is ahead of the others.
    state = ahead._states["key"]
    ahead._states["key"] = dataclasses.replace(
        state, version=state.version + 3_600_000_000
    )
    first_token = max(ahead.acquire(first).token, granted[one].token)
    for member in (ahead, one):
        member.release(first)
    second = claim()
    # The next majority shares a member with the first, and the token of that member has
    # grown.
    second_tokens = [member.acquire(second).token for member in (one, other)]
    assert second_tokens[0] > granted[one].token
    assert max(second_tokens) < first_token


# Use cases and limits.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("using", "guard"), [("quorum", False), ("brisk", True)])
def test_a_pause_breaks_a_quorum_but_not_a_guarded_commit(using, guard, redlock):
    """A holder that is stopped for longer than its lease writes too late.

    Only the guarded commit detects this, however many members had agreed.
    """
    row = Counter.objects.create(name="stock", value=7)
    late = redlock.process()
    late.start(jobs.write_under, "stock", "stock", 1, guard=guard, ttl=0.6, using=using)
    late.hear()
    late.stop()
    with db_lock("stock", using=using, timeout=20):
        Counter.objects.filter(pk=row.pk).update(value=8)
        late.resume()
        late.tell()
        outcome, _ = late.hear()
        row.refresh_from_db()
        if guard:
            assert (outcome, row.value) == ("LockLost", 8)
        else:
            assert (outcome, row.value) == ("written, and lost", 1)


# Databases.


def test_a_quorum_of_three_different_databases(start, doomed, tmp_path, count_together):
    """A quorum of PostgreSQL, MariaDB and SQLite survives the loss of one.

    Without two of them, acquiring raises ``LockBackendError``.
    """
    import MySQLdb

    postgresql, mariadb = start(PostgreSQL()), start(MariaDB())
    admin = MySQLdb.connect(host="127.0.0.1", port=mariadb.port, user="root")
    admin.cursor().execute("CREATE DATABASE dlocks CHARACTER SET utf8mb4")
    admin.close()
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
            {**members, "quorum": quorum_of(members, node_timeout=10.0)}
        ),
    }
    crowd = [doomed(**environment) for _ in range(2)]
    crowd[0].call(jobs.migrate_databases, *databases)
    count_together(crowd, volume(15), using="quorum")
    postgresql.crash()
    count_together(crowd, volume(15), using="quorum")
    mariadb.crash()
    assert crowd[0].call(jobs.acquire, "key", using="quorum") == "LockBackendError"


# Settings and secrets.


WRONG = [
    (["one", "two"], "odd number of aliases, not 2"),
    ([], "odd number of aliases, not 0"),
    (["one", "two", "one"], "names an alias twice"),
    (["one", "two", "quorum"], "names 'quorum' itself"),
    ("one", "of must be a list of aliases"),
    (
        ["one", "two", "nobody"],
        "'nobody' cannot be a member: DLOCKS has no alias 'nobody'",
    ),
    (["one", "two", "dummy"], "'dummy' cannot be a member: it is a DummyBackend"),
    (["one", "two", "inner"], "'inner' cannot be a member: it is a QuorumBackend"),
    (
        ["one", "two", "tenant"],
        "'tenant' cannot be a member: its prefix is a function",
    ),
    (
        ["one", "redis", "same"],
        "'redis' and 'same' keep their locks in the same place",
    ),
    (
        ["one", "two", "wrong"],
        "'wrong' cannot be a member: .*url is not a URL of Redis",
    ),
]


def test_an_invalid_quorum_is_reported_by_check_and_first_use(settings):
    there = {
        "BACKEND": "dlocks.backends.redis.RedisBackend",
        "OPTIONS": {"url": f"redis://:{SECRET}@localhost:1/0"},
    }
    aliases = {
        "one": {"BACKEND": MEMORY},
        "two": {"BACKEND": MEMORY},
        "three": {"BACKEND": MEMORY},
        "dummy": {"BACKEND": "dlocks.backends.dummy.DummyBackend"},
        "tenant": {"BACKEND": MEMORY, "OPTIONS": {"prefix": lambda: "acme:"}},
        "inner": quorum_of(["one", "two", "three"]),
        "redis": there,
        "same": there,
        "wrong": {**there, "OPTIONS": {"url": f"redis://:{SECRET}@localhost:1/shop"}},
    }
    for of, message in WRONG:
        wrong = {"BACKEND": QUORUM, "OPTIONS": {"of": of}}
        settings.DLOCKS = {**aliases, "quorum": wrong}
        with pytest.raises(ImproperlyConfigured, match=message) as raised:
            db_lock("key", using="quorum").acquire()
        told = "".join(traceback.format_exception(raised.value))
        assert "DLOCKS['quorum']" in told
        assert SECRET not in told
        checks = [one for one in check_settings() if "DLOCKS['quorum']" in one.msg]
        assert [one.id for one in checks] == ["dlocks.E002"], of


def test_errors_of_quorum_members_contain_no_secret(start, aliases, caplog):
    servers = [start(Redis()) for _ in range(3)]
    members = {
        f"redis{number}": redis_alias(
            server, url=f"redis://:{SECRET}@127.0.0.1:{server.port}/0"
        )
        for number, server in enumerate(servers)
    }
    aliases(**members, quorum=quorum_of(members))
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(LockBackendError, match="0 of 3 members answered") as raised,
    ):
        db_lock("key", using="quorum").acquire()
    told = (
        "".join(traceback.format_exception(raised.value))
        + caplog.text
        + repr(vars(backends["quorum"]))
    )
    assert "DLOCKS['redis1']" in told
    assert SECRET not in told
