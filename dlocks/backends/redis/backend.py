"""The Redis backend, for one server, a cluster, or Sentinels.

A key's value in Redis is the owner of its hold, and it has a time to live. Each step is
one script inside Redis, which compares the owner first (see ``scripts``). The queue is
in Redis as well. The script that releases a key also grants it to the first waiter, and
notifies the channel of its process.

Redis may lose data. After a restart without its data, or a failover to a replica that
lagged, another caller can acquire a key that is held. Tokens then grow only as far as
the servers' clocks do (``supports_fencing`` is False).
"""

from __future__ import annotations

import json
import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, ClassVar

try:
    import redis
except ImportError as error:
    raise ImportError(
        "redis-py is not installed: pip install 'dlocks[redis]'"
    ) from error

from dlocks.backends.base import HANDOVER_LEASE, Backend
from dlocks.backends.notifiers import Notifier
from dlocks.backends.redis import scripts
from dlocks.backends.redis.connection import Address, client
from dlocks.exceptions import LockBackendError, LockStale
from dlocks.runtime.process import in_child
from dlocks.values import Claim, Grant, Holder, Message, Ticket, seconds

MICROSECONDS = 1_000_000

logger = logging.getLogger("dlocks")

# redis-py's own base class does not include the errors of a cluster.
TROUBLE = (redis.RedisError, redis.exceptions.RedisClusterException, OSError)
# Errors that apply to every key of a node or of the cluster. Other errors, for example
# while a slot is moving, apply only to their own keys.
SILENT = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.RedisClusterException,
    OSError,
)
OF_A_SLOT = redis.exceptions.SlotNotCoveredError


