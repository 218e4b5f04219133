"""The fast lookup of connections, which agrees with Django's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from tests.internals import connected, connection_of, in_atomic_blocks, open_connections

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


class Kept(threading.local):
    """A thread-local store of another library in place of asgiref's."""


@pytest.fixture(
    params=[
        "as asgiref keeps them",
        "as it might keep them",
        "as another library does",
        "by another lookup",
    ]
)
def asgiref(request, monkeypatch):
    if request.param == "as it might keep them":
        monkeypatch.setattr(connected, "_is_plain", lambda: False)
        monkeypatch.setattr(connected, "_known", (None, None))
    elif request.param == "as another library does":
        kept = Kept()
        for connection in connections.all(initialized_only=True):
            setattr(kept, connection.alias, connection)
        monkeypatch.setattr(connections, "_connections", kept)
    elif request.param == "by another lookup":
        found = type(connections).__getitem__
        monkeypatch.setattr(
            type(connections), "__getitem__", lambda self, alias: found(self, alias)
        )


def agree():
    """Return the current connection, and check it against Django's lookup.

    It also checks that ``in_atomic_blocks()`` finds the same connections as Django.
    """
    connection = connection_of("default")
    assert connection is connections["default"]
    before, connection.in_atomic_block = connection.in_atomic_block, True
    try:
        there = connections.all(initialized_only=True)
        assert connection in in_atomic_blocks()
        assert {id(one) for one in in_atomic_blocks()} == {
            id(one) for one in there if one.in_atomic_block
        }
    finally:
        connection.in_atomic_block = before
    assert (connection in in_atomic_blocks()) == before
    return connection


def test_the_fast_lookup_knows_the_storage_of_asgiref():
    """The fast lookup matches how asgiref stores its values.

    If this fails, the slower lookup is used and everything else still works. Check what
    has changed in asgiref's ``Local``.
    """
    assert connected._is_plain()


def test_each_thread_has_its_own_connection(asgiref, in_other_thread):
    """A new thread has none. Replaced and deleted connections are noticed.

    The live server of the tests replaces the connections of its threads.
    """

    def opened(before=agree):
        before()
        return [*in_atomic_blocks(), *open_connections()]

    mine = agree()
    assert in_other_thread(opened, lambda: None) == []
    assert in_other_thread(agree) is not mine
    assert agree() is mine
    with transaction.atomic():
        assert list(open_connections()) == [mine]
        assert in_other_thread(opened) == []
    assert list(open_connections()) == []

    def take_over():
        connections["default"] = mine
        return agree()

    with ThreadPoolExecutor(1) as other:
        assert other.submit(take_over).result() is mine
    del connections["default"]
    try:
        assert agree() is not mine
    finally:
        connections["default"] = mine


async def test_a_coroutine_has_its_own_connection(asgiref):
    from asgiref.sync import sync_to_async

    mine = agree()
    # This runs in Django's single thread, which is the thread of this test.
    theirs = await sync_to_async(agree)()
    assert theirs is not mine
    assert agree() is mine
