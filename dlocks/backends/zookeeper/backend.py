"""Locks in a ZooKeeper ensemble, with a queue of ephemeral nodes per key.

Every claim is a node under the node of its key. The servers number these nodes in the
order of arrival, and the first one holds the key. A waiter watches only one node, the
last one in its way, so that a release wakes one waiter. The name of a node identifies
its claim. If the reply to its creation is lost, the claim finds its node again by this
name.

A process has one session for all of its claims. The servers end it if they have
received nothing from the process for ``session_timeout``. The lease of a hold is that
of the session, and is counted here from the last contact with the leader of the
ensemble. A lost reply says nothing about the session. Only the servers can report its
end, and then all of its holds are lost at once.

A token is the number of the transaction that created the node (``czxid``). It is
counted from the transaction that created the root, and starts at the time of that
transaction in microseconds. Tokens therefore also grow when an ensemble is set up
again, as long as its leader changes less often than every hour and a quarter on
average. Each change of the leader increases the number by that much.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from dlocks.backends.base import refusal_without_rows
from dlocks.backends.zookeeper import ensemble as zookeeper
from dlocks.backends.zookeeper import requests
from dlocks.backends.zookeeper.claims import SOON
from dlocks.backends.zookeeper.ensemble import (
    Ensemble,
    ZookeeperError,
    collect_hosts,
    is_unanswered,
)
from dlocks.backends.zookeeper.maintenance import all_backends
from dlocks.backends.zookeeper.waiting import Waiting
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim, Grant, Holder, seconds

logger = logging.getLogger("dlocks")

# Fraction of the session timeout after which the session is checked again.
ASKED_AGAIN = 1 / 8


class ZooKeeperBackend(Waiting):
    """A backend that keeps locks in a ZooKeeper ensemble.

    ``hosts`` are its servers, such as ``"zk1:2181,zk2:2181,zk3:2181"``. All nodes are
    under ``root``.

    After ``session_timeout`` seconds of silence, the servers end the session of a
    process and its keys become free. The servers may limit this value. A request waits
    for its reply for ``connect_timeout`` seconds, and then raises LockBackendError.
    ``auth`` is ``"user:password"``. With it, only clients with these credentials may
    access the nodes. ``client`` contains further keyword arguments for kazoo's client,
    for example for TLS.
    """

    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True

    def __init__(
        self,
        alias: str,
        *,
        hosts: str | Sequence[str] = "127.0.0.1:2181",
        root: str = "/dlocks",
        session_timeout: float = 10.0,
        connect_timeout: float = 5.0,
        auth: str | None = None,
        client: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(alias, **options)
        if not isinstance(hosts, str):
            if not isinstance(hosts, Sequence) or not all(
                isinstance(host, str) for host in hosts
            ):
                raise TypeError("hosts must be a string, or a list of strings")
            hosts = ",".join(hosts)
        if "/" in hosts or "@" in hosts:
            raise ValueError(
                "hosts must be like 'zk1:2181,zk2:2181'. Use the option root for a"
                " path, and auth for a password"
            )
        try:
            collect_hosts(hosts)
        except ValueError as error:
            raise ValueError(
                f"hosts must be like 'zk1:2181,zk2:2181', not {hosts!r}: {error}"
            ) from None
        if not isinstance(root, str) or not _is_path(root):
            raise ValueError(
                "root must be a path like '/dlocks', and not '/' or below"
                f" '/zookeeper', not {root!r}"
            )
        if auth is not None and (
            not isinstance(auth, str) or not all(auth.partition(":"))
        ):
            raise ValueError("auth must be like 'user:password'")
        if client is not None and not isinstance(client, Mapping):
            raise TypeError("client must be a dictionary of keywords for KazooClient")
        if unknown := set(client or {}) - zookeeper.KEYWORDS:
            raise ValueError(
                f"client has unknown options {', '.join(sorted(map(str, unknown)))}; it"
                f" accepts {', '.join(sorted(zookeeper.KEYWORDS))}"
            )
        self.root = root
        self.ensemble = Ensemble(
            alias,
            hosts,
            session_timeout=seconds(
                "session_timeout", session_timeout, above_zero=True
            ),
            timeout=seconds("connect_timeout", connect_timeout, above_zero=True),
            auth=auth,
            client=dict(client or {}),
            on_lost=self._session_ended,
        )
        self._reset()
        all_backends.add(self)

    @property
    def identity(self) -> str:
        return f"zookeeper {','.join(self.ensemble.hosts)} {self.root}"

    @property
    def renew_every(self) -> float:  # type: ignore[override]
        return self.ensemble.session_timeout * ASKED_AGAIN

    # The backend interface.

    def refusal(self, claim: Claim) -> str | None:
        return super().refusal(claim) or refusal_without_rows(self, claim)

    def acquire(self, claim: Claim) -> Grant | None:
        entry = self._entries.get(claim.owner)
        if entry is not None and (entry.waiting or entry.ending):
            return None
        if entry is not None and entry.token is not None:
            certain = (
                self.ensemble.certain_until - clock.now() >= self._lease(claim) / 2
            )
            if not certain and not self.verify([claim], entry.count):
                return self.acquire(claim)
        else:
            if entry is None:
                entry = self._entry(claim)
                if claim.key in self.contended and self._is_busy(entry):
                    return None
            if not self._join(entry):
                # The session has just ended. Retry in the next one.
                return self.acquire(claim)
            if entry.token is not None:
                self.contended.discard(claim.key)
        if (grant := self._grant(entry)) is not None:
            return grant
        self.contended.add(claim.key)
        try:
            self._release_entry(entry, timeout=SOON, had=False)
        except LockBackendError as error:
            # The key is known to be busy. The node is deleted later.
            if not is_unanswered(error):
                raise
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        now = clock.now()
        with self._mutex:
            held = {
                claim.owner: (claim, entry)
                for claim in claims
                if (entry := self._held(claim)) is not None
            }
        if not held:
            return {}
        asked = list(held.values())
        try:
            stats = self.ensemble.ask(
                *(requests.exists(entry.path) for _, entry in asked), timeout=SOON / 2
            )
        except LockBackendError as error:
            # The result is unknown, but the rest of each lease is certain.
            if not is_unanswered(error) or self.ensemble.certain_until <= now:
                raise
        else:
            with self._mutex:
                for (claim, entry), stat in zip(asked, stats, strict=True):
                    if stat is None or isinstance(stat, ZookeeperError):
                        self._forget(entry)
                    elif not entry.ending:
                        entry.ends_at = now + claim.ttl
                        self._maintain_from(entry.ends_at)
        return {
            owner: min(entry.ends_at, self.ensemble.certain_until) - now
            for owner, (_, entry) in held.items()
            if not (entry.gone or entry.ending)
        }

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        entry = self._held(claims[0])
        if entry is None or count is None:
            return False
        (stat,) = self.ensemble.ask(requests.exists(entry.path))
        if stat is None or entry.gone:
            with self._mutex:
                self._forget(entry)
            return False
        entry.count = count
        return True

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                return False
            if keep and entry.token is not None:
                self._keep(entry, keep)
                return True
        freed = (
            self._release_entry(entry, had=True)
            if entry.token is not None
            else self._release_entry(entry, timeout=SOON)
        )
        self._close_at_exit()
        return freed

    def holder(self, key: str) -> Holder | None:
        for ticket in self._queue_of(self._parent(key)).granted:
            for entry in list(self._entries.values()):
                if entry.ticket == ticket and entry.token is not None:
                    return self._own_holder(entry)
            if any(entry.ticket == ticket for entry in list(self._kept)):
                continue
            (answer,) = self.ensemble.ask(
                requests.read(f"{self._parent(key)}/{ticket.name}")
            )
            if not isinstance(answer, ZookeeperError):
                data, stat = answer
                return self._holder(key, data, stat)
        return None

    def _holder(self, key: str, data: bytes, stat: Any) -> Holder:
        try:
            known = dict(json.loads(data))
        except ValueError:
            known = {}
        waited = known.get("waited", True)
        return Holder(
            key=key,
            holder=str(known.get("holder") or ""),
            owner_ip=known.get("ip"),
            since=None if waited else datetime.fromtimestamp(stat.ctime / 1000, UTC),
            remaining=math.inf,
            token=self._token(stat.czxid),
            count=1,
            stale=False,
        )

    def disconnect(self) -> None:
        """Close the session of this process.

        This releases its holds and cancels its waiters.
        """
        self._session_ended(notify=False)
        self.ensemble.close()
        # Another thread may meanwhile have read it in the session that has ended.
        self._base = None


def _is_path(root: str) -> bool:
    names = root.split("/")[1:]
    return (
        root.startswith("/")
        and all(name.strip(".") and name.isprintable() for name in names)
        and names[0] != "zookeeper"
    )
