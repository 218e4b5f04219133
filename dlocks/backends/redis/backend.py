"""The Redis backend, for one server, a cluster, or Sentinels.

1. A claim acquires a key by writing its owner as the key's value, unless there is one.
   The value has a time to live of the ttl and the grace.
2. A renewal, a release and a handover first compare the owner. Each of these steps is
   one script inside Redis (``requests``).
3. A claim whose key is held joins a queue in Redis, and sends heartbeats.
4. The script that releases a key writes the owner of the first live waiter as its
   value, and notifies the channel of that waiter's process.
5. Each grant has a larger token than the last one, which Redis remembers for a day. A
   token is also not smaller than the server's clock in microseconds.
6. A claim that was released, cancelled or handed over is remembered for a minute, so a
   delayed request of it has no effect. So is the call that released it. Every request
   may therefore be sent again.

Redis may lose data. After a restart without its data, or a failover to a replica that
lagged, another caller can acquire a key that is held. Tokens then grow only as far as
the servers' clocks do (``supports_fencing`` is False).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, ClassVar
from urllib.parse import unquote

from django.views.decorators.debug import sensitive_variables

try:
    import redis
except ImportError as error:
    raise ImportError(
        "redis-py is not installed: pip install 'dlocks[redis]'"
    ) from error

from dlocks.backends.base import HANDOVER_LEASE, Backend, Inspector
from dlocks.backends.redis.client import Address, client_of, factory_at
from dlocks.backends.redis.requests import (
    RedisNotifier,
    Requests,
    milliseconds,
    name_of,
)
from dlocks.exceptions import LockBackendError, LockStale
from dlocks.values import Claim, Grant, Holder, Ticket, Waiter, seconds

logger = logging.getLogger("dlocks")

MICROSECONDS = 1_000_000
LOCAL = "redis://localhost:6379/0"


class RedisBackend(Backend):
    """A backend that keeps locks in Redis.

    ``url`` is ``redis://host:port/database``, ``rediss://`` for TLS, or ``unix://``.
    ``username`` and ``password`` may also be part of it. With ``cluster=True`` it is
    one node of a cluster. With ``sentinels``, a list of their URLs, its host is the
    name under which they know the master.

    ``client`` replaces these options. It is the dotted path of a function that passes
    its keyword arguments on to a client of redis-py, and returns that client.

    Connecting and each reply may take ``socket_timeout`` seconds. Nothing is granted in
    the first ``settle`` seconds after Redis has started. If Redis forgets its data at a
    restart, set ``settle`` to the longest ttl in use.
    """

    supports_queue: ClassVar[bool] = True
    supports_handover: ClassVar[bool] = True
    supports_fencing: ClassVar[bool] = False
    unlisted = ""

    # Errors must not show the password.
    @sensitive_variables()
    def __init__(
        self,
        alias: str,
        *,
        url: str = LOCAL,
        username: str | None = None,
        password: str | None = None,
        cluster: bool = False,
        sentinels: Sequence[str] = (),
        client: str | None = None,
        socket_timeout: float = 2.0,
        settle: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        if not isinstance(cluster, bool):
            raise TypeError(
                f"cluster must be True or False, not {type(cluster).__name__}"
            )
        if isinstance(sentinels, str) or not isinstance(sentinels, Sequence):
            raise TypeError("sentinels must be a list of URLs")
        if cluster and sentinels:
            raise ValueError("cluster and sentinels cannot be combined")
        for name, value in (("username", username), ("password", password)):
            if not isinstance(value, str | None):
                raise TypeError(f"{name} must be a string")
        timeout = seconds("socket_timeout", socket_timeout, above_zero=True)
        self.socket_timeout = timeout
        self.settle = seconds("settle", settle)
        address = Address("url", url, username, password)
        watched = [Address("sentinels", sentinel) for sentinel in sentinels]
        make: Callable[..., Any] = partial(
            client_of, address, cluster=cluster, sentinels=watched
        )
        # Sentinels usually call their master "mymaster", so they are included.
        self._identity = " ".join(["redis", str(address), *sorted(map(str, watched))])
        self._where = f"Redis at {address}"
        if client is not None:
            if any((url != LOCAL, username, password, cluster, sentinels)):
                raise ValueError("client replaces the options that name a server")
            make = factory_at(client)
            self._identity = self._where = f"Redis of {client}"
        elif cluster or sentinels:
            if address.scheme == "unix":
                raise ValueError("url must name a host with cluster or sentinels")
            if cluster and address.database:
                raise ValueError("A cluster has only database 0")
            self._where = (
                f"the Redis cluster at {address}"
                if cluster
                else f"Redis at {address.host!r} of the Sentinels"
            )
        self._requests = Requests(
            f"DLOCKS[{alias!r}]: a request to {self._where}",
            partial(make, timeout=timeout),
            milliseconds(self.grace) if self.grace else 0,
            self.settle,
        )
        self.inspector = RedisInspector(self)

    @property
    def identity(self) -> str:
        return self._identity

    def _run(self, script: str, claim: Claim, *arguments: Any) -> Any:
        return self._requests.run(script, [(claim, arguments)])[0]

    def _read(self, script: str, key: str) -> Any:
        return self._run(script, Claim(key=key, ttl=0.0, owner=""))

    # The backend interface.

    def acquire(self, claim: Claim) -> Grant | None:
        answer = self._run(
            "acquire",
            claim,
            milliseconds(claim.ttl),
            claim.holder,
            claim.owner_ip or "",
            int(claim.takeover),
            int(claim.fair),
        )
        if answer is None:
            return None
        if answer == "stale":
            raise LockStale(key=claim.key, holder=self.holder(claim.key))
        if answer == "young":
            raise LockBackendError(
                f"DLOCKS[{self.alias!r}]: {self._where} started less than"
                f" {self.settle:g} s ago and may have lost its locks. Retry later."
            )
        token, takeover = answer
        return Grant(int(token), takeover=bool(takeover))

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        calls = [(claim, (milliseconds(claim.ttl),)) for claim in claims]
        answers = self._requests.run("renew", calls)
        left = {}
        for claim, answer in zip(claims, answers, strict=True):
            if answer:
                # A claim that could not be renewed keeps its remaining lease.
                left[claim.owner] = 0.0 if isinstance(answer, Exception) else claim.ttl
            if isinstance(answer, redis.ResponseError):
                logger.warning(
                    "DLOCKS[%r]: %r could not be renewed: %s",
                    self.alias,
                    claim.key,
                    answer,
                )
        return left

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        return count is not None and bool(self._run("verify", claims[0], count))

    def release(
        self, claim: Claim, *, failed: bool = False, rest_for: float = 0.0
    ) -> bool:
        keep = milliseconds(rest_for) if rest_for else 0
        status = "F" if failed else "S"
        return bool(self._run("release", claim, status, keep))

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        ttl, ip = milliseconds(successor.ttl), successor.owner_ip or ""
        token = self._run("exchange", claim, successor.owner, ttl, successor.holder, ip)
        return None if token is None else Grant(int(token))

    def holder(self, key: str) -> Holder | None:
        row = self._read("holder", key)
        if row is None:
            return None
        holder, ip, since, token, count, left, status = row
        began = datetime.fromtimestamp(int(since) / MICROSECONDS, UTC)
        remaining = int(left) / MICROSECONDS
        return Holder(
            key=key,
            holder=holder,
            owner_ip=ip or None,
            since=began if int(since) else None,
            remaining=remaining,
            token=int(token),
            count=int(count),
            stale=status == "P" and remaining <= 0,
        )

    def keys(self) -> list[str]:
        # Only the name of a lock, which exists while it is held, ends with the tag.
        names = self._requests.request(
            lambda client: {*client.scan_iter(name_of("*"), 1000)}
        )
        prefix, keys = self.prefix, (unquote(name[8:-1]) for name in names)
        return [key for key in keys if key.startswith(prefix)]

    @sensitive_variables()
    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        name, fields = name_of(key), ("token", "owner")
        ask = self._requests.request
        owner = ask(lambda client: client.get(name))
        token, last = ask(lambda client: client.hmget(f"{name}:last", fields))
        # Only the hold of this owner is released.
        claim = Claim(key=key, ttl=0.0, owner=last if owner is None else owner)
        return token == str(version) and self.release(claim, failed=True)

    # The queue.

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        waits = {
            "holder": claim.holder,
            "ip": claim.owner_ip or "",
            "takeover": claim.takeover,
            # The queue grants a short lease, which the keeper renews.
            "handover_ttl": milliseconds(min(claim.ttl, HANDOVER_LEASE)),
            "channel": channel,
        }
        at = "" if position is None else position
        number = self._run("queue", claim, json.dumps(waits), at)
        if number == "ask":
            return Ticket(must_retry=True)
        return Ticket(position=int(number))

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        calls = [(claim, (int(heartbeat),)) for claim in claims]
        answers = self._requests.run("look", calls)
        return {
            claim.owner: (
                Ticket(ahead=1) if isinstance(found, Exception) else _ticket(found)
            )
            for claim, found in zip(claims, answers, strict=True)
            if found
        }

    def waiting(self, key: str) -> int:
        return len(self._read("waiters", key)) // 2

    def notifier(self, channel: str) -> RedisNotifier | None:
        make = partial(RedisNotifier, self._requests, channel, self.socket_timeout)
        notifier: RedisNotifier = self._requests.request(make)
        return notifier


class RedisInspector(Inspector):
    backend: RedisBackend

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        found = self.backend._read("waiters", key)
        facts = [json.loads(claim) for claim in found[::2]]
        return [
            Waiter(
                holder=one["holder"],
                owner_ip=one["ip"] or None,
                waits_for=key.removeprefix(prefix),
                waited=max(0.0, int(waited) / MICROSECONDS),
            )
            for one, waited in zip(facts, found[1::2], strict=True)
        ]


def _ticket(found: Sequence[Any]) -> Ticket:
    if found[0] == "granted":
        _, token, left = found
        return Ticket(grant=Grant(int(token), int(left) / 1000))
    _, ahead, number, left, ask = found
    next_check = int(left) / 1000
    return Ticket(
        ahead=int(ahead),
        position=int(number),
        next_check=next_check if next_check > 0 else math.inf,
        must_retry=bool(ask),
    )
