"""The session of this process with a ZooKeeper ensemble."""

from __future__ import annotations

import atexit
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

from kazoo import exceptions as errors
from kazoo.client import KazooClient, KazooState
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.states import KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.requests import request

T = TypeVar("T")

# Errors that leave the result of a request unknown.
UNANSWERED = (
    errors.ConnectionLoss,
    errors.SessionExpiredError,
    errors.OperationTimeoutError,
    errors.SessionMovedError,
    KazooTimeoutError,
)
REFUSED = (errors.NoAuthError, errors.AuthFailedError, errors.InvalidACLError)
# Errors that are answers.
EXPECTED = (errors.NoNodeError, errors.NodeExistsError, errors.NotEmptyError)
REASONS = {
    NoneType: "it cannot be reached, or most of its servers are down",
    errors.NoAuthError: "the nodes under its root belong to another user",
    errors.ConnectionLoss: "the connection was lost",
    KazooTimeoutError: "the request timed out",
}

# Fraction of the session timeout for which the session is certain after a contact with
# the leader. A server that has lost its leader keeps answering for a while, and it
# reports its clients to the leader only at intervals.
CERTAIN = 2 / 3

# Maximum seconds for a connection attempt. A starting server may accept a connection
# and never answer on it.
LONGEST = 3.0

# Seconds for which the keeper and the waiters wait for a reply.
SOON = 1.0


def is_unanswered(error: LockBackendError) -> bool:
    """Return whether the result of a request is unknown."""
    return isinstance(error.__cause__, UNANSWERED)


class Secret(str):
    """Credentials that are hidden in the log of kazoo's requests."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"

    __str__ = __repr__


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, with time limits for each connection attempt.

    A host that does not answer must not use up the time of a session.
    """

    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__()
        # A new session takes longer, since most of the servers have to agree to it.
        self._first = ensemble.timeout / len(ensemble.hosts)
        share = ensemble.session_timeout / 3 / len(ensemble.hosts)
        self._longest = min(self._first, share, LONGEST)
        self.on_state(KazooState.LOST)

    def on_state(self, state: str) -> None:
        limits = {KazooState.CONNECTED: math.inf, KazooState.SUSPENDED: self._longest}
        self._reply_timeout = limits.get(state, self._first)

    def create_connection(self, *arguments: Any, **keywords: Any) -> Any:
        keywords["timeout"] = self._longest
        return super().create_connection(*arguments, **keywords)

    def select(self, *arguments: Any) -> Any:
        *sockets, timeout = arguments
        return super().select(*sockets, min(timeout, self._reply_timeout))


