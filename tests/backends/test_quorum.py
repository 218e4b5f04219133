"""Majorities: of backends in memory, of five real Redises, and of three databases of different kinds."""

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
import redis
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test import SimpleTestCase, override_settings

from dlocks import LockBackendError, LockLost, LockTimeout, db_lock
from dlocks.backends.base import Claim
from dlocks.backends.memory import MemoryBackend
from dlocks.conf import backends
from dlocks.exceptions import LockStale
from dlocks.testing import BackendContract
from tests import jobs, timing
from tests.models import Counter
from tests.servers import MariaDB, PostgreSQL, Redis
from tests.timing import in_time

QUORUM = "dlocks.backends.quorum.QuorumBackend"
MEMORY = "dlocks.backends.memory.MemoryBackend"
SECRET = "open-sesame"


def redis_alias(server, **options):
    return {
        "BACKEND": "dlocks.backends.redis.RedisBackend",
        "OPTIONS": {"url": f"redis://127.0.0.1:{server.port}/0", "socket_timeout": 5.0, "grace": 0, **options},
    }


def quorum_of(members, **options):
    return {"BACKEND": QUORUM, "OPTIONS": {"of": list(members), **options}}


def claim(key="key", **options):
    return Claim(key=key, **{"ttl": 60.0, "holder": "somebody", **options})


eventually = partial(timing.eventually, but=(LockBackendError,))


class OfMany:
    def members(self, **options):
        raise NotImplementedError

    def make_backend(self, grace=0.0, **options):
        members = self.members(grace=grace)
        # Nobody here stays away: who is slow is waited for.
        options = {"node_timeout": 10.0, **options}
        changed = override_settings(DLOCKS={**members, "quorum": quorum_of(members, **options)})
        changed.enable()
        self.addCleanup(changed.disable)
        return backends["quorum"]


class TestOfMemory(OfMany, BackendContract, SimpleTestCase):
    def members(self, **options):
        return {f"memory{number}": {"BACKEND": MEMORY, "OPTIONS": options} for number in range(3)}


