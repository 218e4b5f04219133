"""The claims of one process on session locks, and its waiters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dlocks.backends.local_claims import LocalClaims, LocalEntry
from dlocks.backends.session.session import Lock, Session
from dlocks.values import Waiter


@dataclass(slots=True, eq=False)
class Entry(LocalEntry):
    """A claim that holds a key, requests it or waits for it."""

    name: str | int = field(kw_only=True)
    # Its position among the claims of this process.
    number: int = field(default_factory=itertools.count(1).__next__)
    # The session on which it is held, requested or waited for.
    session: Session | None = None
    # Whether the server has cancelled its wait.
    interrupted: bool = False
    # Whether its session had the lock when it was released.
    was_held: bool = False

    @property
    def lock(self) -> Lock:
        return self.name, self.claim.shared

    def as_waiter(self, key: str, prefix: str) -> Waiter:
        return Waiter(
            holder=self.claim.holder,
            owner_ip=self.claim.owner_ip,
            holds=tuple(held.key.removeprefix(prefix) for held in self.claim.holding),
            waits_for=key.removeprefix(prefix),
            waited=max(0.0, time.time() - self.since),
            shared=self.claim.shared,
        )


# Entries in a fixed order, by name. Each change is one assignment, so that an interrupt
# loses none of them.
Table = dict[str | int, tuple[Entry, ...]]


def add(table: Table, entry: Entry) -> None:
    table[entry.name] = (*table.get(entry.name, ()), entry)


def remove(table: Table, entry: Entry) -> None:
    """Remove an entry, if it is there. No name is left without entries."""
    others = tuple([one for one in table.get(entry.name, ()) if one is not entry])
    if others:
        table[entry.name] = others
    else:
        table.pop(entry.name, None)


class Claims(LocalClaims[Entry]):
    """The claims of one process: who waits for which name, and who is on a session."""

    def __init__(self, maintain: Callable[[], float | None]) -> None:
        super().__init__("dlocks-sessions", maintain)
        # The waiters by name. Only the first one of a name has a session, and those
        # whose callers hold other keys.
        self.queued: Table = {}

    @property
    def nested(self) -> list[Entry]:
        """Return the waiters whose callers hold other keys."""
        waiters = itertools.chain.from_iterable(list(self.queued.values()))
        return [entry for entry in waiters if entry.claim.holding]

    def held(self, owner: str) -> tuple[Entry, Session] | None:
        """Return the entry and the session of a claim that holds its key."""
        entry = self.entries.get(owner)
        if entry is None or entry.token is None or entry.session is None:
            return None
        return entry, entry.session

    @staticmethod
    def session_of(entry: Entry) -> Session | None:
        """Return the session of a claim, or None if it has left it.

        An interrupt may have struck before that was recorded. The session may have
        another claim on the key by now.
        """
        session = entry.session
        is_there = session is not None and entry in session.at.get(entry.name, ())
        return session if is_there else None

    @staticmethod
    def is_shared(entry: Entry, session: Session) -> bool:
        """Return whether another claim shares the session's lock of a key."""
        return entry.claim.shared and any(
            one.claim.shared and one.token is not None and one is not entry
            for one in session.at.get(entry.name, ())
        )

    # The caller of these methods holds the mutex.

    @staticmethod
    def extend(entry: Entry, session: Session) -> float:
        """Renew a lease as far as possible, and return its end.

        The server counts its idle timeout from the last statement that it received. The
        reply may have been read much later.
        """
        sure_until = session.stood_at + entry.claim.ttl
        entry.ends_at = max(entry.ends_at, sure_until)
        return sure_until

    def enqueue(self, entry: Entry) -> None:
        entry.waiting, entry.since = True, time.time()
        # First the table in which a cancellation finds it.
        self.entries[entry.claim.owner] = entry
        add(self.queued, entry)

    def without_session(self) -> list[Entry]:
        """Return the first waiters of keys that have no session."""
        heads = [entries[0] for entries in self.queued.values()]
        return [entry for entry in heads if entry.session is None]

    def are_awaited(self) -> bool:
        """Return whether a connected session waits for each key with waiters."""
        heads = [entries[0].session for entries in self.queued.values()]
        return all(session is not None and session.identity for session in heads)

    def move_back(self, names: Collection[str | int]) -> None:
        """Begin with other keys the next time."""
        self.queued = dict(sorted(self.queued.items(), key=lambda at: at[0] in names))

    def admits(self, entry: Entry, session: Session) -> bool:
        """Return whether a claim may be tried on a session.

        It is a new one, or the first waiter of its key. The engine does not distinguish
        the claims on one session.
        """
        claim = entry.claim
        first = self.queued.get(entry.name, (entry,))[0]
        return (
            (first is entry or bool(claim.beside))
            and entry.session is None
            and not (entry.leaving or entry.gone)
            and all(
                claim.shared
                and (
                    one.claim.shared
                    or (one.claim.owner == claim.beside and not one.resting)
                )
                for one in session.at.get(entry.name, ())
            )
        )

    def assign(self, entry: Entry, session: Session) -> None:
        # First what a release follows, in case of an interrupt.
        entry.session = session
        add(session.at, entry)

    def unassign(self, entry: Entry) -> None:
        if entry.session is not None:
            remove(entry.session.at, entry)
        entry.session = None

    def granted(self, entry: Entry, token: int) -> None:
        super().granted(entry, token)
        remove(self.queued, entry)

    def forget(self, entry: Entry) -> None:
        if entry.gone:
            # Its owner and its session may belong to another claim by now.
            return
        # Last from the table in which it is found, so this can be repeated after an
        # interrupt.
        remove(self.queued, entry)
        self.unassign(entry)
        super().forget(entry)
