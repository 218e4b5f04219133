"""The client of a Redis, as its options and a fork leave it."""

from __future__ import annotations

import os
import signal
import ssl
import threading
from types import SimpleNamespace

from dlocks import db_lock
from tests.internals import RedisBackend, backends
from tests.promises.backends.others import REDIS
from tests.servers import Redis, free_port
from tests.timing import eventually


def test_certificates_are_verified_as_the_url_says(monkeypatch):
    """ssl_cert_reqs of a rediss:// URL reaches a connection.

    This is also true for a cluster, and for the master that Sentinels know.
    """
    for verified, mode in [("none", ssl.CERT_NONE), ("required", ssl.CERT_REQUIRED)]:
        url = f"rediss://localhost?ssl_cert_reqs={verified}&ssl_check_hostname=no"
        for sentinels in ([], ["redis://localhost:1"]):
            backend = RedisBackend("redis", url=url, sentinels=sentinels)
            pool = backend._requests.client().connection_pool
            assert pool.make_connection().cert_reqs == mode
    used = []
    client = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(
        "redis.RedisCluster.from_url",
        lambda url, **keywords: used.append(url) or client,
    )
    url = "rediss://10.0.0.5?ssl_cert_reqs=none"
    RedisBackend("redis", url=url, cluster=True)._requests.client()
    assert used == [url]


def fork_while_busy(pipe, key, *, using):
    """Fork while another thread is inside the client of a Redis cluster.

    Return the status of the child, which acquires the key.
    """
    with db_lock(key, using=using) as held:
        token = held.token
    inside, forked = threading.Event(), threading.Event()

    def ask():
        # Every request takes this lock for a moment.
        with backends[using]._requests._client.nodes_manager._lock:
            inside.set()
            forked.wait(60)

    thread = threading.Thread(target=ask)
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if child == 0:
        # It ends if it hangs.
        signal.alarm(20)
        with db_lock(key, using=using) as held:
            os._exit(0 if held.token > token else 1)
    forked.set()
    thread.join()
    return os.waitpid(child, 0)[1]


def test_a_forked_child_can_use_a_busy_cluster_client(start, aliases):
    node = start(Redis(**{"cluster-enabled": "yes", "cluster-port": free_port()}))
    with node.client() as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: client.cluster("info")["cluster_state"] == "ok")
    options = {"url": node.url, "cluster": True}
    parent = aliases(cluster={"BACKEND": REDIS, "OPTIONS": options})()
    assert parent.call(fork_while_busy, "key", using="cluster") == 0