@pytest.fixture(scope="module")
def redises():
    """Five that know nothing of each other, and keep what they have granted."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Redis(appendonly="yes", appendfsync="always")) for _ in range(5)]


@pytest.fixture
def five(request, redises):
    for server in redises:
        if server.process is None:
            server.start()
        with redis.Redis(port=server.port) as client:
            client.flushall()
    if request.cls is not None:
        request.cls.servers = redises
    yield redises
    for server in redises:
        if server.process is not None:
            server.process.send_signal(signal.SIGCONT)


@pytest.mark.usefixtures("five")
class TestOfRedises(OfMany, BackendContract, SimpleTestCase):
    def members(self, **options):
        return {f"redis{number}": redis_alias(server, **options) for number, server in enumerate(self.servers)}

    def settle(self, key):
        def is_free(alias):
            # A member that was slow may have a holder of before, who never gave it back; or, where it never answered
            # and what takes that back was lost too, one that others did not agree on, until its lease is over.
            holder = backends[alias].holder(key)
            return holder is None or holder.stale

        eventually(lambda: all(map(is_free, self.backend.of)), seconds=45)


@pytest.fixture
def redlock(five, aliases):
    """The quorum, with its members by number; ``process`` starts another process of the same settings."""
    members = {f"redis{number}": redis_alias(server) for number, server in enumerate(five)}
    # Longer than a machine stands still. Where a member gives no answer, the test says how long that one is waited for.
    process = aliases(**members, quorum=quorum_of(members, node_timeout=10.0))

    return SimpleNamespace(
        backend=backends["quorum"], members=[backends[alias] for alias in members], servers=five, process=process
    )


def test_processes_that_count_under_a_majority_lose_nothing(redlock, tmp_path):
    path = tmp_path / "counter"
    path.write_text("0 0")
    crowd = [redlock.process() for _ in range(3)]
    for one in crowd:
        one.start(jobs.count, str(path), "count", times=30, scope="lease", using="quorum", timeout=60)
    for one in crowd:
        one.hear()
    assert path.read_text().split()[0] == "90"


@pytest.mark.parametrize("how", ["crashed", "stopped"])
def test_losing_two_of_five_works_and_losing_three_is_could_not_ask(how, redlock, elsewhere):
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
            elsewhere(lock.acquire)
        hold.check()
        hold.renew()
    lock.acquire().release()
    lose(redlock.servers[2])
    began = time.monotonic()
    with pytest.raises(
        LockBackendError, match=r"DLOCKS\['quorum'\]: 2 of 5 members could be asked, and 3 have to"
    ) as raised:
        lock.acquire()
    # It was asked and given up, each within node_timeout: nobody waited for the answer that did not come.
    in_time(time.monotonic() - began, 10.0)
    assert "redis2" in str(raised.value)


def test_a_hold_on_members_that_are_lost_ends_by_its_deadline(redlock):
    hold = db_lock("key", using="quorum", ttl=3.0).acquire()
    for server in redlock.servers[:3]:
        server.crash()
    with pytest.raises(LockBackendError):
        hold.check()
    eventually(lambda: not hold.held)
    with pytest.raises(LockLost):
        hold.release()


def test_what_was_not_granted_by_a_majority_is_given_up_everywhere(redlock):
    other = claim(holder="another")
    for member in redlock.members[:3]:
        assert member.acquire(other)
    assert redlock.backend.acquire(claim()) is None
    for member in redlock.members[3:]:
        eventually(lambda member=member: member.holder("key") is None)


def test_what_was_not_granted_is_given_up_also_where_no_answer_came_from(redlock):
    other = claim(holder="another")
    for member in redlock.members[:3]:
        assert member.acquire(other)
    redlock.members[4].holder("key")
    redlock.backend.node_timeout = 2.0
    redlock.servers[4].process.send_signal(signal.SIGSTOP)
    assert redlock.backend.acquire(claim()) is None
    redlock.servers[4].process.send_signal(signal.SIGCONT)
    # It hears of the claim only now: of its ttl a minute is left.
    redlock.members[4].holder("key")
    eventually(lambda: redlock.members[4].holder("key") is None)
    for member in redlock.members[:3]:
        assert member.release(other)
    assert redlock.backend.acquire(claim())


def test_a_vote_that_is_split_does_not_wait_for_members_that_owe_answers(redlock):
    """Who has two of the three that answer gives them back at once: the next one needs all three."""
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


def test_who_has_a_minority_does_not_keep_the_others_out(redlock):
    other = claim(holder="another")
    for member in redlock.members[:2]:
        assert member.acquire(other)
    mine = claim()
    assert redlock.backend.acquire(mine)
    assert redlock.backend.holder("key").holder == "somebody"
    assert redlock.backend.renew([mine])
    assert redlock.backend.release(mine)


def test_members_that_come_back_without_what_they_granted_are_won_back(redlock):
    """Each of five forgets in its turn, and the hold stands: its renewals tell those that do not know of it."""
    mine = claim()
    redlock.backend.acquire(mine)
    for server, member in zip(redlock.servers, redlock.members, strict=True):
        with redis.Redis(port=server.port) as client:
            client.flushall()
        assert member.holder("key") is None
        assert mine.owner in redlock.backend.renew([mine])
        eventually(lambda member=member: member.holder("key") is not None)
    assert redlock.backend.acquire(claim()) is None
    assert redlock.backend.release(mine)


def test_a_lease_that_was_lost_is_not_won_back(redlock):
    mine = claim()
    redlock.backend.acquire(mine)
    for server in redlock.servers[:3]:
        with redis.Redis(port=server.port) as client:
            client.flushall()
    assert redlock.backend.renew([mine]) == {}
    assert redlock.backend.acquire(claim())


def test_a_grant_that_took_longer_than_its_ttl_is_none(redlock):
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
    # The first answer came too late. It was given up, and asked for again.
    assert time.monotonic() - began > 1.3
    assert hold.held
    hold.release()
    thread.join()


def test_a_stale_key_is_left_to_a_person_where_the_lock_says_so(redlock):
    redlock.backend.acquire(claim(ttl=0.05))
    eventually(lambda: all(member.holder("key").stale for member in redlock.members))
    with pytest.raises(LockStale):
        redlock.backend.acquire(claim(takeover=False))
    for member in redlock.members[2:]:
        assert member.acquire(claim(holder="another"))
    assert redlock.backend.acquire(claim(takeover=False)) is None


class ShortMemory(MemoryBackend):
    """Answers for four seconds at a time, as ZooKeeper does for the time of its session."""

    renew_every = 0.3
    answers = True

    def acquire(self, claim):
        grant = super().acquire(claim)
        return grant and dataclasses.replace(grant, lease=self._shortened(claim))

    def renew(self, claims):
        if not self.answers:
            raise LockBackendError("cut off")
        left = super().renew(claims)
        return {claim.owner: self._shortened(claim) for claim in claims if claim.owner in left}

    def _shortened(self, claim):
        self._entries[claim.key].ends_at = self.time() + 4.0
        return 4.0


def test_nobody_believes_to_hold_for_longer_than_a_majority_answers_for(settings, until):
    members = {
        f"memory{number}": {"BACKEND": f"{__name__}.ShortMemory", "OPTIONS": {"grace": 0}} for number in range(3)
    }
    settings.DLOCKS = {**members, "quorum": quorum_of(members), "other": quorum_of(members, node_timeout=10.0)}
    hold = db_lock("key", using="quorum", ttl=30).acquire()
    first = hold._deadline
    assert 1.0 < hold.remaining <= 4.0
    # Renewed before that is over, however long the ttl.
    until(lambda: hold._deadline > first + 4.0)
    assert hold.held
    for alias in members:
        backends[alias].answers = False
    with db_lock("key", using="other", timeout=10).acquire():
        assert not hold.held


def test_the_largest_token_of_a_majority_need_not_grow(settings):
    """Why a quorum has no fencing token, though its members have: what the documentation works out."""
    members = {f"memory{number}": {"BACKEND": MEMORY} for number in range(3)}
    settings.DLOCKS = members
    ahead, one, other = (backends[alias] for alias in members)
    first = claim()
    ahead.acquire(claim("warm"))
    granted = {member: member.acquire(first) for member in (ahead, one)}
    # The first member's clock is ahead of the others'.
    ahead._entries["key"].token += 3_600_000_000
    first_token = max(ahead.acquire(first).token, granted[one].token)
    for member in (ahead, one):
        member.release(first)
    second = claim()
    # The next majority has a member in common with it, whose token has grown.
    second_tokens = [member.acquire(second).token for member in (one, other)]
    assert second_tokens[0] > granted[one].token
    assert max(second_tokens) < first_token


# What it is good for, and what not.


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("using", "guard"), [("quorum", False), ("brisk", True)])
def test_the_pause_that_breaks_a_quorum_and_not_a_guarded_commit(using, guard, redlock):
    """The holder is stopped for longer than its lease, before it writes: however many members had agreed."""
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


def test_a_majority_of_three_databases_of_different_kinds(start, doomed, tmp_path):
    """PostgreSQL, MariaDB and SQLite: one can be lost, and without two of them there is nobody to ask."""
    import MySQLdb

    postgresql, mariadb = start(PostgreSQL()), start(MariaDB())
    admin = MySQLdb.connect(host="127.0.0.1", port=mariadb.port, user="root")
    admin.cursor().execute("CREATE DATABASE dlocks CHARACTER SET utf8mb4")
    admin.close()
    there = {"HOST": "127.0.0.1", "NAME": "dlocks"}
    databases = {
        "one": {**there, "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "PORT": postgresql.port}
        | {"USER": "dlocks"},
        "two": {**there, "ENGINE": "django.db.backends.mysql", "PORT": mariadb.port, "USER": "root"},
        "three": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": str(tmp_path / "three.sqlite3"),
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        },
    }
    members = {
        name: {"BACKEND": "dlocks.backends.database.PessimisticBackend", "OPTIONS": {"database": name}}
        for name in databases
    }
    environment = {
        "DLOCKS_TEST_DATABASES": json.dumps(databases),
        "DLOCKS_TEST_ALIASES": json.dumps({**members, "quorum": quorum_of(members, node_timeout=10.0)}),
    }
    crowd = [doomed(**environment) for _ in range(2)]
    crowd[0].call(jobs.migrate_databases, *databases)
    path = tmp_path / "counter"
    path.write_text("0 0")

    def count(number):
        for one in crowd:
            one.start(jobs.count, str(path), "count", times=20, scope="lease", using="quorum", timeout=60)
        for one in crowd:
            one.hear()
        assert int(path.read_text().split()[0]) == number

    count(40)
    postgresql.crash()
    count(80)
    mariadb.crash()
    assert crowd[0].call(jobs.acquire, "key", using="quorum") == "LockBackendError"


# Settings, and secrets.


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (["one", "two"], "odd number of aliases, not 2"),
        ([], "odd number of aliases, not 0"),
        (["one", "two", "one"], "names an alias twice"),
        (["one", "two", "quorum"], "names 'quorum' itself"),
        ("one", "of must be a list of aliases"),
        (["one", "two", "nobody"], "'nobody' cannot be a member: DLOCKS has no alias 'nobody'"),
        (["one", "two", "dummy"], "'dummy' cannot be a member: it is a DummyBackend"),
        (["one", "two", "inner"], "'inner' cannot be a member: it is a QuorumBackend"),
        (["one", "redis", "same"], "'redis' and 'same' keep their locks in the same place"),
        (["one", "two", "wrong"], "'wrong' cannot be a member: .*url is not a URL of Redis"),
    ],
)
def test_a_quorum_that_is_none_is_told_by_a_check_and_by_the_first_use(of, message, settings):
    there = {"BACKEND": "dlocks.backends.redis.RedisBackend", "OPTIONS": {"url": f"redis://:{SECRET}@localhost:1/0"}}
    settings.DLOCKS = {
        "one": {"BACKEND": MEMORY},
        "two": {"BACKEND": MEMORY},
        "three": {"BACKEND": MEMORY},
        "dummy": {"BACKEND": "dlocks.backends.dummy.DummyBackend"},
        "inner": quorum_of(["one", "two", "three"]),
        "redis": there,
        "same": there,
        "wrong": {**there, "OPTIONS": {"url": f"redis://:{SECRET}@localhost:1/shop"}},
        "quorum": quorum_of([]) | {"OPTIONS": {"of": of}},
    }
    with pytest.raises(ImproperlyConfigured, match=message) as raised:
        db_lock("key", using="quorum").acquire()
    told = "".join(traceback.format_exception(raised.value))
    assert "DLOCKS['quorum']" in told
    assert SECRET not in told
    checks = [one for one in run_checks(tags=["dlocks"]) if "DLOCKS['quorum']" in one.msg]
    assert [one.id for one in checks] == ["dlocks.E002"]


def test_what_members_say_of_their_trouble_has_no_secret(start, aliases, caplog):
    servers = [start(Redis(requirepass="something else")) for _ in range(3)]
    members = {
        f"redis{number}": redis_alias(server, url=f"redis://:{SECRET}@127.0.0.1:{server.port}/0")
        for number, server in enumerate(servers)
    }
    aliases(**members, quorum=quorum_of(members))
    with caplog.at_level(logging.DEBUG), pytest.raises(LockBackendError, match="0 of 3 members could be") as raised:
        db_lock("key", using="quorum").acquire()
    told = "".join(traceback.format_exception(raised.value)) + caplog.text + repr(vars(backends["quorum"]))
    assert "DLOCKS['redis1']" in told
    assert SECRET not in told
