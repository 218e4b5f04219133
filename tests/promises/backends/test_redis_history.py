"""The step that breaks each older recipe of a lock in Redis.

docs/how-to/redis.md refers to this file.
"""

from __future__ import annotations

import time

import pytest


@pytest.fixture
def client(redis_server):
    with redis_server.client(decode_responses=True) as client:
        client.flushall()
        yield client


def expire(client):
    """Let the lease of A expire, and let B acquire the lock."""
    while client.exists("lock"):
        time.sleep(0.01)
    assert client.set("lock", "B", nx=True, px=30_000)


def test_setnx_then_expire_never_expires_if_the_client_dies(client):
    # The client dies after SETNX, so EXPIRE is never sent.
    assert client.setnx("lock", "A")
    assert client.ttl("lock") == -1


def test_getset_lets_a_loser_change_the_lease_of_the_winner(client):
    """A client that finds an expired time with GETSET holds the lock until its own."""
    client.set("lock", 100)
    assert client.getset("lock", 111) == "100", "A holds the lock until 111"
    assert client.getset("lock", 141) == "111", "B does not"
    assert client.get("lock") == "141"


def test_set_nx_px_without_an_owner_is_deleted_by_a_late_holder(client):
    assert client.set("lock", "1", nx=True, px=50)
    expire(client)
    assert client.delete("lock"), "A releases the lock of B"


def test_compare_and_delete_in_two_steps_deletes_another_owner(client):
    assert client.set("lock", "A", nx=True, px=1000)
    assert client.get("lock") == "A"
    expire(client)
    assert client.delete("lock"), "A releases the lock of B"


def test_a_token_drawn_after_the_grant_favours_a_late_holder(client):
    assert client.set("lock", "A", nx=True, px=50)
    expire(client)
    of_b, of_a = client.incr("token"), client.incr("token")
    assert of_a > of_b, "A can still write after B"
