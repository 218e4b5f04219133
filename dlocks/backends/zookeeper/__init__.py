"""Locks in a ZooKeeper ensemble."""

from dlocks.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