@dataclass(eq=False, repr=False)
class Ensemble:
    """The session with one ensemble, which is opened when it is first needed.

    ``on_lost`` is called when the session has ended, and with it all of its nodes. The
    servers certainly keep it until ``certain_until``.
    """

    alias: str
    hosts: Sequence[str]
    session_timeout: float
    timeout: float
    auth: str | None
    options: Mapping[str, Any]
    on_lost: Callable[[], object]

    def __post_init__(self) -> None:
        self.auth = self.auth and Secret(self.auth)
        self._inherited: list[KazooClient | None] = []
        self._sessions = 0
        self._reset()
        try:
            # This does not connect.
            self._make()
        except Exception as error:
            raise ValueError(f"client is refused by KazooClient: {error}") from error

    @property
    def lease(self) -> float:
        """Return the seconds for which a session is certain after a contact."""
        return self.session_timeout * CERTAIN

    def _reset(self) -> None:
        self._client: KazooClient | None = None
        # Set while the client is connected.
        self._live: Any = None
        self._mutex = threading.Lock()
        self._end_session()

    def _end_session(self) -> None:
        self._sessions += 1
        self.certain_until: float = -math.inf

    def ask(self, *requests: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Send requests, and send them again if there is no answer."""
        return self.retry(lambda left: self.send(*requests, timeout=left), timeout)

    def retry(self, action: Callable[[float], T], timeout: float | None) -> T:
        """Call a function with the seconds left, and again if it is unanswered."""
        until = clock.real_now() + (self.timeout if timeout is None else timeout)
        while True:
            try:
                return action(until - clock.real_now())
            except LockBackendError as error:
                if not is_unanswered(error) or clock.real_now() >= until:
                    raise

    def send(self, *requests: Sequence[Any], timeout: float) -> list[Any]:
        """Send requests together, and return their answers in order.

        A request has the name of an asynchronous method, and its arguments. An answer
        may be one of the EXPECTED errors. A sync precedes the requests. It makes the
        leader confirm the session, and brings the server up to date.

        Raise LockBackendError if a request is refused, or if an answer does not come
        within ``timeout`` seconds.
        """
        until = clock.real_now() + timeout
        client = self._connected(until)
        session, sent = self._sessions, clock.now()
        results = [
            getattr(client, f"{method}_async")(*arguments)
            for method, *arguments in [("sync", "/"), *requests]
        ]
        try:
            answers = [_answer(result, until) for result in results]
        except UNANSWERED as error:
            raise self._unanswered(error) from error
        except errors.KazooException as error:
            did = "rejected a lock request"
            if isinstance(error, REFUSED):
                did = "denies these credentials access"
            raise LockBackendError(f"{self} {did}: {_said(error)}.") from error
        with self._mutex:
            if self._sessions == session:
                self.certain_until = max(self.certain_until, sent + self.lease)
        return answers[1:]

    def detach(self, client: KazooClient | None = None) -> KazooClient | None:
        """Forget the session, and return its client.

        Return None if another thread has replaced ``client``.
        """
        with self._mutex:
            if client not in (None, self._client):
                return None
            client, self._client = self._client, None
            self._end_session()
            return client

    def abandon(self) -> None:
        """Forget the session of the parent process, and leave it open."""
        # Collecting the client could close the parent's session.
        self._inherited.append(self._client)
        self._reset()

    def _connected(self, until: float) -> KazooClient:
        while True:
            with self._mutex:
                client = self._client or self._start()
                live = self._live
            if live.wait(min(until - clock.real_now(), 0.1)):
                return client
            late = clock.real_now() >= until
            if late and client.client_state == KeeperState.CLOSED:
                # Its thread has failed.
                end(self.detach(client))
            if late:
                raise self._unanswered(None) from errors.ConnectionLoss()

    def _make(self) -> KazooClient:
        retry = KazooRetry(max_tries=-1, delay=0.05, max_delay=1.0)
        return KazooClient(
            ",".join(self.hosts),
            self.session_timeout,
            handler=Handler(self),
            auth_data=[("digest", self.auth)] if self.auth else None,
            default_acl=CREATOR_ALL_ACL if self.auth else OPEN_ACL_UNSAFE,
            **{"connection_retry": retry, **self.options},
        )

    def _start(self) -> KazooClient:
        client = self._make()
        # A finalizer that strikes in kazoo's own thread, perhaps while the tables are
        # half changed, is refused.
        client.add_listener(lambda state: request(self._on_state, client, state))
        self._live = client.start_async()
        # kazoo would end its threads before the keeper releases the holds.
        atexit.unregister(client.handler.stop)
        self._client = client
        return client

    def _on_state(self, client: KazooClient, state: str) -> None:
        # SUSPENDED says nothing about the session.
        client.handler.on_state(state)
        if state == KazooState.LOST:
            with self._mutex:
                if client is not self._client:
                    return
                self._end_session()
            self.on_lost()

    def _unanswered(self, error: BaseException | None) -> LockBackendError:
        return LockBackendError(f"{self} did not answer: {_said(error)}.")

    def __str__(self) -> str:
        return f"The ZooKeeper of DLOCKS[{self.alias!r}] ({', '.join(self.hosts)})"


def _answer(result: Any, until: float) -> Any:
    try:
        return result.get(timeout=max(0.001, until - clock.real_now()))
    except EXPECTED as error:
        return error


def _said(error: BaseException | None) -> str:
    return REASONS.get(type(error), type(error).__name__)


def end(client: KazooClient | None) -> None:
    """Close a client, and end its session."""
    if client is None:
        return
    try:
        client.stop()
        client.close()
    except Exception as error:  # noqa: BLE001 (the servers end the session anyway)
        client.logger.warning("A ZooKeeper session could not be closed: %s", error)
