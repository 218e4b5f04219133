"""Acquisition of a key: the row is created, granted or taken over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from django.db import transaction
from django.db.utils import Error

from dlocks.backends import table
from dlocks.backends.base import Inspector
from dlocks.backends.database.fragments import (
    FREE_BY_CLOCK,
    GRANT,
    MICROSECONDS,
    RELEASED,
    STALE,
    STALE_AFTER_GRACE,
)
from dlocks.backends.database.holders import Holders
from dlocks.backends.database.queue import KeyQueue
from dlocks.backends.database.rows import LockedRow, Row
from dlocks.exceptions import LockBackendError, LockNotAwaitable, LockStale
from dlocks.runtime import clock
from dlocks.sql.dialect import KEY
from dlocks.sql.direct import Reply
from dlocks.text import permits_taken
from dlocks.values import UNLIMITED, Claim, Grant

# Attempts to acquire a key that appears to be free, per call.
FREE_TRIES = 3

# The token of the grant, or None, and the row if it was read.
Take = Callable[[], tuple[int | None, Row | None]]


class Acquisition(KeyQueue, Holders):
    """The part that acquires keys. A strategy decides in ``_take()`` how."""

    supports_sharing: ClassVar[bool] = True

    inspector: Inspector

    # Keys that a thread of this process is trying to acquire exclusively at this
    # moment. Further callers need not send the same request, as a crowd would.
    _requested_keys: set[str]

    # The texts of the most frequent statements, by what they depend on.
    _grants: dict[tuple[Any, ...], str]

    def acquire(self, claim: Claim) -> Grant | None:
        self._refuse_unstorable(claim.key)
        if claim.shared:
            if (grant := self._share(claim)) is None:
                self._refuse(claim, None)
            return grant
        self._requested_keys.add(claim.key)
        try:
            return self._acquire(claim)
        finally:
            self._requested_keys.discard(claim.key)

    def _acquire(self, claim: Claim) -> Grant | None:
        take: Take = partial(self._take, claim)
        if claim.scope == "transaction" and self.dialect.locks_in_passing:
            take = partial(self._or_undo, take)
        token, row = take()
        for number in range(FREE_TRIES):
            if token is not None or row is not None:
                break
            if number:
                # The row was not created, because another statement had locked the gap
                # at that moment.
                time.sleep(random.uniform(0, 0.001 * 2**number))  # noqa: S311 (jitter)
            self._create(claim.key)
            token, row = take()
        if (
            token is None
            and row is not None
            and row.blocked
            and self._unblock(claim.key)
        ):
            # The waiters were dead, or their turn has passed.
            token, row = take()
        if (
            token is None
            and row is not None
            and row.stale
            and claim.takeover
            and self.observations is not None
        ):
            # Observations decide here, not the clock.
            end = partial(self._expire_observed, claim.key, row.version, row.ends)
            if self._run_outside(end):
                token, _ = take()
        if token is not None:
            return Grant(token, takeover=row is not None and row.stale)
        self._refuse(claim, row)
        return None

    def _share(self, claim: Claim) -> Grant | None:
        """Grant a shared claim if the key permits it and no waiter is ahead."""

        def step(row: LockedRow | None) -> Grant | LockStale | None:
            try:
                return self._apply(row, table.acquire, claim)[0] if row else None
            except LockStale as error:
                # The step is committed, since it changed nothing.
                return error

        result = self._step(claim.key, step, busy=lambda: None)
        if isinstance(result, LockStale):
            raise LockStale(key=claim.key, holder=self.holder(claim.key)) from None
        return result

    def _take(self, claim: Claim) -> tuple[int | None, Row | None]:
        """Return the token of the grant, or None, and the row if it was read.

        The row is as it was before the grant.
        """
        raise NotImplementedError

    def _or_undo(self, take: Take) -> tuple[int | None, Row | None]:
        """Call ``take()`` in a savepoint; roll back to it if nothing was granted.

        So no row stays locked, and an error does not abort the transaction.
        """
        try:
            with transaction.atomic(using=self.database):
                token, row = take()
                if token is None:
                    raise _NothingGrantedError
        except _NothingGrantedError:
            pass
        except Error as error:
            raise self._failure(error) from error
        return token, row

    def _grant_or_take_over(self, claim: Claim) -> tuple[int | None, Row | None]:
        # There are two steps, so that a takeover is known to be one. The second step is
        # rarely needed.
        if (token := self._grant(claim)) is not None:
            return token, None
        row = self._look(claim)
        for number in range(FREE_TRIES):
            if row is None or not row.free:
                return None, row
            # ``row.stale`` may be outdated, since the holder may have released the row
            # after the read.
            if (token := self._grant(claim, stale=row.stale)) is not None:
                return token, row
            # The key is free but was not granted. Another caller reads the row at that
            # moment, or an open transaction has locked it.
            time.sleep(random.uniform(0, 0.001 * 2**number))  # noqa: S311 (jitter)
            row = self._look(claim)
        return None, row

    def _grant(
        self, claim: Claim, *conditions: str, stale: bool = False, **parameters: Any
    ) -> int | None:
        """Write the row for this claim, and return the token.

        The last holder must have released the key. With ``stale``, its lease must have
        expired without a release.
        """
        stale = stale and claim.takeover
        shape = (claim.scope, claim.fair, stale, conditions)
        if (sql := self._grants.get(shape)) is None:
            free = STALE_AFTER_GRACE if stale else RELEASED
            where = " AND ".join([KEY, f"({self._free(claim, free)})", *conditions])
            statement: Callable[..., str] = self.dialect.compare_and_swap
            if claim.scope == "transaction":
                statement = self.dialect.write_or_leave
                if self.dialect.read_committed:
                    where += f" AND {self.dialect.read_committed}"
            sql = self._grants[shape] = (
                self._sql(statement, GRANT, where) + self.dialect.returning
            )
        return self._granted(sql, self._parameters(claim) | parameters)

    def _granted(self, sql: str, parameters: Mapping[str, Any]) -> int | None:
        if not self.dialect.one_writer:
            return self.dialect.granted(self._ask(sql, parameters, locked=_nothing))
        with self._with_short_timeout():
            try:
                return self.dialect.granted(self._ask(sql, parameters, locked=_nothing))
            except LockBackendError as error:
                if self.in_transaction():
                    error.add_note(
                        "Set OPTIONS['transaction_mode'] = 'IMMEDIATE' for this"
                        " database."
                    )
                raise

    def _look(self, claim: Claim) -> Row | None:
        # This check comes first, since at SERIALIZABLE even a read locks the row on
        # InnoDB.
        self._refuse_unfit_transaction(claim)
        sql = self._sql(
            lambda table, free, stale: (
                f"SELECT CASE WHEN {free} THEN 1 ELSE 0 END, CASE WHEN {stale} THEN 1"
                f" ELSE 0 END, version, CASE WHEN {FREE_BY_CLOCK} AND (waiters > 0 OR"
                f" shares > 0) THEN 1 ELSE 0 END, {{ends}}"
                f" FROM {table} WHERE {KEY}"
            ),
            self._free(claim, FREE_BY_CLOCK if claim.takeover else RELEASED),
            STALE if self.observations is None else "status = 'P'",
        )
        asked_at = clock.now()
        for free, stale, version, blocked, ends in self._rows(
            sql, self._parameters(claim)
        ):
            if stale and self.observations is not None:
                stale = (
                    self.observations.note(claim.key, (version, ends), asked_at) <= 0
                )
            return Row(bool(free), bool(stale), version, bool(blocked), int(ends))
        return None

    def _free(self, claim: Claim, free: str) -> str:
        """Return the condition under which the claim can be granted.

        ``free`` is the part about the last hold.
        """
        free += " AND shares = 0"
        if claim.fair:
            free += " AND waiters = 0"
        # This includes an earlier grant of the claim, whose reply was lost, and a key
        # that is reserved for it, since its turn has come.
        return free + " OR ((status = 'P' OR end_time > {now}) AND owner = %(owner)s)"

    def _parameters(self, claim: Claim) -> dict[str, Any]:
        in_transaction = claim.scope == "transaction"
        return {
            "key": claim.key,
            # Free on commit. Until then the database itself keeps the row locked.
            "status": "S" if in_transaction else "P",
            "ttl": 0 if in_transaction else round(claim.ttl * MICROSECONDS),
            "owner": claim.owner,
            "holder": self._fitted(claim.holder)[:255],
            "owner_ip": claim.owner_ip,
            "grace": self._grace,
        }

    def _unblock(self, key: str) -> bool:
        """Advance the queue; return whether no waiter is in the way any more."""
        return self._run_outside(partial(self.move_on, key))

    def _refuse(self, claim: Claim, row: Row | None) -> None:
        """Raise an error if waiting would not help."""
        if (
            row is not None
            and row.stale
            and not claim.takeover
            and not self.in_transactions([claim.key])
            # A transaction that has just ended has renewed its lease.
            and (row := self._look(claim)) is not None
            and row.stale
        ):
            raise LockStale(key=claim.key, holder=self.holder(claim.key))
        if claim.scope == "transaction" and self.connection.vendor == "sqlite":
            holder = self.holder(claim.key)
            who = f"held by {holder or 'another caller'}"
            if claim.permits < UNLIMITED:
                sharers, waiting = self.inspector.sharers(claim.key)
                who = permits_taken(claim.permits, sharers, waiting) if sharers else who
            raise LockNotAwaitable(
                f"{claim.key!r} cannot be waited for inside a transaction: {who}."
                " SQLite has one writer, so its holder cannot release it before this"
                " transaction ends. Acquire the lock before the transaction.",
                key=claim.key,
                holder=holder,
            )

    def exchange(self, claim: Claim, successor: Claim) -> Grant | None:
        # The successor's row matches too, in case the reply to an exchange was lost.
        where = f"{KEY} AND owner IN (%(owner)s, %(predecessor)s) AND {self._live}"
        sql = (
            self._sql(self.dialect.compare_and_swap, GRANT, where)
            + self.dialect.returning
        )
        parameters = {**self._parameters(successor), "predecessor": claim.owner}
        read = partial(self._own_row, where, parameters)
        token = self._retry_release(
            lambda: self._granted(sql, parameters), claim.key, read
        )
        return None if token is None else Grant(token)


def _nothing() -> Reply:
    return Reply([], 0)


class _NothingGrantedError(Exception):
    """An exception that rolls back a savepoint."""