class RedisBackend(Backend):
    """A backend that keeps locks in Redis.

    ``url`` is ``redis://user:password@host:port/database``, ``rediss://`` for TLS, or
    ``unix://``. With ``cluster=True`` it is one node of a cluster. With ``sentinels``,
    a list of their URLs, its host is the name under which they know the master.

    Connecting and each reply may take ``socket_timeout`` seconds. Nothing is granted in
    the first ``settle`` seconds after Redis has started. If Redis forgets its data at a
    restart, set ``settle`` to the longest ttl in use.
    """

    supports_queue: ClassVar[bool] = True
    supports_handover: ClassVar[bool] = True
    supports_fencing: ClassVar[bool] = False

    def __init__(
        self,
        alias: str,
        *,
        url: str = "redis://localhost:6379/0",
        cluster: bool = False,
        sentinels: Sequence[str] = (),
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
        self._address = Address("url", url)
        if (cluster or sentinels) and "path" in self._address.keywords:
            raise ValueError(
                "url must name a host, not a socket, with cluster or sentinels"
            )
        if cluster and self._address.keywords.get("db"):
            raise ValueError("A cluster has only database 0")
        self._sentinels = [Address("sentinels", sentinel) for sentinel in sentinels]
        self._cluster = cluster
        self.socket_timeout = seconds("socket_timeout", socket_timeout, above_zero=True)
        self.settle = seconds("settle", settle)
        self._reset()
        _backends.add(self)

    def _reset(self) -> None:
        self._client: Any = None
        self._making = threading.Lock()

    @property
    def identity(self) -> str:
        # Sentinels usually call their master "mymaster", so they are included.
        return " ".join(
            ["redis", str(self._address), *sorted(map(str, self._sentinels))]
        )

    # The backend interface.

    def acquire(self, claim: Claim) -> Grant | None:
        answer = self._run(
            scripts.ACQUIRE,
            claim,
            _milliseconds(claim.ttl),
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
                f"DLOCKS[{self.alias!r}]: Redis at {self._address} started less than"
                f" {self.settle:g} s ago and may have lost its locks. Retry later."
            )
        token, takeover = answer
        return Grant(int(token), takeover=bool(takeover))

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        calls = [
            (claim.key, claim.owner, (_milliseconds(claim.ttl),)) for claim in claims
        ]
        answers = self._run_all(scripts.RENEW, calls)
        for claim, answer in zip(claims, answers, strict=True):
            if isinstance(answer, redis.ResponseError) and not isinstance(
                answer, OF_A_SLOT
            ):
                logger.warning(
                    "DLOCKS[%r]: %r could not be renewed: %s",
                    self.alias,
                    claim.key,
                    answer,
                )
        return {
            # A claim that could not be renewed keeps its remaining lease.
            claim.owner: 0.0 if isinstance(renewed, Exception) else claim.ttl
            for claim, renewed in zip(claims, answers, strict=True)
            if renewed
        }

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        return count is not None and bool(self._run(scripts.VERIFY, claims[0], count))

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        arguments = "F" if failed else "S", _milliseconds(keep) if keep else 0
        sent: list[Claim] = []
        released = bool(self._run(scripts.RELEASE, claim, *arguments, sent=sent))
        # The reply to the first request was lost. It may have released the key, which
        # another claim may hold by now.
        return released or len(sent) > 1

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        ttl, ip = _milliseconds(successor.ttl), successor.owner_ip or ""
        token = self._run(
            scripts.EXCHANGE, claim, successor.owner, ttl, successor.holder, ip
        )
        return None if token is None else Grant(int(token))

    def holder(self, key: str) -> Holder | None:
        (row,) = self._run_all(scripts.HOLDER, [(key, "", ())])
        if row is None:
            return None
        holder, ip, since, token, count, left, status = row
        remaining = int(left) / MICROSECONDS
        return Holder(
            key=key,
            holder=holder,
            owner_ip=ip or None,
            since=(
                datetime.fromtimestamp(int(since) / MICROSECONDS, UTC)
                if int(since)
                else None
            ),
            remaining=remaining,
            token=int(token),
            count=int(count),
            stale=status == "P" and remaining <= 0,
        )

    # The queue.

    def enqueue(
        self, claim: Claim, channel: str = "", position: int | None = None
    ) -> Ticket | None:
        waits = {
            "holder": claim.holder,
            "ip": claim.owner_ip or "",
            "takeover": claim.takeover,
            # The queue grants a short lease, which the keeper renews.
            "patience": _milliseconds(min(claim.ttl, HANDOVER_LEASE)),
            "channel": channel,
        }
        at = "" if position is None else position
        place, *now = self._run(scripts.QUEUE, claim, json.dumps(waits), at)
        if place == "ask":
            return Ticket(must_retry=True)
        return Ticket(position=int(place), clock=int(now[0]) / MICROSECONDS)

    def poll(
        self, claims: Sequence[Claim], *, heartbeat: bool = True
    ) -> Mapping[str, Ticket]:
        calls = [(claim.key, claim.owner, (int(heartbeat),)) for claim in claims]
        answers = self._run_all(scripts.LOOK, calls)
        return {
            claim.owner: (
                Ticket(ahead=1) if isinstance(found, Exception) else _place(found)
            )
            for claim, found in zip(claims, answers, strict=True)
            if found
        }

    def waiting(self, key: str) -> int:
        return int(self._run_all(scripts.WAITING, [(key, "", ())])[0])

    def notifier(self, channel: str) -> RedisNotifier | None:
        if not channel:
            return None
        notifier: RedisNotifier = self._asked(
            lambda client: RedisNotifier(
                client, channel, self.socket_timeout, self._failure
            )
        )
        return notifier

    # Requests.

    def _run(
        self,
        script: scripts.Script,
        claim: Claim,
        *arguments: Any,
        sent: list[Claim] | None = None,
    ) -> Any:
        """Run a script for a claim, and append the claim to ``sent`` per request."""

        def run(client: Any) -> Any:
            if sent is not None:
                sent.append(claim)
            return _evaluate(
                client, script, self._words(claim.key, claim.owner, arguments)
            )

        return self._asked(run)

    def _run_all(
        self, script: scripts.Script, calls: Sequence[tuple[str, str, tuple[Any, ...]]]
    ) -> list[Any]:
        """Run a script for each key, owner and arguments.

        This takes one round trip, except on a cluster. If some calls fail, their errors
        are in the result. If all fail, the first error is raised.
        """
        words = [self._words(*call) for call in calls]

        def run(client: Any) -> list[Any]:
            if self._cluster:
                return _evaluate_each(client, script, words)
            first: Any
            try:
                # The first call makes sure that the script is loaded.
                first = _evaluate(client, script, words[0])
            except redis.ResponseError as error:
                first = error
            with client.pipeline(transaction=False) as pipeline:
                for these in words[1:]:
                    pipeline.evalsha(script.sha, *these)
                return _unless_all_failed(
                    [first, *pipeline.execute(raise_on_error=False)]
                )

        return list(self._asked(run)) if words else []

    def _words(self, key: str, owner: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
        name = name_of(key)
        names = name, f"{name}:last", f"{name}:line", f"{name}:claims", f"{name}:gone"
        return (
            len(names),
            *names,
            _milliseconds(self.grace) if self.grace else 0,
            self.settle,
            owner,
            *arguments,
        )

    def _asked(self, work: Callable[[Any], Any]) -> Any:
        for last in (False, True):
            try:
                return work(self._connected())
            except redis.TimeoutError as error:
                raise self._failure(error) from error
            except redis.ConnectionError as error:
                # An open connection may have been cut since its last use. Every script
                # may be sent again.
                if last or isinstance(error, redis.AuthenticationError):
                    raise self._failure(error) from error
            except TROUBLE as error:
                raise self._failure(error) from error
        raise AssertionError("unreachable")

    def _connected(self) -> Any:
        if self._client is None:
            with self._making:
                if self._client is None:
                    self._client = client(
                        self._address,
                        cluster=self._cluster,
                        sentinels=self._sentinels,
                        timeout=self.socket_timeout,
                    )
        return self._client

    def _failure(self, error: Exception) -> LockBackendError:
        who = "the Redis cluster" if self._cluster else "Redis"
        where = (
            f"{self._address.host!r} of the Sentinels"
            if self._sentinels
            else str(self._address)
        )
        return LockBackendError(
            f"DLOCKS[{self.alias!r}]: a request to {who} at {where} failed: {error}"
        )

    def _forked(self) -> None:
        if self._client is not None:
            # Another thread of the parent may have used the client during the fork. Its
            # locks may then be held in the child.
            _inherited.append(self._client)
        self._reset()


class RedisNotifier(Notifier):
    """A listener that receives the notifications of one channel."""

    def __init__(
        self,
        client: Any,
        channel: str,
        timeout: float,
        failure: Callable[[Exception], LockBackendError],
    ) -> None:
        self._failure = failure
        self._told = client.pubsub()
        self._told.subscribe(channel)
        # No notification that is sent after this confirmation is missed.
        if self._told.get_message(timeout=timeout) is None:
            self.close()
            raise redis.TimeoutError("Timeout subscribing")

    def wait(self, timeout: float, claims: Sequence[Claim]) -> Sequence[Message]:
        messages: list[Message] = []
        try:
            told = self._told.get_message(timeout=timeout)
            while told is not None:
                # After a reconnect, the confirmation of the new subscription arrives as
                # well.
                if told["type"] == "message":
                    owner, token, ends = told["data"].split()
                    messages.append(
                        Message(
                            owner=owner, token=int(token), ends=int(ends) / MICROSECONDS
                        )
                    )
                told = self._told.get_message(timeout=0)
        except TROUBLE as error:
            raise self._failure(error) from error
        return messages

    def close(self) -> None:
        with suppress(*TROUBLE):
            self._told.close()


def name_of(key: str) -> str:
    """Return the name of a key in Redis.

    The braces are a hash tag. A cluster stores all names with the same tag in one slot.
    """
    return "dlocks:{" + key.replace("%", "%25").replace("}", "%7D") + "}"


def _evaluate(client: Any, script: scripts.Script, words: Sequence[Any]) -> Any:
    try:
        return client.evalsha(script.sha, *words)
    except redis.exceptions.NoScriptError:
        # EVAL also loads the script.
        return client.eval(script.text, *words)


def _evaluate_each(
    client: Any, script: scripts.Script, words: Sequence[Sequence[Any]]
) -> list[Any]:
    """Run a script for each call on its node of a cluster.

    Raise an error only if all calls fail.
    """
    answers: list[Any] = []
    # Time out on a silent node only once.
    silent: dict[Any, Exception] = {}
    for these in words:
        node = None
        try:
            node = client.get_node_from_key(these[1])
            answers.append(silent.get(node) or _evaluate(client, script, these))
        except TROUBLE as error:
            if (
                node is not None
                and isinstance(error, SILENT)
                and not isinstance(error, OF_A_SLOT)
            ):
                silent[node] = error
            answers.append(error)
    return _unless_all_failed(answers)


def _unless_all_failed(answers: list[Any]) -> list[Any]:
    if all(isinstance(answer, Exception) for answer in answers):
        raise answers[0]
    return answers


def _place(found: Sequence[Any]) -> Ticket:
    if found[0] == "granted":
        _, token, left = found
        return Ticket(grant=Grant(int(token), int(left) / 1000))
    _, ahead, number, left, now, ask = found
    soon = int(left) / 1000
    return Ticket(
        ahead=int(ahead),
        position=int(number),
        next_check=soon if soon > 0 else math.inf,
        clock=int(now) / MICROSECONDS,
        must_retry=bool(ask),
    )


def _milliseconds(value: float) -> int:
    # Round up, so that no duration gets shorter.
    return max(1, math.ceil(value * 1000))


_backends: weakref.WeakSet[RedisBackend] = weakref.WeakSet()
# The parent's clients. Collecting one would close it, which may block forever on one of
# its locks.
_inherited: list[Any] = []


def _forked() -> None:
    for backend in list(_backends):
        backend._forked()


in_child(_forked)
