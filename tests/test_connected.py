"""This thread's connections: the same as Django's own, found in less time."""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from dlocks import connected
from dlocks.connected import connection_of, in_atomic_blocks
from dlocks.transactions import open_connections

pytestmark = pytest.mark.django_db(transaction=True)


class Kept(threading.local):
    """Where somebody else has put a store of his own in the place of asgiref's."""


@pytest.fixture(params=["as asgiref keeps them", "as it might keep them", "as somebody else does", "by another lookup"])
def asgiref(request, monkeypatch):
    if request.param == "as it might keep them":
        monkeypatch.setattr(connected, "_is_plain", lambda: False)
        monkeypatch.setattr(connected, "_known", (None, None))
    elif request.param == "as somebody else does":
        kept = Kept()
        for connection in connections.all(initialized_only=True):
            setattr(kept, connection.alias, connection)
        monkeypatch.setattr(connections, "_connections", kept)
    elif request.param == "by another lookup":
        found = type(connections).__getitem__
        monkeypatch.setattr(type(connections), "__getitem__", lambda self, alias: found(self, alias))


def agree():
    """Return this thread's or task's connection, which is Django's own; it is known whether it is in a block."""
    connection = connection_of("default")
    assert connection is connections["default"]
    before, connection.in_atomic_block = connection.in_atomic_block, True
    try:
        there = connections.all(initialized_only=True)
        assert connection in in_atomic_blocks()
        assert {id(one) for one in in_atomic_blocks()} == {id(one) for one in there if one.in_atomic_block}
    finally:
        connection.in_atomic_block = before
    assert (connection in in_atomic_blocks()) == before
    return connection


def test_how_asgiref_keeps_them_is_known_here():
    """Otherwise all goes on as before, and takes longer: see what has changed in Local."""
    assert connected._is_plain()


def test_each_thread_has_its_own(asgiref, elsewhere):
    mine = agree()
    assert elsewhere(agree) is not mine
    assert agree() is mine


def test_a_thread_that_has_asked_for_none_has_none(asgiref, elsewhere):
    assert elsewhere(lambda: list(in_atomic_blocks())) == []
    assert elsewhere(lambda: list(open_connections())) == []


async def test_a_coroutine_has_its_own(asgiref):
    from asgiref.sync import sync_to_async

    mine = agree()
    # In Django's one thread, which is this test's own.
    theirs = await sync_to_async(agree)()
    assert theirs is not mine
    assert agree() is mine


def test_one_that_was_put_in_the_place_of_another_is_found(asgiref):
    """As a server for tests puts those of the test into its threads."""
    mine = agree()
    found = []

    def take_over():
        connections["default"] = mine
        found.append(agree())

    thread = threading.Thread(target=take_over)
    thread.start()
    thread.join()
    assert found == [mine]


def test_one_that_is_gone_is_made_anew(asgiref):
    mine = agree()
    del connections["default"]
    try:
        assert agree() is not mine
    finally:
        connections["default"] = mine


def test_those_in_a_transaction_are_known(asgiref, elsewhere):
    with transaction.atomic():
        assert list(open_connections()) == [connections["default"]]
        assert elsewhere(lambda: (agree(), list(open_connections()))[1]) == []
    assert list(open_connections()) == []
