"""Redis clients for URLs of one server, a cluster, or Sentinels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.credentials import UsernamePasswordCredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel

SCHEMES = ("redis", "rediss", "unix")

# The options of a URL that are passed on to redis-py, each with a test of its value.
OPTIONS: dict[str, Callable[[Any], bool]] = {
    "username": bool,
    "password": bool,
    "client_name": bool,
    "db": lambda value: int(value) >= 0,
    "health_check_interval": lambda value: value >= 0,
    "max_connections": lambda value: value > 0,
    "socket_keepalive": lambda value: isinstance(value, bool),
}
TLS_OPTIONS: dict[str, Callable[[Any], bool]] = {
    "ssl_cert_reqs": {"none", "optional", "required"}.__contains__,
    "ssl_check_hostname": lambda value: isinstance(value, bool),
    **dict.fromkeys(
        ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile", "ssl_password"),
        bool,
    ),
}


class Address:
    """A validated URL of Redis. Its text does not contain the password."""

    def __init__(self, name: str, url: object) -> None:
        if not isinstance(url, str):
            raise TypeError(f"{name} must be a string, not {type(url).__name__}")
        try:
            parts = urlsplit(url)
            self.host, self.port = parts.hostname or "localhost", parts.port or 6379
            if parts.scheme not in SCHEMES:
                raise ValueError(url)
            if parts.scheme != "unix" and int(parts.path.strip("/") or 0) < 0:
                raise ValueError(url)
            if "\0" in url or not self.host.encode("idna"):
                raise ValueError(url)
        except ValueError:
            # The original error may quote part of a password.
            raise ValueError(
                f"{name} is not a URL of Redis, as in"
                " 'redis://user:password@host:6379/0' (or rediss:// or unix://)."
                " Special characters in a password must be percent-encoded."
            ) from None
        keywords = _keywords(
            name, url, parts.scheme, parse_qs(parts.query, keep_blank_values=True)
        )
        # A database in the URL's query precedes the one in its path.
        database = int(keywords.get("db") or 0)
        if parts.scheme == "unix":
            self.place = parts.path + (f"/{database}" if database else "")
        else:
            self.place = f"{self.host}:{self.port}/{database}"
        secret = keywords.pop("username", None), keywords.pop("password", None)
        if any(secret):
            # The client's repr() shows all arguments, and it is in every traceback that
            # shows variables.
            keywords["credential_provider"] = UsernamePasswordCredentialProvider(
                *secret
            )
        self.keywords: dict[str, Any] = keywords

    def __str__(self) -> str:
        return self.place


def _keywords(
    name: str, url: str, scheme: str, options: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return redis-py's keyword arguments for a URL.

    Raise ValueError with the name of a wrong option.
    """
    allowed = OPTIONS | (TLS_OPTIONS if scheme == "rediss" else {})
    if scheme == "unix":
        del allowed["socket_keepalive"]
    for option in options:
        if option in allowed:
            continue
        if option in TLS_OPTIONS:
            raise ValueError(
                f"{name} has the option {option!r}, which is for rediss:// only"
            )
        if option == "socket_timeout":
            raise ValueError(
                f"{name} has the option 'socket_timeout': set OPTIONS['socket_timeout']"
                " instead"
            )
        # A malformed name may be a part of a password.
        which = (
            f"the option {option!r}"
            if option.isidentifier() and option.islower()
            else "an option"
        )
        raise ValueError(
            f"{name} has {which}, which dlocks does not pass on; a URL may have"
            f" {', '.join(allowed)}"
        )
    for option in options:
        # Each option is parsed alone, so that the error can name it without its value.
        one = f"{url.partition('?')[0]}?{urlencode({option: options[option][0]})}"
        try:
            keywords = dict(redis.connection.parse_url(one))  # type: ignore[no-untyped-call]
            fits = allowed[option](keywords.get(option))
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ValueError(f"{name} has a wrong value for the option {option!r}")
    return dict(redis.connection.parse_url(url))  # type: ignore[no-untyped-call]


def client(
    address: Address, *, cluster: bool, sentinels: Sequence[Address], timeout: float
) -> Any:
    """Return a client for the address whose requests time out.

    Connecting and each reply may take ``timeout`` seconds. No client retries.
    """
    common: dict[str, Any] = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "decode_responses": True,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    if not (cluster or sentinels):
        return _server(address, common)
    keywords = dict(address.keywords)
    # These clients create the connections to their servers themselves.
    connection_class = keywords.pop("connection_class", redis.Connection)
    keywords["ssl"] = issubclass(connection_class, redis.SSLConnection)
    if cluster:
        keywords.pop("db", None)
        return redis.RedisCluster(**keywords, **common)
    for name in ("host", "port"):
        keywords.pop(name, None)
    watch = Sentinel([], **common, **keywords)  # type: ignore[no-untyped-call]
    watch.sentinels = [_server(sentinel, common) for sentinel in sentinels]
    return watch.master_for(address.host)  # type: ignore[no-untyped-call]


def _server(address: Address, common: dict[str, Any]) -> Any:
    return redis.Redis.from_pool(redis.ConnectionPool(**address.keywords, **common))
