"""The servers of these tests start, and end with the test."""

from __future__ import annotations

import socket

import pytest

from tests.servers import Redis, ZooKeeper, asked


def test_redis_answers(redis_server):
    assert asked(redis_server.port, b"PING\r\n").startswith(b"+PONG")


def test_zookeeper_answers_and_ends(start):
    server = start(ZooKeeper())
    assert b"Mode: standalone" in asked(server.port, b"srvr")
    server.stop()
    assert asked(server.port, b"srvr") == b""


def test_a_restarted_server_gets_its_port_again(start):
    server = start(Redis())
    server.crash()
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", server.port))
    server.start()
    assert asked(server.port, b"PING\r\n").startswith(b"+PONG")
