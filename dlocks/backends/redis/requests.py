"""Requests to Redis: scripts for one key or several, retries, and errors.

A step on a key is one Lua script inside Redis, because other commands could run between
two commands. The scripts are files in ``lua``, and begin with ``common.lua``. The last
argument identifies the call.

A key has five names in Redis, all in one slot:

* the lock: the owner, with a time to live of ttl and grace. It is set by ``SET NX PX``;
* ``:last``: the last grant. It outlives the lock, for its token and to detect holders
  that never released the key;
* ``:line``: the owners of the queued claims, by position;
* ``:claims``: for each queued claim the data that a grant needs, and when its heartbeat
  expires;
* ``:gone``: the claims that were released, cancelled or handed over, the calls that
  released them, and when. A delayed request of such a claim has no effect.
"""

from __future__ import annotations

import hashlib
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis
from django.views.decorators.debug import sensitive_variables

from dlocks.backends.base import HEARTBEAT_TIMEOUT
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime.process import each_in_child
from dlocks.values import Claim, new_owner

# Values of the scripts: for how long a heartbeat counts, and for how long after that a
# waiter is only skipped, in microseconds. For how long a cancelled claim and a released
# key are remembered, in seconds. No request is delayed for longer than the former.
# After the latter, a token grows by the clock alone.
CONSTANTS = {
    "HEARTBEAT_TIMEOUT": round(HEARTBEAT_TIMEOUT * 1e6),
    "DELETE_AFTER": 10_000_000,
    "GONE_FOR": 60,
    "REMEMBERED_FOR": 86400,
}
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


class Script:
    """One script, whose ``sha`` is its name in Redis."""

    def __init__(self, common: str, step: str) -> None:
        parts = [f"local {name} = {value}\n" for name, value in CONSTANTS.items()]
        # Each reply begins with its call.
        step = f"local function step()\n{step}end\nreturn {{call, step()}}\n"
        self.text = "".join([*parts, common, step])
        self.sha = hashlib.sha1(self.text.encode()).hexdigest()  # noqa: S324


_files = {file.stem: file for file in Path(__file__).with_name("lua").glob("*.lua")}
_common = _files.pop("common").read_text()
SCRIPTS = {name: Script(_common, file.read_text()) for name, file in _files.items()}


class Requests:
    """The requests of one backend, and the client that sends them.

    ``make`` returns the client when the first request needs it. ``constants`` are
    arguments of every script. The sensitive variables are those of the frames below as
    well. They contain owners, and in redis-py the password.
    """

    def __init__(self, where: str, make: Callable[[], Any], *constants: float) -> None:
        self.where = where
        self._make = make
        self._constants = constants
        self._reset()
        _all.add(self)

    def _reset(self) -> None:
        self._client: Any = None
        self._finalizer: Any = None
        self._making = threading.Lock()

    @sensitive_variables()
    def run(
        self,
        name: str,
        calls: Sequence[tuple[Claim, tuple[Any, ...]]],
    ) -> list[Any]:
        """Run a script for each claim and its arguments, and return the replies.

        This takes one round trip, except on a cluster. If some calls fail, their errors
        are in the result. If all fail, the first error is raised.
        """
        script, words = SCRIPTS[name], [self._words(*call) for call in calls]

        def run(client: Any) -> list[Any]:
            if isinstance(client, redis.RedisCluster):
                return _evaluate_each(client, script, words)
            first: Any
            try:
                # The first call makes sure that the script is loaded.
                first = _evaluate(client, script, words[0])
            except redis.ResponseError as error:
                first = error
            if not words[1:]:
                return [first]
            with client.pipeline(transaction=False) as pipeline:
                for these in words[1:]:
                    pipeline.evalsha(script.sha, *these)
                answers = pipeline.execute(raise_on_error=False)
            replies = map(partial(_reply, client), words[1:], answers)
            return [first, *replies]

        answers = list(self.request(run)) if words else []
        if answers and all(isinstance(answer, Exception) for answer in answers):
            raise self._failure(answers[0]) from answers[0]
        return answers

    def _words(self, claim: Claim, arguments: Sequence[Any]) -> tuple[Any, ...]:
        name = name_of(claim.key)
        names = name, f"{name}:last", f"{name}:line", f"{name}:claims", f"{name}:gone"
        # It identifies the call, which may be sent more than once.
        call = new_owner()
        return len(names), *names, *self._constants, claim.owner, *arguments, call

    @sensitive_variables()
    def request(self, work: Callable[[Any], Any]) -> Any:
        """Call a function with the client, and again if its connection was cut."""
        for last in (False, True):
            try:
                return work(self.client())
            except redis.ConnectionError as error:
                # An open connection may have been cut since its last use. Every script
                # may be sent again.
                if last or isinstance(error, redis.AuthenticationError):
                    raise self._failure(error) from error
            except TROUBLE as error:
                raise self._failure(error) from error
        raise AssertionError("unreachable")

    def client(self) -> Any:
        if self._client is None:
            with self._making:
                if self._client is None:
                    made = self._make()
                    # A backend is part of a reference cycle. The garbage collector
                    # might find the client's sockets before the client.
                    self._finalizer = weakref.finalize(self, made.close)
                    self._finalizer.atexit = False
                    self._client = made
        return self._client

    def _failure(self, error: Exception) -> LockBackendError:
        return LockBackendError(f"{self.where} failed: {error}")

    def forget(self) -> None:
        """Leave the client to the parent process."""
        if self._client is not None:
            # Another thread of the parent may have used the client during the fork. Its
            # locks may then be held in the child.
            _inherited.append(self._client)
            self._finalizer.detach()
        self._reset()


