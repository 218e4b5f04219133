"""Clients of redis-py for one server, a cluster, or Sentinels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool


def keywords_of(timeout: float) -> dict[str, Any]:
    """Return the keyword arguments of every client.

    Connecting and each reply may take ``timeout`` seconds. No client retries, because
    ``Requests`` does.
    """
    return {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "decode_responses": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }


class Address:
    """A URL of Redis. Neither its text nor ``url`` contains the password."""

    def __init__(self, name: str, url: object, *login: str | None) -> None:
        if not isinstance(url, str):
            raise TypeError(f"{name} must be a string, not {type(url).__name__}")
        try:
            parts = urlsplit(url)
            self.scheme, self.host = parts.scheme, parts.hostname or "localhost"
            options = dict(parse_qsl(parts.query))
            path = "" if self.scheme == "unix" else parts.path.strip("/")
            # A database in the URL's query precedes the one in its path.
            self.database = int(options.get("db", path or 0))
            if self.database < 0 or "\0" in url or not self.host.encode("idna"):
                raise ValueError(url)
            self.place = f"{self.host}:{parts.port or 6379}/{self.database}"
            if self.scheme == "unix":
                self.place = f"{parts.path}/{self.database}"
            secret = [
                given
                or unquote(getattr(parts, option) or "")
                or options.pop(option, "")
                for option, given in zip(
                    ("username", "password"), login or ("", ""), strict=True
                )
            ]
            server = parts.netloc.rpartition("@")[2] + parts.path
            self.url = f"{self.scheme}://{server}?{urlencode(options)}"
            self.keywords: dict[str, Any] = {}
            if any(secret):
                # The client's repr() shows its arguments.
                provider = UsernamePasswordCredentialProvider(*secret)
                self.keywords["credential_provider"] = provider
            # redis-py checks its options without connecting.
            client_of(self, timeout=1.0).connection_pool.make_connection()
        except (TypeError, ValueError, redis.RedisError):
            # The original error may quote part of a password.
            raise ValueError(
                f"{name} is not a URL of Redis, as in"
                " 'redis://user:password@host:6379/0' (or rediss:// or unix://), with"
                " options that redis-py accepts. Special characters in a password must"
                " be percent-encoded."
            ) from None
        if clash := sorted(keywords_of(0.0).keys() & options):
            raise ValueError(f"{name} has the option {clash[0]!r}, which dlocks sets")

    def __str__(self) -> str:
        return self.place


def client_of(
    address: Address,
    *,
    cluster: bool = False,
    sentinels: Sequence[Address] = (),
    timeout: float,
) -> Any:
    """Return a client of a server, a cluster, or the master that Sentinels know."""
    keywords = {**address.keywords, **keywords_of(timeout)}
    if cluster:
        return redis.RedisCluster.from_url(address.url, **keywords)
    if not sentinels:
        return redis.Redis.from_url(address.url, **keywords)
    watch = Sentinel([])  # type: ignore[no-untyped-call]
    watch.sentinels = [client_of(one, timeout=timeout) for one in sentinels]
    pool = SentinelConnectionPool.from_url(
        # The pool has connection classes of its own.
        address.url.replace("rediss:", "redis:", 1),
        service_name=address.host,
        sentinel_manager=watch,
        ssl=address.scheme == "rediss",
        **keywords,
    )
    return redis.Redis.from_pool(pool)


def factory_at(path: object) -> Callable[..., Any]:
    """Return the function that makes the clients of a project."""
    try:
        factory = import_string(path) if isinstance(path, str) else None
    except ImportError as error:
        raise ValueError(f"client cannot be imported: {error}") from error
    if not callable(factory):
        raise TypeError("client must be the dotted path of a function")

    def make(timeout: float) -> Any:
        client = factory(**keywords_of(timeout))
        known = isinstance(client, redis.Redis | redis.RedisCluster)
        if not (known and client.get_encoder().decode_responses):
            raise ImproperlyConfigured(
                f"{path} must return a redis.Redis or redis.RedisCluster that gets the"
                " keyword arguments of the call"
            )
        return client

    return make
