"""The state of a key in the tables, and the step that changes it.

A step is a short transaction: it locks the key's row with ``select_for_update()``,
reads the key's claims, applies a rule of ``dlocks.backends.table`` to them, and saves
the difference. The rules are there, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from django.db import Error
from django.db.models import CharField, Func, Value

from dlocks.backends import table as rules
from dlocks.backends.base import HEARTBEAT_TIMEOUT, UnstorableKeyError
from dlocks.backends.database.failures import is_refused, unusable
from dlocks.backends.database.notify import Notifications
from dlocks.backends.database.session import RowLockedError, Session, StepError
from dlocks.backends.database.state import (
    IS_IN_TRANSACTION,
    MOMENT,
    Key,
    Reader,
    batches,
    fitted,
    is_unused,
    models,
    to_text,
)
from dlocks.backends.table import Held, KeyState
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.sql.clock import After, At, Now, ticks
from dlocks.values import Claim, Ticket

T = TypeVar("T")

# Seconds for which a step waits for a row that another step has locked.
ROW_WAIT = 0.05
# Seconds for which a step reads again what others change, or draws other numbers.
ABSENT_FOR = 2.0
# Seconds of silence after which a queued claim is deleted, and not only skipped.
DELETE_AFTER = 10.0
# Seconds after which the server ends a session that idles in a step.
IDLE_LIMIT = "2s"
# A write of the table that changes no row.
NOTHING = "UPDATE {locks} SET version = version WHERE key_resource IS NULL"


class AbsentError(StepError):
    """Some keys have no row. They are the argument, and that of the next error."""


class ChangedError(StepError):
    """A claim left without the lock on its key, or a row was kept as it is."""


class Store:
    """The two tables of one database."""

    def __init__(
        self,
        session: Session,
        run_outside: Callable[[Callable[[], Any]], Any],
        notifications: Notifications,
        *,
        prefix: Callable[[], str],
        grace: float,
        observed_for: float | None = None,
        deletes: bool = False,
    ) -> None:
        self.session = session
        # Returns the prefix of the backend's keys.
        self.prefix = prefix
        # Whether no clock is trusted.
        self.observed = observed_for is not None
        self.reader = Reader(session, grace, observed_for)
        # Whether the row of a free key is deleted.
        self.deletes = deletes
        # Calls a function outside of the caller's transaction, unless that is alone.
        self.run_outside = run_outside
        self.notifications = notifications

    @property
    def locks(self) -> Any:
        return models().ResourceLock.objects.using(self.session.database)

    @property
    def claims(self) -> Any:
        return models().LockClaim.objects.using(self.session.database)

    # What can be stored.

    def fitted(self, text: str) -> str:
        """Return a text with the characters escaped that the database cannot store."""
        if text.isascii():
            return text
        return self.session.unlocked(fitted, text, self.session.connection)

    def refuse_unstorable(self, key: str) -> None:
        if (fitted := self.fitted(key)) != key:
            raise UnstorableKeyError(
                f"The key {key!r} cannot be stored on database"
                f" {self.session.database!r}. Its encoding, or the charset of the"
                f" connection, lacks some characters ({fitted}). Use user_key(), which"
                " makes keys of ASCII characters."
            )

    # Reading.

    def read(
        self, keys: Sequence[str], *, by_clock: bool = False, claims: bool = True
    ) -> dict[str, Key]:
        """Return keys as they are, without locking anything.

        ``by_clock`` trusts the database's clock in any case, to show them to people.
        """
        asked_at = None if by_clock else clock.now()
        return self.session.unlocked(self._read, keys, keys if claims else (), asked_at)

    def peek(self, key: str, *, by_clock: bool = False) -> Key | None:
        """Return a key without its claims."""
        return self.read([key], by_clock=by_clock, claims=False).get(key)

    def _read(
        self, keys: Sequence[str], queues: Sequence[str], asked_at: float | None
    ) -> dict[str, Key]:
        # The claims come first. One that is granted in between is found in the row.
        claims = self._claims_of(queues)
        shown = {}
        if asked_at is None and self.session.engine.vendor == "postgresql":
            shown = {"is_kept": IS_IN_TRANSACTION}
        rows = self.locks.annotate(now=Now(), **shown).filter(pk__in=keys)
        found = ((row, claims.get(row.pk, ())) for row in rows)
        return {row.pk: self.reader.key(row, some, asked_at) for row, some in found}

    def _claims_of(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {key: [] for key in keys}
        claims = self.claims.filter(key_resource__in=keys).annotate(now=Now())
        for one in claims.order_by("pk"):
            found[one.key_resource].append(one)
        return found

    # Steps.

    def step(
        self,
        key: str,
        rule: Callable[..., tuple[KeyState, T]],
        *arguments: Any,
        wait: float = ROW_WAIT,
        in_turn: bool = False,
        **saving: Any,
    ) -> tuple[T, Key]:
        """Apply a rule to a key, and return its result and the key as it is now.

        Raise RowLockedError if another transaction has locked the row for ``wait``
        seconds. With ``in_turn``, it waits in the engine's own queue of the row, if
        there is one.
        """
        mine = next((one.owner for one in arguments if isinstance(one, Claim)), "")

        def work() -> tuple[T, Key]:
            (locked,) = self._lock([key], wait, True, mine)
            return self.apply(locked, rule, *arguments, **saving), locked

        # A number that the database draws may be taken by a claim that has brought it.
        draws = saving.get("position") is None
        turn = key if in_turn else ""
        result, now = self._transaction(work, wait, draws=draws, turn_of=turn)
        self.notifications.send(now.notified)
        return result, now

    def advance(self, key: str) -> None:
        """Let the queue of a key advance, if that can be.

        The release before it has succeeded. The polls of the waiters do this as well.
        """
        with suppress(RowLockedError, LockBackendError):
            self.step(key, rules.tidy)

    def step_all(
        self,
        keys: Sequence[str],
        work: Callable[[Sequence[Key]], T],
        *,
        flush: bool = True,
        until: float = clock.FOREVER,
    ) -> T:
        """Call ``work`` with several keys, given in order, that one step has locked."""

        def locked() -> T:
            found: list[Key] = []
            absent: set[str] = set()
            for some in batches(keys):
                try:
                    found += self._lock(some, ROW_WAIT, flush)
                except AbsentError as error:
                    # The absent rows of all batches are created together.
                    absent |= error.args[0]
            if absent:
                raise AbsentError(absent)
            return work(found)

        return self._transaction(locked, ROW_WAIT, flush=flush, until=until)

    def _transaction(
        self,
        work: Callable[[], T],
        wait: float,
        *,
        draws: bool = True,
        turn_of: str = "",
        flush: bool = True,
        until: float = clock.FOREVER,
    ) -> T:
        """Call ``work`` in a transaction of its own, again after lost races."""
        engine, pause, turn = self.session.engine, 0.001, 0.0

        def attempt() -> T:
            if turn:
                self._wait_in_turn(turn_of, turn)
            return work()

        began, failing_since = clock.real_now(), clock.FOREVER
        while True:
            try:
                step = partial(self.session.transaction, attempt)
                return self.session.run(step, flush=flush)
            except (AbsentError, ChangedError) as error:
                keys = sorted(error.args[0])
                failing_since = min(failing_since, clock.real_now())
                if clock.real_now() > failing_since + ABSENT_FOR:
                    raise unusable(keys[0], self.session.database) from error
                if isinstance(error, ChangedError):
                    if self.session.in_transaction:
                        # Another try may read the same snapshot.
                        raise RowLockedError from error
                elif not self.create(keys, until) and clock.real_now() > began + wait:
                    raise RowLockedError from error
            except LockBackendError as error:
                is_late = clock.real_now() > began + ABSENT_FOR
                if not (draws and is_refused(error)) or is_late:
                    raise
            except RowLockedError:
                left = began + wait - clock.real_now()
                if engine.limits_waits or left < 0.001:
                    raise
                if turn_of and engine.in_turn:
                    turn = left
                else:
                    clock.back_off(pause)
                    pause = min(2 * pause, 0.016)

    def _lock(
        self, keys: Sequence[str], wait: float, flush: bool, mine: str = ""
    ) -> list[Key]:
        """Lock the rows of keys, in their order. Raise RowLockedError or AbsentError.

        PostgreSQL waits up to ``wait`` seconds, in the order of arrival. It ends the
        session if this process is stopped in the middle, and does not flush the commit
        if a crash may lose it. The select list is evaluated before the row is locked.
        """
        session = self.session
        if session.begins_as_reader:
            # A transaction that has only read cannot always continue with a write.
            session.execute(session.sql(NOTHING), {})
        settings, asked_at = self.limits(wait, flush=flush), clock.now()
        rows = self.locks.select_for_update(nowait=not settings)
        rows = rows.annotate(now=Now(), **settings)
        locked = list(rows.filter(pk__in=keys).order_by("pk"))
        if len(locked) < len(keys):
            raise AbsentError({*keys} - {row.pk for row in locked})
        # A second statement, since the first one may have waited for a row.
        claims = self._claims_of(keys)
        if session.is_nested and session.engine.idle:
            # On InnoDB, the caller's snapshot may be older than the last grant.
            seen = dict(self.locks.filter(pk__in=keys).values_list("pk", "version"))
            if any(seen.get(row.pk) != row.version for row in locked):
                raise RowLockedError
        return [
            self._without_kept(self.reader.key(row, claims[row.pk], asked_at, mine))
            for row in locked
        ]

    def _wait_in_turn(self, key: str, wait: float) -> None:
        engine, sql = self.session.engine, self.session.sql(self.session.engine.in_turn)
        try:
            self.session.execute(sql, {"key": key, "wait": wait})
        except Error as error:
            if engine.code_of(error) == engine.waited:
                raise RowLockedError from error
            raise

    def limits(self, wait: float = ROW_WAIT, *, flush: bool = True) -> dict[str, Any]:
        """Return what the statement that locks a row sets for its transaction.

        In a TestCase, the settings would stay.
        """
        if not self.session.engine.limits_waits or self.session.is_nested:
            return {}
        settings = {
            "lock_timeout": f"{max(1, round(wait * 1000))}ms",
            "idle_in_transaction_session_timeout": IDLE_LIMIT,
        }
        if not flush:
            settings["synchronous_commit"] = "off"
        set_config = partial(Func, function="set_config", output_field=CharField())
        return {
            f"its_{name}": set_config(Value(name), Value(value), Value(True))
            for name, value in settings.items()
        }

    def _without_kept(self, key: Key) -> Key:
        """Return a locked key in which no share has ended that a transaction keeps.

        Such a transaction renews the share without the lock on the key. It may have
        committed since the claims were read.
        """
        ended = [one for one in key.state.shares if one.end <= key.at.now]
        if not ended:
            return key
        read = {one.owner: one for one in key.claims}
        rows = self.claims.filter(pk__in=[read[one.claim.owner].pk for one in ended])
        free = rows.select_for_update(skip_locked=True).values_list("owner", "end_time")
        unchanged = {owner for owner, end in free if end == read[owner].end_time}
        kept = [one for one in ended if one.claim.owner not in unchanged]
        for one in kept:
            key.state = key.state.with_hold(one, replace(one, end=key.at.now + MOMENT))
        return key

    def apply(
        self,
        key: Key,
        rule: Callable[..., tuple[KeyState, T]],
        *arguments: Any,
        status: str = "S",
        channel: str = "",
        position: int | None = None,
    ) -> T:
        """Apply a rule to a locked key, save what it changes, and return its result.

        ``status`` is that of a released key. ``channel`` and ``position`` are those of
        a claim that joins the queue.
        """
        before = key.state
        after, result = rule(before, *arguments, at=key.at)
        forgotten = key.at.now - DELETE_AFTER
        heard = tuple(one for one in after.queue if one.end > forgotten)
        after = replace(after, queue=heard)
        shares = {held.claim.owner: held for held in after.shares}
        queue = {one.claim.owner: one for one in after.queue}
        rows = {one.owner: one for one in key.claims}
        gone = [one for owner, one in rows.items() if owner not in {*shares, *queue}]
        old = {held.claim.owner: held for held in before.shares}
        written = [held for owner, held in shares.items() if held is not old.get(owner)]
        self._delete_claims(key, [one.pk for one in gone])
        for held in written:
            if held.claim.owner in rows:
                self._write_share(rows[held.claim.owner], held, before.version)
            else:
                self.insert_claim(held.claim, held=held)
        for owner, one in queue.items():
            if owner not in rows:
                new = self.insert_claim(one.claim, channel, position)
                if isinstance(result, Ticket) and result.position is not None:
                    # The database has chosen it.
                    result = replace(result, position=new.pk)
        self._write_row(key, before, after, status)
        granted = {held.claim.owner for held in (after.held, *written) if held}
        key.notified = {
            one.channel
            for one in rows.values()
            if one.version is None and one.owner in granted and one.channel
        }
        self.notifications.notify(key.notified)
        key.state = after
        return result

    def _delete_claims(self, key: Key, ids: list[int]) -> None:
        if not ids:
            return
        deleted = self.delete("{claims}", "id", ids)
        if deleted < len(ids):
            skips = bool(self.session.engine.idle)
            if skips and self.claims.filter(pk__in=ids).exists():
                raise RowLockedError
            raise ChangedError({key.row.pk})

    def delete(self, table: str, primary: str, values: Sequence[Any]) -> int:
        """Delete rows within a step, and return their number.

        No signal is sent, because a receiver for all models may acquire a lock.
        """
        session = self.session
        mine, parameters = session.one_of(primary, values, "row")
        text = f"DELETE FROM {table} WHERE {mine}"
        if session.engine.idle:
            # InnoDB may scan the whole table for a plain DELETE, and wait for a
            # transaction that pins a claim of another key.
            text = session.engine.many(table, "", mine)
        return session.execute(session.sql(text), parameters).changed

    def _write_share(self, row: Any, held: Held, version: int) -> None:
        changes: dict[str, Any] = {"end_time": At(held.end), "hold_count": held.count}
        if held.token > version:
            changes |= {"version": held.token, "begin_time": At(held.since.timestamp())}
        mine = self.claims.filter(pk=row.pk)
        if row.version is not None and self.session.engine.idle:
            # InnoDB would wait for a transaction that guards itself by the share.
            list(mine.select_for_update(nowait=True).values_list("pk"))
        if not mine.update(**changes):
            raise ChangedError({row.key_resource})

    def insert_claim(
        self,
        claim: Claim,
        channel: str = "",
        position: int | None = None,
        held: Held | None = None,
    ) -> Any:
        row = models().LockClaim(
            id=position,
            key_resource=claim.key,
            begin_time=Now(),
            end_time=At(held.end) if held else After(HEARTBEAT_TIMEOUT),
            version=held.token if held else None,
            hold_count=1 if held else 0,
            **self.columns(claim, channel),
        )
        # Unlike save(), this sends no signal.
        self.claims.bulk_create([row])
        if row.pk is None:
            # MySQL has no RETURNING.
            row.pk = self.claims.values_list("pk", flat=True).get(owner=claim.owner)
        return row

    def columns(self, claim: Claim, channel: str) -> dict[str, Any]:
        """Return the columns of a claim that stay the same, but for its key."""
        return {
            **self.who(claim),
            "shared": claim.shared,
            "permits": claim.permits,
            "scope": "P" if claim.scope == "lease" else "S",
            "takeover": claim.takeover,
            "handover_ttl": ticks(claim.ttl),
            "channel": channel,
            "holding": to_text(claim.holding),
        }

    def who(self, claim: Claim) -> dict[str, Any]:
        """Return the columns of both tables that say whose a claim is."""
        return {
            "owner": claim.owner,
            "holder": self.fitted(claim.holder)[:255],
            "owner_ip": claim.owner_ip,
        }

    def _write_row(
        self, key: Key, before: KeyState, after: KeyState, status: str
    ) -> None:
        held, row = after.held, key.row
        changes: dict[str, Any] = {}
        if held is None and before.held is not None:
            changes = {"status": "F", "owner": "", "hold_count": 0, "end_time": Now()}
        elif held is not None and held is not before.held:
            changes = {"end_time": At(held.end)}
            if held.token > before.version:
                changes |= self.who(held.claim) | {
                    "status": "P" if held.claim.scope == "lease" else "S",
                    "begin_time": At(held.since.timestamp()),
                    "hold_count": 1,
                }
            elif after.is_released:
                changes |= {"status": status, "hold_count": 0}
        for name, number in (
            ("version", after.version),
            ("waiters", len(after.live(key.at))),
            ("shares", len(after.shares)),
        ):
            if getattr(row, name) != number:
                changes[name] = number
                setattr(row, name, number)
        if self.deletes and is_unused(after, key.at):
            self.delete("{locks}", "key_resource", [row.pk])
        elif changes:
            self.write_rows([row.pk], changes)

    def write_rows(self, keys: Sequence[str], changes: dict[str, Any]) -> None:
        """Write the rows of keys that a step has locked. Raise ChangedError."""
        if self.locks.filter(pk__in=keys).update(**changes) < len(keys):
            raise ChangedError({*keys})

    def create(self, keys: Sequence[str], until: float = clock.FOREVER) -> bool:
        """Create rows as free, in statements that are committed by themselves.

        An uncommitted insert would make all other callers wait. Return False if that of
        another transaction was in the way, or if ``until`` has passed.
        """
        return bool(self.run_outside(partial(self._create, keys, until)))

    def _create(self, keys: Sequence[str], until: float) -> bool:
        session, created, together = self.session, 0, ""
        if len(keys) > 1 and not session.in_transaction:
            together = session.engine.create_many
        for some in batches(keys) if together else zip(keys):
            if clock.now() > until:
                return False
            with suppress(RowLockedError):
                if together:
                    session.ask(together, {"keys": [*some]})
                else:
                    nothing = Claim(key=some[0], ttl=0.0, owner="")
                    self.insert(nothing, status="S", count=0)
                created += len(some)
        return created == len(keys)

    def insert(self, claim: Claim, *, status: str = "P", count: int = 1) -> None:
        """Insert the row of a claim, unless there is one. A crash may lose it.

        Raise RowLockedError if another transaction has inserted it.
        """
        session = self.session
        session.send(
            "insertion",
            {
                **self.who(claim),
                "key": claim.key,
                "status": status,
                "ttl": ticks(claim.ttl),
                "count": count,
            },
            False,
            nested=session.in_transaction,
        )