_all = each_in_child(Requests.forget)
# The parent's clients. Collecting one would close it, which may block forever on one of
# its locks.
_inherited: list[Any] = []


class RedisNotifier(Notifier):
    """A listener that receives the notifications of one channel."""

    def __init__(
        self, requests: Requests, channel: str, timeout: float, client: Any
    ) -> None:
        self._failure = requests._failure
        self._subscription = client.pubsub()
        self._subscription.subscribe(channel)
        # No notification that is sent after this confirmation is missed.
        if self._subscription.get_message(timeout=timeout) is None:
            self.close()
            raise redis.TimeoutError("Timeout subscribing")

    def wait(self, timeout: float) -> bool:
        try:
            # After a reconnect, the confirmation of the new subscription arrives as
            # well. A grant before it was not notified.
            message = first = self._subscription.get_message(timeout=timeout)
            while True:
                if message is None:
                    break
                message = self._subscription.get_message(timeout=0)
        except TROUBLE as error:
            raise self._failure(error) from error
        return first is not None

    def close(self) -> None:
        with suppress(*TROUBLE):
            self._subscription.close()


def name_of(key: str) -> str:
    """Return the name of a key in Redis.

    The braces are a hash tag. A cluster stores all names with the same tag in one slot.
    """
    return "dlocks:{" + key.replace("%", "%25").replace("}", "%7D") + "}"


def milliseconds(value: float) -> int:
    # Round up, so that no duration gets shorter.
    return max(1, math.ceil(value * 1000))


def _reply(client: Any, words: Sequence[Any], answer: Any) -> Any:
    """Return the reply to a call, or raise an error if it is that to another one.

    An interrupt may leave a connection in the pool whose last reply was not read.
    """
    if isinstance(answer, Exception):
        return answer
    if isinstance(answer, list) and answer[:1] == [*words[-1:]]:
        return answer[1] if answer[1:] else None
    is_cluster = isinstance(client, redis.RedisCluster)
    for one in client.get_nodes() if is_cluster else ():
        if one.redis_connection is not None:
            one.redis_connection.connection_pool.disconnect(inuse_connections=False)
    if not is_cluster:
        client.connection_pool.disconnect(inuse_connections=False)
    raise redis.ConnectionError("A connection had the reply to an earlier request.")


def _evaluate(client: Any, script: Script, words: Sequence[Any]) -> Any:
    tries = CLUSTER_TRIES if isinstance(client, redis.RedisCluster) else 0
    while True:
        try:
            return _reply(client, words, client.evalsha(script.sha, *words))
        except redis.exceptions.NoScriptError:
            # EVAL also loads the script.
            return _reply(client, words, client.eval(script.text, *words))
        except redis.RedisCluster.ERRORS_ALLOW_RETRY:
            if not tries:
                raise
            tries -= 1


def _evaluate_each(
    client: Any,
    script: Script,
    words: Sequence[Sequence[Any]],
) -> list[Any]:
    """Run a script for each call on its node of a cluster, and return all errors."""
    answers: list[Any] = []
    # Time out on a silent node only once.
    silent: dict[Any, Exception] = {}
    for these in words:
        node = None
        try:
            node = client.get_node_from_key(these[1])
            answers.append(silent.get(node) or _evaluate(client, script, these))
        except TROUBLE as error:
            uncovered = isinstance(error, redis.exceptions.SlotNotCoveredError)
            if node is not None and isinstance(error, SILENT) and not uncovered:
                silent[node] = error
            answers.append(error)
    return answers
