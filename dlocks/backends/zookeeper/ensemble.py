"""The session of this process with a ZooKeeper ensemble: made when first needed, and asked in bounded time."""

from __future__ import annotations

import atexit
import inspect
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dlocks import clock
from dlocks.exceptions import LockBackendError

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
    raise ImportError("ZooKeeperBackend needs kazoo: pip install 'dlocks[zookeeper]'") from error

# Those that the backend means by its own words.
__all__ = ["OPEN_ACL_UNSAFE", "BadVersionError", "NoNodeError", "NodeExistsError", "ZookeeperError", "collect_hosts"]

# Answers that say nothing about the question: it may have been done or not.
UNANSWERED = (ConnectionLoss, SessionExpiredError, OperationTimeoutError, SessionMovedError, KazooTimeoutError)
REFUSED = (NoAuthError, AuthFailedError, InvalidACLError)

# A server that has lost its leader goes on answering for a while, and tells the leader of its clients only now and
# then: so much of the session's timeout is certain from when the leader was heard of.
CERTAIN = 2 / 3

# How long a connection is waited for, however long a session lasts: a server that starts may take one on which it never
# says anything, and those who wait would be told that it cannot be asked when it has long been there.
LONGEST = 3.0

# What kazoo's client may be told besides.
KEYWORDS = frozenset(inspect.signature(KazooClient).parameters) - {
    "hosts", "timeout", "client_id", "handler", "auth_data", "default_acl", "read_only", "kwargs",
}  # fmt: skip

Request = Callable[[Any], Any]


def is_unanswered(error: LockBackendError) -> bool:
    """Return whether nobody knows if it was done, and it may be asked again; or else it was refused."""
    return isinstance(error.__cause__, UNANSWERED)


class Secret(str):
    """What is told to the server, and to nobody else: kazoo writes its requests into its log."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'…'"

    __str__ = __repr__


class CreateContainer(Create2):  # type: ignore[misc]
    """The request for a node that the server deletes some time after its last child has gone; kazoo has none."""

    type = 19


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """kazoo's threads, which do not spend the time of a session on one host that gives no answer."""

    def __init__(self, longest: float) -> None:
        super().__init__()
        self._longest = longest

    def create_connection(self, *arguments: Any, **keywords: Any) -> Any:
        keywords["timeout"] = min(keywords.get("timeout") or math.inf, self._longest)
        return super().create_connection(*arguments, **keywords)


