"""Settings of the backends on other servers: each is honoured or refused by name."""

from __future__ import annotations

import math
import traceback

import pytest
from django.core.exceptions import ImproperlyConfigured

from dlocks import db_lock
from tests import pages
from tests.promises.backends.others import (
    MEMORY,
    QUORUM,
    REDIS,
    ZOOKEEPER,
    quorum,
    reported,
)
from tests.scripts import run_python

SECRET = "open-sesame"
WRONG = {
    REDIS: [
        ({"url": f"http://:{SECRET}@host"}, "url is not a URL of Redis"),
        ({"url": f"redis://:{SECRET}/rest@host:1/0"}, "percent-encoded"),
        ({"url": f"redis://:{SECRET}@host:1/shop"}, "url is not a URL of Redis"),
        ({"url": f"redis://:{SECRET}@host:99999"}, "url is not a URL of Redis"),
        ({"url": "redis://a..b"}, "url"),
        ({"url": 6379}, "url must be a string"),
        *(
            ({"url": f"redis://host?{name}=3"}, f"option '{name}', which dlocks sets")
            for name in ("decode_responses", "protocol", "socket_timeout")
        ),
        *(
            ({"url": f"redis://:{SECRET}@host?{wrong}"}, "options that redis-py acc")
            for wrong in (
                *("max_connections=many", "health_check_intervals=3"),
                *("ssl_cert_reqs=none", "db=-1", "db=shop", "password=other"),
            )
        ),
        ({"url": "rediss://host?ssl_cert_reqs=maybe"}, "options that redis-py accepts"),
        ({"password": 7}, "password must be a string"),
        ({"username": b"shop"}, "username must be a string"),
        ({"client": "redis"}, "client cannot be imported"),
        ({"client": "shop.missing.client"}, "client cannot be imported"),
        ({"client": "dlocks.values.UNLIMITED"}, "dotted path of a function"),
        (
            {"client": "redis.from_url", "password": SECRET},
            "client replaces the options that name a server",
        ),
        ({"sentinels": f"redis://:{SECRET}@host"}, "sentinels must be a list"),
        ({"sentinels": [f"{SECRET}@host"]}, "sentinels is not a URL"),
        ({"cluster": 1}, "cluster must be True or False"),
        ({"cluster": True, "url": f"redis://:{SECRET}@host/3"}, "only database 0"),
        (
            {"cluster": True, "sentinels": [f"redis://:{SECRET}@host"]},
            "cannot be combined",
        ),
        ({"socket_timeout": 0}, "socket_timeout must be above 0"),
        ({"secret": SECRET}, "unknown option 'secret'"),
    ],
    QUORUM: [
        ({"of": of}, message)
        for of, message in [
            (["one", "two"], "odd number of aliases, not 2"),
            ([], "odd number of aliases, not 0"),
            (["one", "two", "one"], "names an alias twice"),
            (["one", "two", "wrong"], "names 'wrong' itself"),
            ("one", "of must be a list of aliases"),
            (["one", "two", "no"], "'no' cannot be a member: DLOCKS has no alias 'no'"),
            (["one", "two", "dummy"], "'dummy' cannot be a member: it is a DummyB"),
            (["one", "two", "inner"], "'inner' cannot be a member: it is a QuorumB"),
            (
                ["one", "two", "tenant"],
                "'tenant' cannot be a member: its prefix is a function",
            ),
            (
                ["one", "redis", "same"],
                "'redis' and 'same' keep their locks in the same place",
            ),
            (
                ["one", "two", "shop"],
                "'shop' cannot be a member: .*url is not a URL of Redis",
            ),
        ]
    ],
    ZOOKEEPER: [
        ({"hosts": "zk1:2181/locks"}, "hosts must be like"),
        ({"hosts": "zk1:port"}, "hosts must be like"),
        ({"hosts": ""}, "hosts must be like"),
        ({"hosts": ["zk1", 7]}, "a list of strings"),
        ({"root": "locks"}, "root must be a path"),
        ({"root": "/"}, "root must be a path"),
        ({"root": "/zookeeper/locks"}, "root must be a path"),
        ({"root": "/a/../b"}, "root must be a path"),
        ({"session_timeout": 0}, "session_timeout must be above 0"),
        ({"connect_timeout": "5"}, "connect_timeout must be a number"),
        ({"auth": SECRET}, "auth must be like 'user:password'"),
        ({"client": {"hosts": "x"}}, "client is refused by KazooClient: .*hosts"),
        ({"client": {"handler": None}}, "client is refused by KazooClient: .*handler"),
        ({"client": {"ues_ssl": True}}, "client is refused by KazooClient: .*ues_ssl"),
        ({"client": "tls"}, "client is refused by KazooClient"),
        ({"client": {1: 2, "use_ssl": True}}, "client is refused by KazooClient"),
        (
            {"client": {"connection_retry": {"tries": 3}}},
            "client is refused by KazooClient",
        ),
        ({"port": 2181}, "unknown option 'port'"),
    ],
}


