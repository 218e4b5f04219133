"""How a URL becomes a client of Redis: one server, a cluster, or whatever the Sentinels say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel

SCHEMES = ("redis", "rediss", "unix")


class Address:
    """A URL of Redis that was understood. What is shown of it has no password."""

    def __init__(self, name: str, url: object) -> None:
        if not isinstance(url, str):
            raise TypeError(f"{name} must be a string, not {type(url).__name__}")
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname or "localhost", parts.port or 6379
            if parts.scheme not in SCHEMES:
                raise ValueError(url)
            keywords = dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]
            # Of the URL's query, if it is there.
            database = int(keywords.get("db") or 0)
            if parts.scheme == "unix":
                self.place = parts.path + (f"/{database}" if database else "")
            else:
                int(parts.path.strip("/") or 0)
                self.place = f"{self.host}:{self.port}/{database}"
        except ValueError:
            # Without its own words, which may quote half a password.
            raise ValueError(
                f"{name} is not a URL of Redis, as in 'redis://user:password@host:6379/0' (or rediss:// or unix://). "
                "What is special in a password has to be percent-encoded."
            ) from None
        secret = keywords.pop("username", None), keywords.pop("password", None)
        if any(secret):
            # The client, whose repr() tells all that it was made with, is in every traceback that shows variables.
            keywords["credential_provider"] = UsernamePasswordCredentialProvider(*secret)
        self.keywords: dict[str, Any] = keywords

    def __str__(self) -> str:
        return self.place


def client(address: Address, *, cluster: bool, sentinels: Sequence[Address], timeout: float) -> Any:
    """Return a client that tries once, and waits no longer than ``timeout`` for a connection or an answer."""
    common: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "decode_responses": True,
        "protocol": 2,
    }
    if cluster:
        keywords = {name: value for name, value in address.keywords.items() if name != "db"}
        return redis.RedisCluster(**keywords, **common, retry=Retry(NoBackoff(), CLUSTER_TRIES))
    common["retry"] = Retry(NoBackoff(), 0)
    if sentinels:
        keywords = {name: value for name, value in address.keywords.items() if name not in {"host", "port"}}
        secure = issubclass(keywords.pop("connection_class", redis.Connection), redis.SSLConnection)
        watch = Sentinel([], **common, **keywords, ssl=secure)  # type: ignore[no-untyped-call]
        watch.sentinels = [_server(sentinel, common) for sentinel in sentinels]
        return watch.master_for(address.host)  # type: ignore[no-untyped-call]
    return _server(address, common)


def _server(address: Address, common: dict[str, Any]) -> Any:
    return redis.Redis.from_pool(redis.ConnectionPool(**address.keywords, **common))


# How often a cluster's client asks again, with the slots looked up anew.
CLUSTER_TRIES = 3
