"""The servers themselves: they are there, and they end with the test."""

from __future__ import annotations

from tests.servers import ZooKeeper, asked


def test_redis_answers(redis_server):
    assert asked(redis_server.port, b"PING\r\n").startswith(b"+PONG")


def test_zookeeper_answers_and_ends(start):
    server = start(ZooKeeper())
    assert b"Mode: standalone" in asked(server.port, b"srvr")
    server.stop()
    assert asked(server.port, b"srvr") == b""
