"""The session of this process with a ZooKeeper ensemble.

It is opened when it is first needed, and every request has a time limit.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

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
from kazoo.protocol.serialization import Create2
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock

# The name of an asynchronous method of the client, and its arguments.
Request = tuple[Any, ...]

# Errors that leave the result of a request unknown.
UNANSWERED = (
    ConnectionLoss,
    SessionExpiredError,
    OperationTimeoutError,
    SessionMovedError,
    KazooTimeoutError,
)
REFUSED = (NoAuthError, AuthFailedError, InvalidACLError)
# Errors that are answers.
EXPECTED = (NoNodeError, NodeExistsError, BadVersionError)
REASONS: dict[type, str] = {
    NoneType: "it cannot be reached, or most of its servers are down",
    NoAuthError: "the nodes under its root belong to another user",
    ConnectionLoss: "the connection was lost",
    KazooTimeoutError: "the request timed out",
}

# Fraction of the session timeout for which the session is certain after a contact with
# the leader. A server that has lost its leader keeps answering for a while, and it
# reports its clients to the leader only at intervals.
CERTAIN = 2 / 3

# Maximum seconds for a connection attempt, however long the session timeout is. A
# starting server may accept a connection and never answer on it. Waiters would then
# report it as unavailable long after it has started.
LONGEST = 3.0

# Seconds for which the keeper and the waiters wait for a reply before they check for
# other work.
SOON = 1.0

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


class UnansweredError(LockBackendError):
    """A request whose result is unknown, so it may be repeated."""


class Secret(str):
    """Credentials that are hidden in the log of kazoo's requests."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"

    __str__ = __repr__


class CreateContainer(Create2):  # type: ignore[misc]
    """A request that kazoo does not have."""

    type = 19


class Client(KazooClient):  # type: ignore[misc]
    """kazoo's client, with the requests for nodes of claims and keys."""

    def create_ticket_async(self, path: str, data: bytes, acl: Sequence[Any]) -> Any:
        """Create a node that is numbered and ends with the session."""
        return self.create_async(
            path, data, acl, ephemeral=True, sequence=True, include_data=True
        )

    def create_container_async(self, path: str, data: bytes, acl: Sequence[Any]) -> Any:
        """Create a node that ends some time after its last child."""
        result = self.handler.async_result()
        # kazoo has no public method that sends a request of another type.
        self._call(CreateContainer(path, data, acl, 4), result)
        return result


