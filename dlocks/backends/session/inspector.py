"""The holders and the waiters of session locks, in this process and in others.

The server shows running statements to all sessions of the same user. A waiter whose
caller holds other keys says so in a comment.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from dlocks.backends.base import Backend, Inspector
from dlocks.backends.session.claims import Claims, Entry
from dlocks.backends.session.sessions import ServerSession, Sessions
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.values import UNLIMITED, HeldKey, Holder, Waiter, WaitingClaim

# Characters. By default, servers show 1024 bytes of a statement.
LONGEST_COMMENT = 850
LONGEST_KEY = 64
LONGEST_HOLDER = 250
# Added to the position of a waiter that other processes do not see. Only its own
# process can refuse it, so it is the youngest.
UNSEEN = 2**60


class Facts(NamedTuple):
    """What a comment says of a waiter.

    A long key is a list with its name. ``held`` has each key that its caller holds with
    the server's number of the session, or 0 in a transaction, and the newest last.
    """

    digest: str
    position: int
    holder: str
    owner_ip: str | None
    key: Any
    held: list[tuple[Any, int]]


class SessionInspector(Inspector):
    """An inspector that knows this process, and sees the sessions of others."""

    backend: Any

    def __init__(self, backend: Backend, claims: Claims, sessions: Sessions) -> None:
        super().__init__(backend)
        self._claims = claims
        self._sessions = sessions

    def holders(self, key: str) -> Sequence[Holder]:
        shown, own = self._of_key(key)
        held = [one for one in own if one.token is not None and one.session]
        mine = {one.session.pid for one in held if one.session}
        others = [one for one in shown if one.granted and one.number not in mine]
        held.sort(key=lambda one: one.token or 0)
        return [
            *(one.as_holder() for one in held),
            *(Holder(key=key, holder=one.who, owner_ip=one.host) for one in others),
        ]

    def waiting(self, key: str) -> int:
        """Return the number of waiters, in the engine or without a session."""
        shown, own = self._of_key(key)
        in_engine = sum(not one.granted for one in shown)
        return in_engine + sum(one.waiting and one.session is None for one in own)

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        shown, own = self._of_key(key)
        mine = {one.session.pid: one for one in own if one.session and one.waiting}
        found: list[Entry | ServerSession] = [
            mine.pop(one.number, one)
            # In the order of the engine's queue.
            for one in sorted(shown, key=lambda one: -one.waited)
            if not one.granted
        ]
        # The others follow when a session of this process waits for them.
        found += [one for one in own if one.waiting and one not in found]
        return [one.as_waiter(key, prefix) for one in found]

    def _of_key(self, key: str) -> tuple[list[ServerSession], list[Entry]]:
        """Return the sessions that hold a key or wait for it, and the own entries."""
        name = self._sessions.name(key)
        sessions = self._sessions.of_name(name)
        entries = list(self._claims.entries.values())
        return sessions, [one for one in entries if one.name == name]

    # Deadlocks.

    def comment_of(self, entry: Entry) -> str:
        """Return the comment of a statement that waits.

        A wait may consist of several statements.
        """
        since = f"/*since {round(entry.since * 1e6)}*/"
        if not entry.claim.holding:
            return since
        facts = self._facts(entry)
        while facts.held:
            text = _in_comment(facts)
            if len(text) <= LONGEST_COMMENT:
                return f"{since}/*dlocks {text}*/"
            # Without its oldest holds, a deadlock may end by a timeout.
            del facts.held[0]
        return since

    def _facts(self, entry: Entry) -> Facts:
        claim, held = entry.claim, []
        holder = claim.holder
        while len(_in_comment(holder)) > LONGEST_HOLDER:
            # A long note must not displace the holds.
            holder = holder[:-1]
        for one in claim.holding:
            if not one.owner:
                held.append((0, self._shown(one.key), 0))
            elif found := self.backend.held(one.owner):
                hold, session = found
                if not hold.leaving and hold.ends_at > clock.now():
                    held.append((hold.number, self._shown(one.key), session.pid))
        return Facts(
            _digest(entry),
            round(entry.since * 1e6) + UNSEEN * (entry.session is None),
            holder,
            claim.owner_ip,
            self._shown(claim.key),
            [one[1:] for one in sorted(held, key=lambda one: one[0])],
        )

    def _shown(self, key: str) -> Any:
        is_short = len(json.dumps(key)) <= LONGEST_KEY
        return key if is_short else [self._sessions.name(key)]

    def _shown_facts(self) -> list[Facts]:
        """Return the facts of the waiters of all processes that the server shows."""
        (texts,) = self._sessions.ask("comments", 0) or ("",)
        shown = []
        for text in json.loads(texts or "[]"):
            # Another version of this package may write other facts.
            with suppress(TypeError, ValueError):
                facts = json.loads(text.partition("/*dlocks ")[2].partition("*/")[0])
                shown.append(Facts(*facts))
        return shown

    def waiting_claims(self) -> Sequence[WaitingClaim]:
        # The server may not show statements. The waits then time out.
        with suppress(LockBackendError):
            return self._waiting_claims()
        return ()

    def _waiting_claims(self) -> list[WaitingClaim]:
        shown = {facts.digest: facts for facts in self._shown_facts()}
        with self._claims.mutex:
            own = {_digest(entry): entry for entry in self._claims.nested}
            keys = {one.name: one.claim.key for one in self._claims.entries.values()}
        for digest, entry in own.items():
            if entry.session is None or digest in shown:
                shown[digest] = self._facts(entry)

        def named(key: Any) -> tuple[Any, str]:
            name = key[0] if isinstance(key, list) else self._sessions.name(key)
            return name, keys.get(name, str(key))

        holds = defaultdict(list)
        for facts in shown.values():
            for key, session in facts.held:
                name, _ = named(key)
                holds[name].append((f"{facts.digest} {name}", session))

        @cache
        def owners(name: Any) -> tuple[str, ...]:
            # A process may have died, or lost a hold.
            found = self._sessions.of_name(name) if holds[name] else ()
            sessions = {0, *(one.number for one in found if one.granted)}
            return tuple(owner for owner, session in holds[name] if session in sessions)

        claims = []
        for digest, facts in shown.items():
            name, key = named(facts.key)
            held = [named(one) for one, _ in facts.held]
            claims.append(
                WaitingClaim(
                    position=facts.position,
                    owner=own[digest].claim.owner if digest in own else digest,
                    holder=facts.holder,
                    owner_ip=facts.owner_ip,
                    key=key,
                    waited=max(0.0, time.time() - facts.position % UNSEEN / 1e6),
                    silent=-1.0,
                    holding=tuple(
                        HeldKey(key, f"{digest} {name}") for name, key in held
                    ),
                    permits=UNLIMITED,
                    needs_all=True,
                    held_by=None,
                    shared_by=owners(name),
                )
            )
        return claims


def _digest(entry: Entry) -> str:
    # The owner itself is secret.
    return hashlib.sha256(entry.claim.owner.encode()).hexdigest()[:16]


def _in_comment(facts: Any) -> str:
    text = json.dumps(facts, separators=(",", ":"))
    # Neither the end of the comment nor a placeholder of the driver.
    return text.replace("*", r"\u002a").replace("%", r"\u0025")
