"""The fast lookup of connections, which agrees with Django's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from asgiref.sync import sync_to_async
from django.db import connections, transaction

from tests.for_each import for_each
from tests.internals import connected, connection_of, in_atomic_blocks, open_connections

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


@pytest.fixture
def keep_connections():
    """Return a function that lets asgiref keep connections in another way.

    Close all connections before each call, because the next store does not have them.
    """
    # Asked here, since asgiref keeps a value elsewhere in the event loop of a test.
    is_plain = connected._is_plain()
    with pytest.MonkeyPatch.context() as patch:

        def keep(store):
            patch.undo()
            if store == "as asgiref might":
                patch.setattr(connected, "_is_plain", lambda: False)
                patch.setattr(connected, "_known", (None, None))
            elif store == "as another library":
                kept = threading.local()
                for connection in connections.all(initialized_only=True):
                    setattr(kept, connection.alias, connection)
                patch.setattr(connections, "_connections", kept)
            elif store == "by another lookup":
                kind = type(connections)
                found = kind.__getitem__
                patch.setattr(kind, "__getitem__", lambda self, name: found(self, name))
            else:
                # If this fails, the slower lookup is used and everything still works.
                # Check what has changed in asgiref's ``Local``.
                assert is_plain

        yield keep
        connections.close_all()


STORES = ["as asgiref", "as asgiref might", "as another library", "by another lookup"]


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


@for_each("store", STORES)
def test_each_thread_has_its_own_connection(store, keep_connections, in_other_thread):
    """A new thread has none. Replaced and deleted connections are noticed.

    The live server of the tests replaces the connections of its threads.
    """

    def opened(before=agree):
        before()
        return [*in_atomic_blocks(), *open_connections()]

    def take_over():
        connections["default"] = mine
        return agree()

    connections.close_all()
    keep_connections(store)
    mine = agree()
    assert in_other_thread(opened, lambda: None) == []
    assert in_other_thread(agree) is not mine
    assert agree() is mine
    with transaction.atomic():
        assert list(open_connections()) == [mine]
        assert in_other_thread(opened) == []
    assert list(open_connections()) == []
    with ThreadPoolExecutor(1) as other:
        assert other.submit(take_over).result() is mine
    del connections["default"]
    try:
        assert agree() is not mine
    finally:
        connections["default"] = mine


@for_each("store", STORES)
async def test_a_coroutine_has_its_own_connection(store, keep_connections):
    await sync_to_async(connections.close_all)()
    keep_connections(store)
    mine = agree()
    # This runs in Django's single thread, which is the thread of this test.
    assert await sync_to_async(agree)() is not mine
    assert agree() is mine
