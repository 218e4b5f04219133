"""Requests to Redis: scripts for one key or several, retries, and errors."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import redis

from dlocks.backends.base import Backend
from dlocks.backends.redis import scripts
from dlocks.backends.redis.connection import Address, client
from dlocks.exceptions import LockBackendError
from dlocks.runtime.process import each_in_child
from dlocks.values import Claim

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

# The number of retries in a cluster, whose client looks up the slots again after an
# error.
CLUSTER_TRIES = 3


class RedisRequests(Backend):
    """The client of a backend, and its requests."""

    socket_timeout: float
    settle: float
    _address: Address
    _cluster: bool
    _sentinels: Sequence[Address]

    def _reset(self) -> None:
        self._client: Any = None
        self._finalizer: Any = None
        self._making = threading.Lock()

    def _run(
        self,
        script: scripts.Script,
        claim: Claim,
        *arguments: Any,
        sent: list[Any] | None = None,
    ) -> Any:
        """Run a script for a claim, and append to ``sent`` per request."""
        words = self._words(claim.key, claim.owner, arguments)
        return self._request(lambda client: _evaluate(client, script, words, sent))

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

        return list(self._request(run)) if words else []

    def _words(self, key: str, owner: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
        name = name_of(key)
        names = name, f"{name}:last", f"{name}:line", f"{name}:claims", f"{name}:gone"
        return (
            len(names),
            *names,
            milliseconds(self.grace) if self.grace else 0,
            self.settle,
            owner,
            *arguments,
        )

    def _request(self, work: Callable[[Any], Any]) -> Any:
        for last in (False, True):
            try:
                return work(self._connected())
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
                    made = client(
                        self._address,
                        cluster=self._cluster,
                        sentinels=self._sentinels,
                        timeout=self.socket_timeout,
                    )
                    # A backend is part of a reference cycle. The garbage collector
                    # might find the client's sockets before the client.
                    self._finalizer = weakref.finalize(self, made.close)
                    self._finalizer.atexit = False
                    self._client = made
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
            self._finalizer.detach()
        self._reset()


def name_of(key: str) -> str:
    """Return the name of a key in Redis.

    The braces are a hash tag. A cluster stores all names with the same tag in one slot.
    """
    return "dlocks:{" + key.replace("%", "%25").replace("}", "%7D") + "}"


def _evaluate(
    client: Any,
    script: scripts.Script,
    words: Sequence[Any],
    sent: list[Any] | None = None,
) -> Any:
    tries = CLUSTER_TRIES if isinstance(client, redis.RedisCluster) else 0
    while True:
        if sent is not None:
            sent.append(script)
        try:
            return client.evalsha(script.sha, *words)
        except redis.exceptions.NoScriptError:
            # EVAL also loads the script.
            return client.eval(script.text, *words)
        except redis.RedisCluster.ERRORS_ALLOW_RETRY:
            if not tries:
                raise
            tries -= 1


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
                and not isinstance(error, redis.exceptions.SlotNotCoveredError)
            ):
                silent[node] = error
            answers.append(error)
    return _unless_all_failed(answers)


def _unless_all_failed(answers: list[Any]) -> list[Any]:
    if all(isinstance(answer, Exception) for answer in answers):
        raise answers[0]
    return answers


def milliseconds(value: float) -> int:
    # Round up, so that no duration gets shorter.
    return max(1, math.ceil(value * 1000))


redis_backends = each_in_child(RedisRequests._forked)


# The parent's clients. Collecting one would close it, which may block forever on one of
# its locks.
_inherited: list[Any] = []
