"""The requests that are sent to an ensemble, as functions of kazoo's client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Request = Callable[[Any], Any]


def sync(client: Any) -> Any:
    return client.sync_async("/")


def children(path: str) -> Request:
    return lambda client: client.get_children_async(path)


def read(path: str, watch: Callable[[Any], object] | None = None) -> Request:
    # exists() would leave a permanent watch on a node that is gone.
    return lambda client: client.get_async(path, watch)


def exists(path: str) -> Request:
    return lambda client: client.exists_async(path)


def delete(path: str) -> Request:
    return lambda client: client.delete_async(path)


def write(path: str, data: bytes, version: int) -> Request:
    return lambda client: client.set_async(path, data, version)


def create(
    path: str, data: bytes, acl: Sequence[Any], *, in_queue: bool = False
) -> Request:
    """Return a request that creates a node.

    The node is permanent. With ``in_queue``, it is numbered and ends with the session.
    """
    return lambda client: client.create_async(
        path, data, acl=acl, ephemeral=in_queue, sequence=in_queue, include_data=True
    )
