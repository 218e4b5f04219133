"""Locks in the caller's transaction, and leases that guard one.

In transaction scope, the row is written so that it is free as soon as the transaction
ends. Until then, the database's own row lock keeps all other callers away from it. A
guard writes the row of its lease in the caller's transaction, whose end unlocks it. The
row is written, not only locked, because the other nodes of a Galera cluster do not see
row locks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dlocks.backends import table as rules
from dlocks.backends.base import HANDOVER_LEASE
from dlocks.backends.database.holders import Holders
from dlocks.backends.database.session import RowLockedError, Session
from dlocks.backends.database.store import Store
from dlocks.sql.clock import ticks
from dlocks.values import Claim, Grant

# Attempts to acquire a key that appears to be free, per call.
FREE_TRIES = 3
# Seconds for which a step reserves a key that the next statement acquires. A rollback
# within this time does not free the key at once.
RESERVED_FOR = 0.1


class TransactionLocks:
    """The part that keeps rows for the caller's transaction."""

    def __init__(
        self, store: Store, holders: Holders, take: Callable[[Claim], int | None]
    ) -> None:
        self.store = store
        self.session = store.session
        self.holders = holders
        self._take = take

    # Transaction scope.

    def acquire(self, claim: Claim) -> Grant | None:
        """Grant a key to the caller's transaction, by one statement within it.

        A step would leave a row locked that is not granted. Steps run outside.
        """
        takeover = False
        for _ in range(FREE_TRIES):
            if (token := self._take_or_undo(claim)) is not None:
                return Grant(token, takeover=takeover)
            # This check comes first, since at SERIALIZABLE even a read locks the row on
            # InnoDB.
            self._refuse_unfit(claim)
            key = self.store.peek(claim.key)
            if key is None:
                self.store.create([claim.key])
            elif key.is_reserved_for(claim):
                # A step had locked the row for a moment.
                continue
            elif not key.is_free:
                break
            else:
                # Reserve it, unless earlier waiters come first. The step ends a stale
                # hold, and the claim's place in the queue.
                lease = HANDOVER_LEASE if claim.queued else RESERVED_FOR
                brief = replace(claim, ttl=min(claim.ttl, lease))
                step = partial(self.store.step, claim.key, rules.acquire, brief)
                try:
                    grant, _ = self.store.run_outside(step)
                except RowLockedError:
                    # A transaction holds the key.
                    break
                if grant is None:
                    break
                takeover |= grant.takeover
        return None

    def _take_or_undo(self, claim: Claim) -> int | None:
        """Acquire in a savepoint, so that a row that was not granted is unlocked.

        PostgreSQL keeps a row locked that matched in the snapshot, and no longer
        matches once it is locked (EvalPlanQual). On InnoDB, only the statement itself
        can avoid that.
        """
        with suppress(RowLockedError):
            if not self.session.engine.unlocks:
                return self._take(claim)
            return self.session.call_in_atomic(partial(self._take_unlocked, claim))
        return None

    def _take_unlocked(self, claim: Claim) -> int:
        # It skips locked rows. So if anything holds it up, the table is locked.
        if (token := self.session.unlocked(self._take, claim)) is not None:
            return token
        raise RowLockedError

    def _refuse_unfit(self, claim: Claim) -> None:
        """Refuse a transaction whose snapshot may be older than the lock.

        Such a snapshot does not show the changes of the last holder. A transaction at
        READ UNCOMMITTED is refused too, and so is one that ends when it meets a locked
        row.
        """
        database = self.session.database
        if not self.session.engine.isolation:
            return
        level, rolls_back = self.isolation(self.session)
        if level not in self.session.engine.levels:
            why = (
                "Its snapshot may be older than the lock and hide the last holder's"
                " changes."
            )
            if level == "READ UNCOMMITTED":
                why = "It may read changes that are rolled back."
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction, which runs at"
                f" {level} on database {database!r}. {why} Acquire the lock before the"
                " transaction begins, or run it at READ COMMITTED."
            )
        if rolls_back:
            raise RuntimeError(
                f"{claim.key!r} cannot be locked in this transaction. The server of"
                f" database {database!r} runs with innodb_rollback_on_timeout=ON, so a"
                " busy key would roll back the whole transaction. Acquire the lock"
                " before the transaction begins, or with scope='lease'."
            )

    @staticmethod
    def isolation(session: Session) -> tuple[str, bool]:
        """Return the isolation level, and the effect of a lock wait timeout.

        The second value is true if the timeout rolls back the whole transaction.
        """
        level, *rolls_back = session.rows(session.engine.isolation, {})[0]
        return str(level).upper().replace("-", " "), any(rolls_back)

    def release(self, claim: Claim, status: str, rest_for: float) -> bool:
        """Write the row as it is to be after the commit, and notify the next waiter."""
        if self.session.connection.needs_rollback:
            # The rollback releases it.
            return True
        parameters = self.holders.releasing(claim, status, rest_for)
        rows: Sequence[Any] = ()
        with suppress(RowLockedError):
            rows = self.session.send("release_on_commit", parameters, True).rows
        if channels := {channel for (channel,) in rows if channel}:
            notifications = self.store.notifications
            self.session.unlocked(notifications.notify, channels)
            notifications.send(channels)
        return bool(rows)

    # Guards.

    def pin(self, claim: Claim, database: str) -> bool:
        """Renew a lease in the caller's transaction, whose end unlocks the row."""
        # The row cannot count the claims that join meanwhile. A release has to look.
        self.holders.queue.contended.add(claim.key)
        holders = self.holders.on(database)
        write = partial(holders.write, holders.renewed(), [claim])
        engine = holders.session.engine
        if engine.vendor == "mysql":
            # One statement at READ COMMITTED. At another level it finds and locks
            # nothing.
            with suppress(RowLockedError):
                if write(also=f" AND {engine.fresh}"):
                    return True
            level, rolls_back = self.isolation(holders.session)
            if level not in engine.levels:
                return self._pin_by_primary_key(holders, claim, rolls_back=rolls_back)
        return holders.retried(lambda: write() == 1, claim)

    def _pin_by_primary_key(
        self, holders: Holders, claim: Claim, *, rolls_back: bool
    ) -> bool:
        """Lock and write a row in an InnoDB transaction above READ COMMITTED.

        At that level a search by another index, or one that skips a locked row, also
        locks the gap beside the row until the transaction ends. Then no session can
        insert a row there. A search by the whole primary key does not lock the gap.

        A plain SELECT would take the transaction's snapshot. MariaDB then refuses to
        lock a row that changed since (innodb_snapshot_isolation, 11.6). So another
        session reads, except in a TestCase, whose rows it would not see.
        """
        session = holders.session
        reader = holders if self.session.is_alone else self.holders
        _, condition, parameters = holders.own([claim])
        parameters["ttl"] = ticks(claim.ttl)
        row, table = "key_resource = %(key)s", "{locks} FORCE INDEX (PRIMARY)"
        if claim.shared:
            row, table = "id = %(id)s", "{claims} FORCE INDEX (PRIMARY)"
            find = "SELECT id FROM {claims} WHERE owner = %(owner)s"
            ask = partial(reader.session.rows, find, parameters)
            if not (found := self.store.run_outside(ask)):
                return False
            parameters["id"] = found[0][0]
        lock = session.sql(f"SELECT 1 FROM {table} WHERE {row} FOR UPDATE NOWAIT")
        renew = f"UPDATE {table} SET {holders.renewed()} WHERE {row} AND {condition}"

        def write() -> bool:
            try:
                session.run(session.execute, lock, parameters)
            except RowLockedError as error:
                if rolls_back:
                    raise holders.locked(claim.key) from error
                return False
            return session.ask(renew, parameters).changed == 1

        read = partial(self.store.run_outside, partial(reader.left, [claim]))
        return holders.retried(write, claim, left=read)
