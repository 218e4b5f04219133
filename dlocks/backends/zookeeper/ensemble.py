"""The session of this process with a ZooKeeper ensemble.

It is opened when it is first needed, and every request has a time limit.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock

try:
    from kazoo.client import KazooClient, KazooState
    from kazoo.exceptions import (
        AuthFailedError,
        BadVersionError,
        ConnectionLoss,
        InvalidACLError,
        KazooException,
        NoAuthError,
        NodeExistsError,
        NoNodeError,
        OperationTimeoutError,
        SessionExpiredError,
        SessionMovedError,
        ZookeeperError,
    )
    from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
    from kazoo.hosts import collect_hosts
    from kazoo.protocol.serialization import Connect, Create2
    from kazoo.protocol.states import KeeperState
    from kazoo.retry import KazooRetry
    from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE
except ImportError as error:
    raise ImportError(
        "ZooKeeperBackend needs kazoo: pip install 'dlocks[zookeeper]'"
    ) from error
from dlocks.backends.zookeeper.requests import Request, sync

# Names that the backend imports from this module.
__all__ = [
    "OPEN_ACL_UNSAFE",
    "BadVersionError",
    "NoNodeError",
    "NodeExistsError",
    "ZookeeperError",
    "collect_hosts",
]

# Errors that leave the result of a request unknown.
UNANSWERED = (
    ConnectionLoss,
    SessionExpiredError,
    OperationTimeoutError,
    SessionMovedError,
    KazooTimeoutError,
)
REFUSED = (NoAuthError, AuthFailedError, InvalidACLError)

# Fraction of the session timeout for which the session is certain after a contact with
# the leader. A server that has lost its leader keeps answering for a while, and it
# reports its clients to the leader only at intervals.
CERTAIN = 2 / 3

# Maximum seconds for a connection attempt, however long the session timeout is. A
# starting server may accept a connection and never answer on it. Waiters would then
# report it as unavailable long after it has started.
LONGEST = 3.0

# Keyword arguments for kazoo's client that a project may set.
KEYWORDS = frozenset(inspect.signature(KazooClient).parameters) - {
    "hosts", "timeout", "client_id", "handler", "auth_data", "default_acl", "read_only",
    "kwargs",
}  # fmt: skip

# The types of the arguments that kazoo does not check before it connects.
KINDS: dict[str, tuple[type, ...]] = {
    "logger": (logging.Logger, logging.LoggerAdapter),
    "sasl_options": (dict,),
    "connection_retry": (dict, KazooRetry),
    "command_retry": (dict, KazooRetry),
    **dict.fromkeys(("keyfile", "keyfile_password", "certfile", "ca"), (str,)),
    **dict.fromkeys(
        ("randomize_hosts", "use_ssl", "verify_certs", "check_hostname"), (bool,)
    ),
}


def is_unanswered(error: LockBackendError) -> bool:
    """Return whether the result of a request is unknown, so it may be retried.

    Otherwise the request was refused.
    """
    return isinstance(error.__cause__, UNANSWERED)


class Secret(str):
    """Credentials for the server that are hidden in logs.

    kazoo logs its requests.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"

    __str__ = __repr__