def aliases():
    """Return the aliases that may be members of a quorum, and some that may not."""
    there = {"BACKEND": REDIS, "OPTIONS": {"url": f"redis://:{SECRET}@localhost:1/0"}}
    return {
        **{name: {"BACKEND": MEMORY} for name in ("one", "two", "three")},
        "dummy": {"BACKEND": "dlocks.backends.dummy.DummyBackend"},
        "tenant": {"BACKEND": MEMORY, "OPTIONS": {"prefix": lambda: "acme:"}},
        "inner": quorum(["one", "two", "three"]),
        "redis": there,
        "same": there,
        "shop": {**there, "OPTIONS": {"url": f"redis://:{SECRET}@localhost:1/shop"}},
    }


@pytest.mark.parametrize("path", WRONG)
def test_a_wrong_option_is_named_by_the_check_and_by_the_lock(path, settings):
    """Both name the alias, and neither shows a password."""
    for options, message in WRONG[path]:
        wrong = {"BACKEND": path, "OPTIONS": options}
        settings.DLOCKS = {**aliases(), "wrong": wrong}
        with pytest.raises(ImproperlyConfigured, match=message) as raised:
            db_lock("key", using="wrong").acquire()
        told = "".join(traceback.format_exception(raised.value))
        assert "DLOCKS['wrong']" in told
        (check,) = reported("wrong")
        assert check.id == "dlocks.E002"
        assert SECRET not in f"{told}{check}{check.hint}", options


@pytest.mark.parametrize("page", ["redis", "quorum", "zookeeper"])
def test_any_value_of_an_option_is_accepted_or_refused_by_name(page, settings):
    path = {"redis": REDIS, "quorum": QUORUM, "zookeeper": ZOOKEEPER}[page]
    needed = {"of": ["one", "two", "three"]} if page == "quorum" else {}
    for option in pages.options_in(f"how-to/{page}"):
        for value in (
            *(None, True, -1, 0, 3, 2**31, 10**400, 1e308, math.nan, math.inf),
            *(object(), len, b"x", "", "x", "redis://host/-1", "a:b", "\0\ud800"),
            *([], ["x"], {}, {"x": 1}, {1: 2}),
        ):
            tried = {"BACKEND": path, "OPTIONS": {**needed, option: value}}
            settings.DLOCKS = {**aliases(), "tried": tried}
            for check in reported("tried"):
                assert option in check.msg, (option, value, check)


def test_redis_url_options_are_honoured(redis_server, settings):
    """The database and the client name of a URL take effect."""
    more = "client_name=shop&max_connections=7&health_check_interval=9"
    url = f"{redis_server.url.removesuffix('/0')}?db=3&{more}"
    settings.DLOCKS = {"redis": {"BACKEND": REDIS, "OPTIONS": {"url": url}}}
    assert reported("redis") == []
    with redis_server.client() as client, db_lock("stock:7", using="redis"):
        (mine,) = [one for one in client.client_list() if one["name"] == "shop"]
        assert mine["db"] == "3"


def test_without_redis_py_only_the_redis_alias_fails():
    code = """
import sys
sys.modules["redis"] = None
import django
from django.conf import settings
settings.configure(DLOCKS={
    "redis": {"BACKEND": "dlocks.backends.redis.RedisBackend"},
    "default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
})
django.setup()
import dlocks.backends.quorum
print(dlocks.db_lock("key").acquire().held)
dlocks.db_lock("key", using="redis").acquire()
"""
    ended = run_python("-c", code)
    assert ended.stdout == "True\n"
    assert "DLOCKS['redis']" in ended.stderr
    assert "pip install 'dlocks[redis]'" in ended.stderr
