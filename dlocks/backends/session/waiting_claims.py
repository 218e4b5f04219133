"""The waiting callers that hold keys, as comments in their statements show them.

The server shows running statements to all sessions of the same user.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from dlocks.backends.base import Inspector
from dlocks.backends.session.sessions import Entry
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


class SessionInspector(Inspector):
    """An inspector that knows this process, and sees the sessions of others."""

    backend: Any

    def holders(self, key: str) -> Sequence[Holder]:
        backend = self.backend
        rows, own = self._sessions(key)
        held = [one for one in own if one.token is not None and one.session]
        mine = {one.session.pid for one in held if one.session}
        others = [facts for granted, *facts, _ in rows if granted]
        return [
            *map(backend._own_holder, sorted(held, key=lambda one: one.token or 0)),
            *(backend._holder_of(key, *one) for one in others if one[-1] not in mine),
        ]

    def waiters(self, key: str, prefix: str) -> Sequence[Waiter]:
        rows, own = self._sessions(key)
        mine = {one.session.pid: one for one in own if one.session and one.waiting}
        found: list[tuple[Any, ...]] = []
        shown: set[Entry] = set()
        # In the order of the engine's queue.
        for granted, *facts, waited in sorted(rows, key=lambda row: -(row[-1] or 0)):
            if granted:
                continue
            entry = mine.get(facts[-1])
            if entry is not None:
                shown.add(entry)
                found.append(_as_waiter(entry))
            else:
                who = self.backend._shown_session(*facts)
                found.append((*who, float(waited or 0), (), False))
        # The others follow when a session of this process waits for them.
        found += [_as_waiter(one) for one in own if one.waiting and one not in shown]
        return [
            Waiter(
                holder=who,
                owner_ip=ip,
                holds=tuple(held.removeprefix(prefix) for held in holds),
                waits_for=key.removeprefix(prefix),
                waited=max(0.0, waited),
                shared=shared,
            )
            for who, ip, waited, holds, shared in found
        ]

    def _sessions(self, key: str) -> tuple[list[Any], list[Entry]]:
        """Return the sessions that hold a key or wait for it, and the own entries.

        A session is whether it holds the key, its name, address and number, and the
        seconds for which it has waited.
        """
        backend, name = self.backend, self.backend._name(key)
        (text,) = backend._ask_main("sessions", name) or ("",)
        with backend._mutex:
            own = list(one for one in backend._entries.values() if one.name == name)
        return json.loads(text or "[]"), own

    def waiting_claims(self) -> Sequence[WaitingClaim]:
        try:
            return _read(self.backend)
        except LockBackendError:
            # The server may not show statements. The waits then time out.
            return ()


def _as_waiter(entry: Entry) -> tuple[Any, ...]:
    claim = entry.claim
    holds = [held.key for held in claim.holding]
    waited = time.time() - entry.since
    return claim.holder, claim.owner_ip, waited, holds, claim.shared


def _read(backend: Any) -> list[WaitingClaim]:
    (texts,) = backend._ask_main("comments", 0) or ("",)
    shown = {}
    for text in json.loads(texts or "[]"):
        # Another version of this package may write other facts.
        with suppress(TypeError, ValueError):
            facts = json.loads(text.partition("/*dlocks ")[2].partition("*/")[0])
            digest, _since, _holder, _ip, _key, _held = facts
            shown[digest] = facts
    with backend._mutex:
        own = {_digest(entry): entry for entry in backend._nested}
        keys = {one.name: one.claim.key for one in backend._entries.values()}
    for digest, entry in own.items():
        if entry.session is None or digest in shown:
            shown[digest] = _facts(backend, entry)

    def named(key: Any) -> tuple[Any, str]:
        name = key[0] if isinstance(key, list) else backend._name(key)
        return name, keys.get(name, str(key))

    holds = defaultdict(list)
    for digest, *_, held in shown.values():
        for key, session in held:
            name, _ = named(key)
            holds[name].append((f"{digest} {name}", str(session)))

    @cache
    def owners(name: Any) -> tuple[str, ...]:
        # A process may have died, or lost a hold.
        (found,) = (holds[name] and backend._ask_main("holders", name)) or ("",)
        sessions = {"0", *str(found).split()}
        return tuple(owner for owner, session in holds[name] if session in sessions)

    claims = []
    for digest, position, holder, ip, key, held in shown.values():
        name, key = named(key)
        mine = [named(one) for one, _ in held]
        claims.append(
            WaitingClaim(
                position=position,
                owner=own[digest].claim.owner if digest in own else digest,
                holder=holder,
                owner_ip=ip,
                key=key,
                waited=max(0.0, time.time() - position % UNSEEN / 1e6),
                silent=-1.0,
                holding=tuple(HeldKey(key, f"{digest} {name}") for name, key in mine),
                permits=UNLIMITED,
                needs_all=True,
                held_by=None,
                shared_by=owners(name),
            )
        )
    return claims


def comment_of(backend: Any, entry: Entry) -> str:
    """Return the comment of a statement that waits, which is empty for others.

    A wait may consist of several statements.
    """
    since = f"/*since {round(entry.since * 1e6)}*/" if entry.waiting else ""
    facts = _facts(backend, entry) if since and entry.claim.holding else [()]
    while facts[-1]:
        text = _in_comment(facts)
        if len(text) <= LONGEST_COMMENT:
            return f"{since}/*dlocks {text}*/"
        # Without its oldest holds, a deadlock may end by a timeout.
        del facts[-1][0]
    return since


def _in_comment(facts: Any) -> str:
    text = json.dumps(facts, separators=(",", ":"))
    # Neither the end of the comment nor a placeholder of the driver.
    return text.replace("*", r"\u002a").replace("%", r"\u0025")


def _facts(backend: Any, entry: Entry) -> list[Any]:
    """Return what the comment of a waiter says, with its newest hold last.

    A hold is a key and the server's number of its session, or 0 in a transaction.
    """

    def shown(key: str) -> Any:
        return key if len(json.dumps(key)) <= LONGEST_KEY else [backend._name(key)]

    claim, held = entry.claim, []
    holder = claim.holder
    while len(_in_comment(holder)) > LONGEST_HOLDER:
        # A long note must not displace the holds.
        holder = holder[:-1]
    for one in claim.holding:
        if not one.owner:
            held.append((0, shown(one.key), 0))
        elif found := backend._held(one):
            hold, session = found
            if not hold.leaving and hold.ends_at > clock.now():
                held.append((hold.number, shown(one.key), session.pid))
    return [
        _digest(entry),
        round(entry.since * 1e6) + UNSEEN * (entry.session is None),
        holder,
        claim.owner_ip,
        shown(claim.key),
        [one[1:] for one in sorted(held, key=lambda one: one[0])],
    ]


def _digest(entry: Entry) -> str:
    # The owner itself is secret.
    return hashlib.sha256(entry.claim.owner.encode()).hexdigest()[:16]