class CreateContainer(Create2):  # type: ignore[misc]
    """A request for a node that ends some time after its last child.

    kazoo does not have this request.
    """

    type = 19


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with a time limit for each connection attempt.

    A host that does not answer must not use up the time of a session.
    """

    def __init__(self, longest: float) -> None:
        super().__init__()
        self._longest = longest

    def create_connection(self, *arguments: Any, **keywords: Any) -> Any:
        keywords["timeout"] = min(keywords.get("timeout") or math.inf, self._longest)
        return super().create_connection(*arguments, **keywords)


class Ensemble:
    """The session with one ensemble.

    ``ask()`` sends requests in the session. ``on_lost`` is called when the session has
    ended, and with it all of its nodes. The servers certainly keep the session until
    ``certain_until``, whatever happens to this process.
    """

    def __init__(
        self,
        alias: str,
        hosts: str,
        *,
        session_timeout: float,
        timeout: float,
        auth: str | None,
        client: Mapping[str, Any],
        on_lost: Callable[[], object],
    ) -> None:
        self.hosts = sorted(f"{host}:{port}" for host, port in collect_hosts(hosts)[0])
        self.timeout = timeout
        self.acl = CREATOR_ALL_ACL if auth else OPEN_ACL_UNSAFE
        self._alias = alias
        self._asked_for = session_timeout
        self._auth = Secret(auth) if auth else None
        self._more = client
        self._on_lost = on_lost
        self._inherited: list[Any] = []
        self.reset()
        for option, value in client.items():
            if value is not None and not isinstance(value, KINDS.get(option, object)):
                raise TypeError(f"client has a {type(value).__name__} for {option}")
        try:
            # kazoo checks the values only when a client is created.
            self._make()
        except Exception as error:
            raise ValueError(
                f"client has a value that kazoo does not accept: {error}"
            ) from error

    def reset(self) -> None:
        """Forget the session."""
        self._client: Any = None
        self._live = threading.Event()
        self._mutex = threading.Lock()
        # The session timeout that the servers have granted, and the number of sessions
        # so far.
        self.session_timeout = self._asked_for
        self.number = 0
        self.certain_until = -math.inf

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def ask(
        self, *requests: Request, timeout: float | None = None, once: bool = False
    ) -> list[Any]:
        """Send requests together, and return their answers in order.

        The answer to a refused request is its ZookeeperError. A sync precedes the
        requests. It makes the leader confirm the session, and ensures that the server
        is up to date when it answers.

        Wait for the session, and retry after a lost answer, for up to ``timeout``
        seconds. With ``once``, the requests are not sent twice. Raise LockBackendError
        if there is no answer, or if these credentials do not permit a request.
        """
        until = clock.real_now() + (self.timeout if timeout is None else timeout)
        while True:
            client = self._connected(until)
            number, sent = self.number, clock.now()
            answers = [
                self._answer(result, until)
                for result in [request(client) for request in (sync, *requests)]
            ]
            trouble = next(
                (one for one in answers if isinstance(one, UNANSWERED)), None
            )
            if trouble is None:
                break
            if (
                once
                or isinstance(trouble, KazooTimeoutError)
                or clock.real_now() >= until
            ):
                raise self._unanswered(trouble) from trouble
        if (
            refused := next((one for one in answers if isinstance(one, REFUSED)), None)
        ) is not None:
            raise LockBackendError(
                f"{self} denies these credentials access: {_said(refused)}."
            ) from refused
        with self._mutex:
            if self.number == number:
                self.certain_until = max(
                    self.certain_until, sent + self.session_timeout * CERTAIN
                )
        return answers[1:]

    def close(self) -> None:
        """End the session, and with it all of its nodes."""
        end(self.detach())

    def detach(self) -> Any:
        """Forget the session, and return its client."""
        with self._mutex:
            client, self._client = self._client, None
            self.number += 1
            self.certain_until = -math.inf
            return client

    def abandon(self) -> None:
        """Forget the session of the parent process, and leave it open."""
        if self._client is not None:
            # Collecting the client could close the parent's session.
            self._inherited.append(self._client)
        self.reset()

    # Internal methods.

    def _connected(self, until: float) -> Any:
        while True:
            with self._mutex:
                client = self._client or self._start()
                live = self._live
            if live.wait(max(0.0, min(until - clock.real_now(), 0.1))):
                return client
            state = client.client_state
            if state == KeeperState.AUTH_FAILED:
                self.close()
                raise LockBackendError(f"{self} rejects the credentials in 'auth'.")
            if clock.real_now() >= until:
                if state == KeeperState.CLOSED:
                    # Its thread has failed, and does not connect any more.
                    self.close()
                raise self._unanswered(None) from ConnectionLoss()

    def _make(self) -> tuple[Any, float]:
        """Return an unconnected client, and its time limit for one server."""
        longest = min(min(self.timeout, self._asked_for / 3) / len(self.hosts), LONGEST)
        handler = Handler(longest)
        client = KazooClient(
            **{
                "connection_retry": KazooRetry(
                    max_tries=-1,
                    delay=0.05,
                    max_delay=1.0,
                    sleep_func=handler.sleep_func,
                ),
                **self._more,
                "hosts": ",".join(self.hosts),
                "timeout": self._asked_for,
                "handler": handler,
                "auth_data": [("digest", self._auth)] if self._auth else None,
            }
        )
        return client, longest

    def _start(self) -> Any:
        client, longest = self._make()
        handler = client.handler
        invoke = client._connection._invoke

        def hear(timeout: float, request: Any, xid: int | None = None) -> Any:
            # A starting server may accept a connection and then send nothing. A new
            # session takes longer, since most of the servers have to agree to it.
            at_most = longest if client._session_id else self.timeout / len(self.hosts)
            answer = invoke(min(timeout, at_most), request, xid)
            if isinstance(request, Connect) and answer[0].time_out > 0:
                # The granted timeout may differ from the requested one, and kazoo does
                # not report it.
                self.session_timeout = answer[0].time_out / 1000
            return answer

        client._connection._invoke = hear
        client.add_listener(lambda state: self._heard(client, state))
        self._live = client.start_async()
        # kazoo would end its threads before the keeper releases the holds of this
        # process.
        atexit.unregister(handler.stop)
        self._client = client
        return client

    def _heard(self, client: Any, state: str) -> None:
        # This runs in kazoo's own thread. A lost connection (SUSPENDED) says nothing
        # about the session.
        if state != KazooState.LOST:
            return
        with self._mutex:
            if client is not self._client:
                return
            self.number += 1
            self.certain_until = -math.inf
        self._on_lost()

    def _answer(self, result: Any, until: float) -> Any:
        try:
            return result.get(timeout=max(0.001, until - clock.real_now()))
        except (ZookeeperError, KazooTimeoutError) as error:
            return error
        except KazooException as error:
            return ConnectionLoss(str(error))

    def _unanswered(self, error: BaseException | None) -> LockBackendError:
        what = (
            "it cannot be reached, or most of its servers are down"
            if error is None
            else _said(error)
        )
        return LockBackendError(f"{self} did not answer: {what}.")

    def __str__(self) -> str:
        return f"The ZooKeeper of DLOCKS[{self._alias!r}] ({', '.join(self.hosts)})"


def _said(error: BaseException) -> str:
    return {
        NoAuthError: "the nodes under its root belong to another user",
        ConnectionLoss: "the connection was lost",
        KazooTimeoutError: "the request timed out",
    }.get(type(error), type(error).__name__)


def end(client: Any) -> None:
    if client is None:
        return
    try:
        client.stop()
        client.close()
    except Exception as error:  # noqa: BLE001 (the servers end the session anyway)
        client.logger.warning("A ZooKeeper session could not be closed: %s", error)


def create_container(path: str, data: bytes, acl: Sequence[Any]) -> Request:
    def send(client: Any) -> Any:
        result = client.handler.async_result()
        client._call(CreateContainer(path, data, acl, 4), result)
        return result

    return send
