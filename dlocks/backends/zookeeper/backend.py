"""Locks in a ZooKeeper ensemble, with a queue of ephemeral nodes per key.

Every claim is a node under the node of its key. The servers number these nodes in the
order of arrival, and the first one holds the key. A waiter watches only the last node
in its way, so a release wakes one waiter.

A process has one session for all of its claims. The servers end it after
``session_timeout`` without a request. A lease is that of the session, and is counted
from the last contact with the leader of the ensemble.

A token is the number of the transaction that created the node (``czxid``), counted from
the one that created the root. That one has the time in microseconds as its token.
Tokens therefore also grow when an ensemble is set up again, unless its leader changes
more often than every hour and a quarter, by which each change increases the number.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, ClassVar
from urllib.parse import unquote

from kazoo.exceptions import NoNodeError
from kazoo.hosts import collect_hosts

from dlocks.backends.base import Inspector
from dlocks.backends.zookeeper.claims import all_backends
from dlocks.backends.zookeeper.ensemble import (
    CERTAIN,
    KEYWORDS,
    SOON,
    Ensemble,
    is_unanswered,
)
from dlocks.backends.zookeeper.nodes import Entry, Nodes
from dlocks.backends.zookeeper.waiting import Waiting
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import Claim, Grant, Holder, seconds


class ZooKeeperBackend(Waiting):
    """A backend that keeps locks in a ZooKeeper ensemble.

    ``hosts`` are its servers, such as ``"zk1:2181,zk2:2181,zk3:2181"``. All nodes are
    under ``root``.

    The keys of a process become free after ``session_timeout`` seconds of silence,
    which the servers may limit. A request waits ``connect_timeout`` seconds for its
    reply. ``auth`` is ``"user:password"``, and then protects the nodes. ``client`` has
    further arguments for kazoo's client.
    """

    supports_queue: ClassVar[bool] = True
    supports_sharing: ClassVar[bool] = True
    unlisted = ""

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
        hosts = [hosts] if isinstance(hosts, str) else hosts
        if not (isinstance(hosts, Sequence) and all(isinstance(x, str) for x in hosts)):
            raise TypeError("hosts must be a string, or a list of strings")
        hosts = ",".join(hosts)
        wrong = "hosts must be like 'zk1:2181,zk2:2181'"
        if "/" in hosts or "@" in hosts:
            raise ValueError(
                f"{wrong}. Use the option root for a path, and auth for a password"
            )
        try:
            servers, _ = collect_hosts(hosts)
        except ValueError as error:
            raise ValueError(f"{wrong}, not {hosts!r}: {error}") from None
        start, *names = root.split("/") if isinstance(root, str) else [""]
        named = all(name.strip(".") and name.isprintable() for name in names)
        if start or not named or names[:1] in ([], ["zookeeper"]):
            raise ValueError(
                "root must be a path like '/dlocks', and not '/' or below"
                f" '/zookeeper', not {root!r}"
            )
        if auth is not None and not (
            isinstance(auth, str) and all(auth.partition(":"))
        ):
            raise ValueError("auth must be like 'user:password'")
        client = {} if client is None else client
        if not isinstance(client, Mapping):
            raise TypeError("client must be a dictionary of keywords for KazooClient")
        if unknown := set(client) - KEYWORDS:
            raise ValueError(
                f"client has unknown options {', '.join(sorted(map(str, unknown)))}; it"
                f" accepts {', '.join(sorted(KEYWORDS))}"
            )
        self.root = root
        self.ensemble = Ensemble(
            alias,
            sorted(f"{host}:{port}" for host, port in servers),
            seconds("session_timeout", session_timeout, above_zero=True),
            seconds("connect_timeout", connect_timeout, above_zero=True),
            auth,
            client,
            self._session_ended,
        )
        self.nodes = Nodes(self.ensemble, root)
        self.inspector = ZooKeeperInspector(self)
        self._reset()
        all_backends.add(self)

    @property
    def identity(self) -> str:
        return f"zookeeper {','.join(self.ensemble.hosts)} {self.root}"

    @property
    def renew_every(self) -> float:  # type: ignore[override]
        return self.ensemble.session_timeout / 8

    # The backend interface.

    def acquire(self, claim: Claim) -> Grant | None:
        entry = self._entries.get(claim.owner)
        if entry is None:
            entry = self._entry(claim)
            # Without a node of its own, as long as the key is busy.
            contended = claim.key in self.contended
            if contended and self.nodes.queue_of(entry.parent).excludes(entry):
                return None
        elif entry.waiting or entry.leaving:
            return None
        if entry.token is None:
            stands = self._join(entry)
        else:
            left = self.ensemble.certain_until - clock.now()
            lease = min(claim.ttl, self.ensemble.session_timeout * CERTAIN)
            stands = left >= lease / 2 or self.verify([claim], entry.count)
        if not stands:
            # The session has just ended. Retry in the next one.
            return self.acquire(claim)
        if grant := self._grant(entry):
            return grant
        # The key is busy. If this fails, the node is deleted later.
        entry.leaving = True
        with suppress(LockBackendError):
            self._release_entry(entry, timeout=SOON)
        return None

    def renew(self, claims: Sequence[Claim]) -> Mapping[str, float]:
        now = clock.now()
        held = [(claim, entry) for claim in claims if (entry := self._held(claim))]
        if not held:
            return {}
        try:
            self._check([entry for _, entry in held], SOON / 2)
        except LockBackendError as error:
            # The result is unknown, but the rest of each lease is certain.
            if not is_unanswered(error) or self.ensemble.certain_until <= now:
                raise
        else:
            with self._mutex:
                for claim, entry in held:
                    if entry.gone or entry.leaving:
                        continue
                    entry.ends_at = now + claim.ttl
                    self._maintain_from(entry.ends_at)
        return {
            claim.owner: min(entry.ends_at, self.ensemble.certain_until) - now
            for claim, entry in held
            if not (entry.gone or entry.leaving)
        }

    def verify(self, claims: Sequence[Claim], count: int | None = None) -> bool:
        entry = self._held(claims[0])
        if entry is None or count is None:
            return False
        self._check([entry])
        entry.count = count
        return not entry.gone

    def _check(self, entries: Sequence[Entry], timeout: float | None = None) -> None:
        """Forget the claims whose node was deleted."""
        requests = [("exists", entry.path) for entry in entries]
        stats = self.ensemble.ask(*requests, timeout=timeout)
        with self._mutex:
            for entry, stat in zip(entries, stats, strict=True):
                if stat is not None:
                    continue
                self._forget(entry)

    def release(self, claim: Claim, *, failed: bool = False, keep: float = 0.0) -> bool:
        with self._mutex:
            entry = self._entries.get(claim.owner)
            if entry is None:
                return False
            if keep and entry.token is not None and not entry.expired:
                self._keep(entry, keep)
                return True
        timeout = SOON if entry.token is None else None
        freed = self._release_entry(entry, timeout=timeout)
        self._close_at_exit()
        return freed and not entry.expired

    def holder(self, key: str) -> Holder | None:
        return next(self.holders(key), None)

    def holders(self, key: str, *, shared: bool = False) -> Iterator[Holder]:
        """Yield the holders of a key, or those that share it."""
        parent = self.nodes.parent(key)
        granted = self.nodes.queue_of(parent).granted
        with self._mutex:
            own = dict((entry.ticket, entry) for entry in self._all() if entry.token)
        for ticket in granted:
            if shared and not ticket.shared:
                continue
            if entry := own.get(ticket):
                if not entry.kept:
                    yield self._own_holder(entry)
                continue
            (answer,) = self.ensemble.ask(("get", f"{parent}/{ticket.name}"))
            if isinstance(answer, NoNodeError):
                continue
            data, stat = answer
            known = {}
            with suppress(ValueError):
                known = dict(json.loads(data))
            created = datetime.fromtimestamp(stat.ctime / 1000, UTC)
            yield Holder(
                key=key,
                holder=str(known.get("holder") or ""),
                owner_ip=known.get("ip"),
                since=None if known.get("waited", True) else created,
                remaining=math.inf,
                token=self.nodes.token(stat.czxid),
                count=1,
                stale=False,
            )

    def keys(self) -> list[str]:
        (names,) = self.ensemble.ask(("get_children", self.root))
        if isinstance(names, NoNodeError):
            return []
        prefix = self.prefix
        keys = [key for key in map(unquote, names) if key.startswith(prefix)]
        queues = self.nodes.queues_of([*map(self.nodes.parent, keys)]).values()
        return [key for key, one in zip(keys, queues, strict=True) if one.granted]

    def clear(self, key: str, version: int, *, stale_only: bool = False) -> bool:
        parent = self.nodes.parent(key)
        for ticket in self.nodes.queue_of(parent).granted:
            path = f"{parent}/{ticket.name}"
            (stat,) = self.ensemble.ask(("exists", path))
            if stat is not None and self.nodes.token(stat.czxid) == version:
                self.ensemble.ask(("delete", path))
                return True
        return False


class ZooKeeperInspector(Inspector):
    backend: ZooKeeperBackend

    def sharers(self, key: str) -> tuple[Sequence[Holder], int]:
        return [*self.backend.holders(key, shared=True)], self.backend.waiting(key)
