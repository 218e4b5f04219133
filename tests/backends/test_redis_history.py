"""The history of locks in Redis: each known recipe, and what breaks it.

docs/how-to/redis.md refers to this file.
"""

from __future__ import annotations

import time

import pytest
import redis


@pytest.fixture
def client(redis_server):
    with redis.Redis(port=redis_server.port, decode_responses=True) as client:
        client.flushall()
        yield client


def gone(client, key):
    while client.exists(key):
        time.sleep(0.01)


def test_setnx_then_expire_never_expires_if_the_client_dies(client):
    assert client.setnx("lock", "1")
    # The client dies here, so EXPIRE is never sent.
    assert not client.setnx("lock", "1")
    assert client.ttl("lock") == -1


def test_getset_lets_a_loser_change_the_lease_of_the_winner(client):
    """Each client that sees an expired time sets a new one with GETSET.

    It holds the lock if GETSET returns the expired value.
    """
    client.set("lock", 100)
    now = 101
    seen = {who: int(client.get("lock")) for who in "AB"}
    assert all(time < now for time in seen.values())
    assert int(client.getset("lock", now + 10)) == seen["A"]
    # A holds the lock until 111. B has lost, but has written 141 by its own clock.
    assert int(client.getset("lock", now + 40)) != seen["B"]
    assert int(client.get("lock")) == 141
    # A can release only by deleting the key, even if it belongs to another client by
    # then. A client whose clock is ahead takes over any lock.
    ahead = 200
    assert int(client.get("lock")) < ahead


def test_set_nx_px_without_an_owner_is_deleted_by_a_late_holder(client):
    assert client.set("lock", "1", nx=True, px=50)
    gone(client, "lock")
    # A pauses for longer than its lease, and B acquires the lock.
    assert client.set("lock", "1", nx=True, px=30_000)
    # A wakes up and releases B's lock.
    client.delete("lock")
    assert client.set("lock", "1", nx=True, px=30_000), "B and C both hold the lock"


def test_compare_and_delete_in_two_steps_deletes_another_owner(client):
    assert client.set("lock", "A", nx=True, px=1000)
    assert client.get("lock") == "A"
    # Between the two steps the lease expires, and B acquires the lock.
    gone(client, "lock")
    assert client.set("lock", "B", nx=True, px=30_000)
    client.delete("lock")
    assert client.set("lock", "C", nx=True, px=30_000), "B and C both hold the lock"


def test_a_token_drawn_after_the_grant_favours_a_late_holder(client):
    assert client.set("lock", "A", nx=True, px=50)
    gone(client, "lock")
    assert client.set("lock", "B", nx=True, px=30_000)
    of_b = client.incr("token")
    # A wakes up between the two commands.
    of_a = client.incr("token")
    assert of_a > of_b