class Connection:
    """A socket that reads the session timeout from the first reply of a server.

    The servers may grant another timeout than the requested one, and kazoo does not
    report it.
    """

    def __init__(self, socket: Any, on_granted: Callable[[float], None]) -> None:
        self._socket = socket
        self._on_granted = on_granted
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def recv(self, size: int) -> bytes:
        data: bytes = self._socket.recv(size)
        # The fields are the length, the version of the protocol and milliseconds.
        if len(self._head) < 12 <= len(head := self._head + data):
            (timeout,) = struct.unpack_from(">i", head, 8)
            if timeout > 0:
                self._on_granted(timeout / 1000)
        self._head = (self._head + data)[:12]
        return data


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with time limits for each connection attempt.

    A host that does not answer must not use up the time of a session.
    """

    def __init__(
        self, longest: float, first: float, on_granted: Callable[[float], None]
    ) -> None:
        super().__init__()
        self._longest = longest
        self._first = first
        self._on_granted = on_granted
        self.on_state(KazooState.LOST)

    def on_state(self, state: str) -> None:
        # A starting server may accept a connection and then send nothing. A new session
        # takes longer, since most of the servers have to agree to it.
        limits = {KazooState.CONNECTED: math.inf, KazooState.SUSPENDED: self._longest}
        self._reply_timeout = limits.get(state, self._first)

    def create_connection(self, *arguments: Any, **keywords: Any) -> Any:
        keywords["timeout"] = min(keywords.get("timeout") or math.inf, self._longest)
        return Connection(
            super().create_connection(*arguments, **keywords), self._on_granted
        )

    def select(self, *arguments: Any) -> Any:
        *sockets, timeout = arguments
        return super().select(*sockets, min(timeout, self._reply_timeout))


class Ensemble:
    """The session with one ensemble.

    ``ask()`` sends requests in the session. ``on_lost`` is called when the session has
    ended, and with it all of its nodes. The servers certainly keep the session until
    ``certain_until``, whatever happens to this process.
    """

    def __init__(
        self,
        alias: str,
        hosts: Sequence[str],
        *,
        session_timeout: float,
        timeout: float,
        auth: str | None,
        client: Mapping[str, Any],
        on_lost: Callable[[], object],
    ) -> None:
        self.hosts = hosts
        self.timeout = timeout
        self.acl = CREATOR_ALL_ACL if auth else OPEN_ACL_UNSAFE
        self._alias = alias
        self._asked_for = session_timeout
        self._auth = Secret(auth) if auth else None
        self._more = client
        self._on_lost = on_lost
        self._inherited: list[Any] = []
        self._reset()
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

    def _reset(self) -> None:
        self._client: Any = None
        self._live = threading.Event()
        self._mutex = threading.Lock()
        # The number of sessions so far.
        self._number = 0
        self.certain_until = -math.inf
        # What was requested, until the servers grant a value.
        self.session_timeout = self._asked_for

    def deadline(self, timeout: float | None) -> float:
        """Return the real time after ``timeout``, by default that of a request."""
        return clock.real_now() + (self.timeout if timeout is None else timeout)

    def ask(
        self, *requests: Request, timeout: float | None = None, once: bool = False
    ) -> list[Any]:
        """Send requests together, and return their answers in order.

        An answer may be one of the EXPECTED errors. A sync precedes the requests. It
        makes the leader confirm the session, and ensures that the server is up to date
        when it answers.

        Wait for the session, and retry after a lost answer, for up to ``timeout``
        seconds. With ``once``, the requests are not sent twice. Raise UnansweredError
        if there is no answer, and LockBackendError if a request is refused.
        """
        until = self.deadline(timeout)
        while True:
            client = self._connected(until)
            number, sent = self._number, clock.now()
            results = [
                getattr(client, f"{method}_async")(*arguments)
                for method, *arguments in [("sync", "/"), *requests]
            ]
            answers = [_answer(result, until) for result in results]
            if not (lost := [one for one in answers if isinstance(one, UNANSWERED)]):
                break
            late = isinstance(lost[0], KazooTimeoutError) or clock.real_now() >= until
            if once or late:
                raise self._unanswered(lost[0]) from lost[0]
        for answer in answers:
            if isinstance(answer, REFUSED):
                raise LockBackendError(
                    f"{self} denies these credentials access: {_said(answer)}."
                ) from answer
            if isinstance(answer, ZookeeperError) and not isinstance(answer, EXPECTED):
                raise LockBackendError(
                    f"ZooKeeper rejected a lock request: {type(answer).__name__}."
                ) from answer
        with self._mutex:
            if self._number == number:
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
            self._end_session()
            return client

    def abandon(self) -> None:
        """Forget the session of the parent process, and leave it open."""
        # Collecting the client could close the parent's session.
        self._inherited.append(self._client)
        self._reset()

    # Internal methods.

    def _end_session(self) -> None:
        self._number += 1
        self.certain_until = -math.inf

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

    def _make(self) -> Any:
        """Return an unconnected client."""
        first = self.timeout / len(self.hosts)
        longest = min(first, self._asked_for / 3 / len(self.hosts), LONGEST)
        handler = Handler(longest, first, partial(setattr, self, "session_timeout"))
        retry = KazooRetry(
            max_tries=-1, delay=0.05, max_delay=1.0, sleep_func=handler.sleep_func
        )
        return Client(
            ",".join(self.hosts),
            self._asked_for,
            handler=handler,
            auth_data=[("digest", self._auth)] if self._auth else None,
            **{"connection_retry": retry, **self._more},
        )

    def _start(self) -> Any:
        client = self._make()
        client.add_listener(client.handler.on_state)
        client.add_listener(lambda state: self._on_state(client, state))
        self._live = client.start_async()
        # kazoo would end its threads before the keeper releases the holds of this
        # process.
        atexit.unregister(client.handler.stop)
        self._client = client
        return client

    def _on_state(self, client: Any, state: str) -> None:
        # This runs in kazoo's own thread. A lost connection (SUSPENDED) says nothing
        # about the session.
        if state != KazooState.LOST:
            return
        with self._mutex:
            if client is not self._client:
                return
            self._end_session()
        self._on_lost()

    def _unanswered(self, error: BaseException | None) -> UnansweredError:
        return UnansweredError(f"{self} did not answer: {_said(error)}.")

    def __str__(self) -> str:
        return f"The ZooKeeper of DLOCKS[{self._alias!r}] ({', '.join(self.hosts)})"


def _answer(result: Any, until: float) -> Any:
    try:
        return result.get(timeout=max(0.001, until - clock.real_now()))
    except (ZookeeperError, KazooTimeoutError) as error:
        return error
    except KazooException as error:
        return ConnectionLoss(str(error))


def _said(error: BaseException | None) -> str:
    return REASONS.get(type(error), type(error).__name__)


def end(client: Any) -> None:
    """Close a client, and end its session."""
    if client is None:
        return
    try:
        client.stop()
        client.close()
    except Exception as error:  # noqa: BLE001 (the servers end the session anyway)
        client.logger.warning("A ZooKeeper session could not be closed: %s", error)
