"""Locks in Redis: one server, a cluster, or Sentinels."""

from dlocks.backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