class Ensemble:
    """
    ``ask()`` sends requests over the session. ``on_lost`` is called when the session has ended, and all of it with it.

    ``certain_until`` is until when the servers keep the session for certain, whatever happens to this process.
    """

    def __init__(
        self,
        alias: str,
        hosts: str,
        *,
        session_timeout: float,
        patience: float,
        auth: str | None,
        client: Mapping[str, Any],
        on_lost: Callable[[], object],
    ) -> None:
        self.hosts = sorted(f"{host}:{port}" for host, port in collect_hosts(hosts)[0])
        self.patience = patience
        self.acl = CREATOR_ALL_ACL if auth else OPEN_ACL_UNSAFE
        self._alias = alias
        self._asked_for = session_timeout
        self._auth = Secret(auth) if auth else None
        self._more = client
        self._on_lost = on_lost
        self._inherited: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Know of no session."""
        self._client: Any = None
        self._live = threading.Event()
        self._mutex = threading.Lock()
        # What the servers have granted, and how many sessions there were.
        self.session_timeout = self._asked_for
        self.number = 0
        self.certain_until = -math.inf

    @property
    def is_open(self) -> bool:
        return self._client is not None

    def ask(self, *requests: Request, patience: float | None = None, once: bool = False) -> list[Any]:
        """
        Send requests together; return the answers in their order, of those that were refused the ZookeeperError.

        A sync goes before them: by it the leader says that the session stands, and the server that answers what
        follows is not behind. Wait for the session, and ask again where the answer was lost, for ``patience`` seconds
        at most; where it may not be asked twice, ``once``. Raise LockBackendError when there was none, and when these
        credentials may not ask that.
        """
        until = time.monotonic() + (self.patience if patience is None else patience)
        while True:
            client = self._connected(until)
            number, sent = self.number, clock.now()
            answers = [self._answer(result, until) for result in [request(client) for request in (_sync, *requests)]]
            trouble = next((one for one in answers if isinstance(one, UNANSWERED)), None)
            if trouble is None:
                break
            if once or isinstance(trouble, KazooTimeoutError) or time.monotonic() >= until:
                raise self._unanswered(trouble) from trouble
        if (refused := next((one for one in answers if isinstance(one, REFUSED)), None)) is not None:
            raise LockBackendError(f"{self} refuses a lock to these credentials: {_said(refused)}.") from refused
        with self._mutex:
            if self.number == number:
                self.certain_until = max(self.certain_until, sent + self.session_timeout * CERTAIN)
        return answers[1:]

    def close(self) -> None:
        """End the session, and with it all that it has."""
        end(self.detach())

    def detach(self) -> Any:
        """Know of no session any more, and return the client of the one that there was."""
        with self._mutex:
            client, self._client = self._client, None
            self.number += 1
            self.certain_until = -math.inf
            return client

    def abandon(self) -> None:
        """Know nothing of the session of the process that this one is a fork of, and leave it to that one."""
        if self._client is not None:
            # To collect it could close what is the parent's.
            self._inherited.append(self._client)
        self.reset()

    # Inside.

    def _connected(self, until: float) -> Any:
        while True:
            with self._mutex:
                client = self._client or self._start()
                live = self._live
            if live.wait(max(0.0, min(until - time.monotonic(), 0.1))):
                return client
            state = client.client_state
            if state == KeeperState.AUTH_FAILED:
                self.close()
                raise LockBackendError(f"{self} refuses the credentials.")
            if time.monotonic() >= until:
                if state == KeeperState.CLOSED:
                    # Its thread has failed, and would not connect any more.
                    self.close()
                raise self._unanswered(None) from ConnectionLoss()

    def _start(self) -> Any:
        longest = min(min(self.patience, self._asked_for / 3) / len(self.hosts), LONGEST)
        handler = Handler(longest)
        client = KazooClient(
            **{
                "connection_retry": KazooRetry(max_tries=-1, delay=0.05, max_delay=1.0, sleep_func=handler.sleep_func),
                **self._more,
                "hosts": ",".join(self.hosts),
                "timeout": self._asked_for,
                "handler": handler,
                "auth_data": [("digest", self._auth)] if self._auth else None,
            }
        )
        invoke = client._connection._invoke

        def hear(timeout: float, request: Any, xid: int | None = None) -> Any:
            # Nor on one that takes the connection and says no more, as one that starts may. A new session takes longer,
            # since most of the servers have to agree to it.
            at_most = longest if client._session_id else self.patience / len(self.hosts)
            answer = invoke(min(timeout, at_most), request, xid)
            if isinstance(request, Connect) and answer[0].time_out > 0:
                # Perhaps not what was asked for; kazoo does not tell.
                self.session_timeout = answer[0].time_out / 1000
            return answer

        client._connection._invoke = hear
        client.add_listener(lambda state: self._heard(client, state))
        self._live = client.start_async()
        # kazoo would end its threads before the keeper gives back what this process holds.
        atexit.unregister(handler.stop)
        self._client = client
        return client

    def _heard(self, client: Any, state: str) -> None:
        # In kazoo's own thread. A connection that is lost (SUSPENDED) says nothing about the session.
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
            return result.get(timeout=max(0.001, until - time.monotonic()))
        except (ZookeeperError, KazooTimeoutError) as error:
            return error
        except KazooException as error:
            return ConnectionLoss(str(error))

    def _unanswered(self, error: BaseException | None) -> LockBackendError:
        what = "it cannot be reached, or has no majority of its servers" if error is None else _said(error)
        return LockBackendError(f"{self} could not be asked about a lock: {what}.")

    def __str__(self) -> str:
        return f"The ZooKeeper of DLOCKS[{self._alias!r}] ({', '.join(self.hosts)})"


def _said(error: BaseException) -> str:
    return {
        NoAuthError: "the nodes under its root belong to others",
        ConnectionLoss: "the connection was lost",
        KazooTimeoutError: "no answer in time",
    }.get(type(error), type(error).__name__)


def end(client: Any) -> None:
    if client is None:
        return
    try:
        client.stop()
        client.close()
    except Exception as error:  # noqa: BLE001 (the servers end the session by themselves)
        client.logger.warning("A session could not be ended: %s", error)


# The requests.


def _sync(client: Any) -> Any:
    return client.sync_async("/")


def children(path: str) -> Request:
    return lambda client: client.get_children_async(path)


def read(path: str, watch: Callable[[Any], object] | None = None) -> Request:
    # Not exists(), which would leave a watch for ever on a node that has gone.
    return lambda client: client.get_async(path, watch)


def exists(path: str) -> Request:
    return lambda client: client.exists_async(path)


def delete(path: str) -> Request:
    return lambda client: client.delete_async(path)


def write(path: str, data: bytes, version: int) -> Request:
    return lambda client: client.set_async(path, data, version)


def create(path: str, data: bytes, acl: Sequence[Any], *, in_line: bool = False) -> Request:
    """Make a node: one that stays; or one ``in_line``, which ends with the session."""
    return lambda client: client.create_async(
        path, data, acl=acl, ephemeral=in_line, sequence=in_line, include_data=True
    )


def create_container(path: str, data: bytes, acl: Sequence[Any]) -> Request:
    def send(client: Any) -> Any:
        result = client.handler.async_result()
        client._call(CreateContainer(path, data, acl, 4), result)
        return result

    return send
