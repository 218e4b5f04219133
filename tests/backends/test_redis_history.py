"""The steps by which the field got here, each with what breaks it: docs/how-to/redis.md tells them."""

from __future__ import annotations

import time

import pytest
import redis

from dlocks.backends.base import Claim
from dlocks.backends.redis import RedisBackend


@pytest.fixture
def client(redis_server):
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        yield client


def gone(client, key):
    while client.exists(key):
        time.sleep(0.01)


def test_setnx_then_expire_is_a_lock_for_ever_when_its_taker_dies_in_between(client):
    assert client.setnx("lock", "1")
    # Here it dies: nobody sends EXPIRE.
    assert not client.setnx("lock", "1")
    assert client.ttl("lock") == -1


def test_a_time_as_the_value_and_getset_let_a_loser_change_the_winner_s_lease(client):
    """Whoever finds that the time is over sets a new one, and has the lock if the one before was still the old."""
    client.set("lock", 100)
    now = 101
    seen = {who: int(client.get("lock")) for who in "AB"}
    assert all(time < now for time in seen.values())
    assert int(client.getset("lock", now + 10)) == seen["A"]
    # A has it until 111. B has lost, and has written 141 all the same, by its own clock.
    assert int(client.getset("lock", now + 40)) != seen["B"]
    assert int(client.get("lock")) == 141
    # To give it back, A can only delete it, whoever has it by then; and a clock that is ahead takes it from everybody.
    ahead = 200
    assert int(client.get("lock")) < ahead


def test_set_nx_px_without_an_owner_is_deleted_by_the_one_who_was_late(client):
    assert client.set("lock", "1", nx=True, px=50)
    gone(client, "lock")
    # A pauses for longer than its lease, and B takes the lock.
    assert client.set("lock", "1", nx=True, px=30_000)
    # A wakes up, and gives back what is B's.
    client.delete("lock")
    assert client.set("lock", "1", nx=True, px=30_000), "C has it, and so has B"


def test_an_owner_that_is_compared_and_deleted_in_two_steps_is_deleted_too_late(client):
    assert client.set("lock", "A", nx=True, px=1000)
    assert client.get("lock") == "A"
    # Between the two: the lease runs out, and B takes the lock.
    gone(client, "lock")
    assert client.set("lock", "B", nx=True, px=30_000)
    client.delete("lock")
    assert client.set("lock", "C", nx=True, px=30_000), "C has it, and so has B"


def test_a_token_drawn_after_the_grant_makes_the_late_one_look_newer(client):
    assert client.set("lock", "A", nx=True, px=50)
    gone(client, "lock")
    assert client.set("lock", "B", nx=True, px=30_000)
    of_b = client.incr("token")
    # A wakes up between the two commands.
    of_a = client.incr("token")
    assert of_a > of_b


def test_with_an_owner_compared_and_a_token_drawn_inside_of_redis_none_of_these_happens(client, redis_server):
    backend = RedisBackend("redis", url=f"redis://127.0.0.1:{redis_server.port}", grace=0.0)
    late, holder = Claim(key="lock", ttl=1.0), Claim(key="lock", ttl=30.0)
    first = backend.acquire(late)
    assert 0 < client.pttl("dlocks:{lock}") <= 1000
    gone(client, "dlocks:{lock}")
    second = backend.acquire(holder)
    assert second.token > first.token
    assert not backend.release(late)
    assert not backend.renew([late])
    assert client.get("dlocks:{lock}") == holder.owner
    assert backend.acquire(Claim(key="lock", ttl=30.0)) is None


def test_the_pause_that_no_lease_survives(client, redis_server):
    """A holder that pauses after its last check writes late; only who compares the token where it writes sees it."""
    backend = RedisBackend("redis", url=f"redis://127.0.0.1:{redis_server.port}", grace=0.0)
    late, holder = Claim(key="lock", ttl=0.05), Claim(key="lock", ttl=30.0)
    unfenced, fenced = {}, {}

    def write(store, token, value, *, compare):
        if not compare or token >= store.get("token", 0):
            store.update(token=token, value=value)

    first = backend.acquire(late)
    # The pause is here.
    gone(client, "dlocks:{lock}")
    second = backend.acquire(holder)
    for store, compare in ((unfenced, False), (fenced, True)):
        write(store, second.token, "new", compare=compare)
        write(store, first.token, "old", compare=compare)
    assert unfenced["value"] == "old"
    assert fenced["value"] == "new"
