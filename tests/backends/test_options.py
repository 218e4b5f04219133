"""Options of the backends with a client of their own.

Each option is accepted, or refused with its alias and name.
"""

from __future__ import annotations

import inspect
import logging
import ssl
from types import SimpleNamespace
from urllib.parse import quote

import pytest
import redis
from django.core.exceptions import ImproperlyConfigured
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlocks import db_lock
from tests.internals import (
    KEYWORDS,
    OPTIONS,
    TLS_OPTIONS,
    RedisBackend,
    ZooKeeperBackend,
    backends,
    check_settings,
    options_of,
)
from tests.promises.locks.test_fuzz import ANY, FUZZ, TEXT, refusals

REDIS, ZOOKEEPER = (
    "dlocks.backends.redis.RedisBackend",
    "dlocks.backends.zookeeper.ZooKeeperBackend",
)
FEWER = settings(FUZZ, max_examples=60)
FOREIGN = [
    *("socket_timeout", "socket_connect_timeout", "decode_responses", "protocol"),
    *("retry", "retry_on_timeout", "timeout", "retry_on_error", "connection_class"),
    *("credential_provider", "host", "port", "path", "encoding", "lib_name"),
    "nonsense",
]


@FEWER
@given(
    one=st.sampled_from(
        [(REDIS, name) for name in sorted(options_of(RedisBackend))]
        + [(ZOOKEEPER, name) for name in sorted(options_of(ZooKeeperBackend))]
    ),
    value=ANY,
)
@example(one=(ZOOKEEPER, "client"), value={1: 2, "use_ssl": True})
@example(one=(REDIS, "url"), value="redis://a..b")
@example(one=(REDIS, "url"), value="redis://host/-1")
def test_a_wrong_option_is_named(one, value):
    """Any value of an option is accepted, or refused with its alias and name.

    The system check and the lock agree.
    """
    path, name = one
    assert all(
        "DLOCKS['fuzzed']" in said and name in said
        for said in refusals(path, {name: value})
    )


@FEWER
@given(
    scheme=st.sampled_from(
        ["redis://localhost", "rediss://localhost", "unix:///tmp/redis.sock"]
    ),
    option=st.sampled_from([*OPTIONS, *TLS_OPTIONS, *FOREIGN]),
    value=st.sampled_from(
        ["", "0", "1", "-1", "3.5", "true", "no", "none", "required", "x"]
    )
    | TEXT,
    more=st.sampled_from(
        [{}, {"cluster": True}, {"sentinels": ["redis://localhost:26379"]}]
    ),
)
def test_a_url_option_is_honoured_or_refused_by_name(scheme, option, value, more):
    """An option of a Redis URL reaches the connection or is refused by name.

    It never causes a KeyError or TypeError.
    """
    quoted = quote(value, errors="surrogatepass")
    said = refusals(REDIS, {"url": f"{scheme}?{option}={quoted}", **more})
    if not said and more != {"cluster": True}:
        backend = RedisBackend("fuzzed", url=f"{scheme}?{option}={quoted}", **more)
        assert backend._connected().connection_pool.make_connection()
        assert option not in FOREIGN
    elif said and "unix" not in scheme:
        assert all(
            "DLOCKS['fuzzed']" in one and (option in one or "database 0" in one)
            for one in said
        )


def test_unsupported_redis_url_options_are_refused_by_name(aliases):
    """The lock and the check name the alias and an unsupported URL option."""
    unknown = "url has the option '{}', which dlocks does not pass on"
    for query, message in [
        (
            "socket_timeout=5",
            "url has the option 'socket_timeout': set OPTIONS['socket_timeout']",
        ),
        ("decode_responses=true", unknown.format("decode_responses")),
        ("protocol=3", unknown.format("protocol")),
        (
            "ssl_cert_reqs=none",
            "url has the option 'ssl_cert_reqs', which is for rediss:// only",
        ),
        (
            "max_connections=many",
            "url has a wrong value for the option 'max_connections'",
        ),
    ]:
        options = {"url": f"redis://localhost/0?{query}"}
        aliases(redis={"BACKEND": REDIS, "OPTIONS": options})
        with pytest.raises(ImproperlyConfigured) as refused:
            db_lock("stock:7", using="redis").acquire()
        assert f"DLOCKS['redis']['OPTIONS']: {message}" in str(refused.value)
        assert [one.id for one in check_settings()] == ["dlocks.E002"]


def test_redis_url_options_are_honoured(redis_server, aliases):
    """The database, client name and connection limit of a URL take effect."""
    more = "client_name=shop&max_connections=7&health_check_interval=9"
    url = f"{redis_server.url.removesuffix('/0')}?db=3&{more}"
    aliases(redis={"BACKEND": REDIS, "OPTIONS": {"url": url}})
    assert check_settings() == []
    with db_lock("stock:7", using="redis"):
        client = backends["redis"]._client
        (mine,) = [one for one in client.client_list() if one["name"] == "shop"]
        assert mine["db"] == "3"
        assert client.connection_pool.max_connections == 7
        assert client.connection_pool.connection_kwargs["health_check_interval"] == 9


def test_certificates_are_verified_as_the_url_says(monkeypatch):
    """ssl_cert_reqs of a rediss:// URL reaches a connection, also of a cluster."""
    for verified, mode in [("none", ssl.CERT_NONE), ("required", ssl.CERT_REQUIRED)]:
        url = f"rediss://localhost?ssl_cert_reqs={verified}&ssl_check_hostname=no"
        pool = RedisBackend("redis", url=url)._connected().connection_pool
        assert pool.make_connection().cert_reqs == mode
    used = {}
    client = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(
        "redis.RedisCluster", lambda **keywords: used.update(keywords) or client
    )
    url = "rediss://10.0.0.5?ssl_cert_reqs=none"
    RedisBackend("redis", url=url, cluster=True)._connected()
    assert used.keys() <= inspect.signature(redis.Redis).parameters.keys()
    expected = {"ssl": True, "ssl_cert_reqs": "none", "host": "10.0.0.5"}
    assert expected.items() <= used.items()


@FEWER
@given(client=st.dictionaries(st.sampled_from(sorted(KEYWORDS)), ANY, max_size=2))
@example(
    client={"logger": logging.getLogger("kazoo"), "connection_retry": {"max_tries": 3}}
)
@example(client={"connection_retry": {"tries": 3}})
def test_kazoo_keywords_are_accepted_or_refused_by_name(client):
    """The check refuses a wrong keyword for kazoo's client before it connects."""
    assert all(
        "DLOCKS['fuzzed']" in said and "client" in said
        for said in refusals(ZOOKEEPER, {"client": client})
    )
