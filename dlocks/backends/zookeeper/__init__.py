"""Locks in a ZooKeeper ensemble."""

try:
    import kazoo  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ZooKeeperBackend needs kazoo: pip install 'dlocks[zookeeper]'"
    ) from error
from dlocks.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
