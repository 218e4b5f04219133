"""Seeded bugs, which are applied to dlocks in the worker processes by name.

They are mistakes that were found in other locks. A harness that finds nothing proves
nothing until it has found known bugs. Each bug names the faults under which it shows,
and the checks that may report it.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.nemesis.task import Task, keys_of


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A bug, and the shortest plan that shows it."""

    apply: Callable[[Task], None]
    shows: tuple[str, ...]
    faults: Mapping[str, float] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)


BUGS: dict[str, Bug] = {}
# The checks that fail without any lock.
WITHOUT_A_LOCK = {"tokens", "exclusion", "updates"}
STOPS = {"stop": 1.0}
ALONE = {"keys": ("alone",)}


def bug(
    *shows: str, faults: Mapping[str, float] | None = None, **plan: Any
) -> Callable[[Any], Any]:
    def register(apply: Callable[[Task], None]) -> Callable[[Task], None]:
        BUGS[apply.__name__] = Bug(
            apply=apply, shows=shows, faults=faults or {}, plan={**ALONE, **plan}
        )
        return apply

    return register


# Owners.


@bug("exclusion", faults=STOPS, transactions=False)
def release_without_an_owner(task: Task) -> None:
    """A late holder releases a lock that belongs to another holder by then."""
    _in_sql(
        lambda sql: (
            sql.replace(" AND owner = %(owner)s", "")
            if "hold_count = 0" in sql or "taken" in sql
            else sql
        )
    )


@bug("exclusion", faults=STOPS, transactions=False, oddity="long", seek="holding")
def renewal_without_an_owner(task: Task) -> None:
    """A watchdog that trusts the reply, and extends any lease it finds."""
    from tests.internals import KeptHold

    KeptHold.check_expiry = lambda hold: None  # type: ignore[method-assign]
    _in_sql(lambda sql: re.sub(r" AND owner IN \((%\(owner_\d+\)s(, )?)+\)", "", sql))


@bug("exclusion", "tokens", oddity="forked", transactions=False)
def no_check_for_a_fork(task: Task) -> None:
    from tests.internals import KeptHold

    KeptHold.is_forked = False  # type: ignore[assignment]


# Time.


@bug("exclusion", "tokens", "stuck", "releases", transactions=False)
def the_application_s_clock(task: Task) -> None:
    """Hosts whose clocks differ by some seconds."""
    if task.slot % 2:
        _in_text(
            lambda sql: sql.replace(
                "clock_timestamp()", "(clock_timestamp() + interval '2.5 seconds')"
            )
        )


@bug(
    "exclusion", faults={"late": 1.0}, through="proxy", transactions=False,
    oddity="unrenewed", pause=1.0,
    keys=tuple(f"alone-{number}" for number in range(4)), workers=12, seconds=50.0,
)  # fmt: skip
def deadline_from_the_response(task: Task) -> None:
    from tests.internals import Acquisition, clock

    original = Acquisition._hold

    def hold(attempt: Any, claim: Any, grant: Any, sent: float) -> Any:
        return original(
            attempt, claim, dataclasses.replace(grant, lease=None), clock.now()
        )

    Acquisition._hold = hold  # type: ignore[method-assign]


@bug("exclusion", transactions=False, faults=STOPS)
def taken_over_before_its_end(task: Task) -> None:
    """The grace is subtracted instead of added."""
    _grace(+0.9 * task.ttl)


@bug(
    "exclusion",
    transactions=False,
    faults={"clock": 1.0},
    clock=True,
    oddity="unrenewed",
    pause=0.6,
)
def no_grace_for_a_clock_that_steps(task: Task) -> None:
    _grace(0.0)


@bug("exclusion", faults=STOPS, transactions=False)
def held_past_its_own_deadline(task: Task) -> None:
    from tests.internals import KeptHold

    KeptHold.held = property(lambda hold: not hold.lease.ended)  # type: ignore[assignment, method-assign]
    KeptHold.remaining = property(lambda hold: hold.claim.ttl)  # type: ignore[assignment, method-assign]


@bug("max_hold", oddity="hung", transactions=False)
def max_hold_ignored(task: Task) -> None:
    from tests.internals import Lease

    Lease.last_at = property(lambda hold: math.inf, lambda hold, value: None)  # type: ignore[assignment]


# Renewal.


@bug(
    "releases",
    "stuck",
    transactions=False,
    oddities=False,
    workers=2,
    keys=("alone", "either"),
)
def renewed_after_the_release(task: Task) -> None:
    """The renewal is stopped only after the release.

    It then extends the row whatever its state.
    """
    from tests.internals import keeper_module as keeper

    keeper.Keeper.drop = lambda self, hold: _remembered.append(hold)  # type: ignore[method-assign]
    from tests.internals import KeptHold

    KeptHold.renewable = property(lambda hold: True)  # type: ignore[assignment, method-assign]
    _in_sql(
        lambda sql: (
            sql.replace(" AND status = 'P' AND end_time > {now}", "")
            if "owner_0" in sql
            else sql
        )
    )


_remembered: list[Any] = []


@bug("stuck", transactions=False, oddity="abandoned")
def renewed_for_a_dead_thread(task: Task) -> None:
    from tests.internals import KeptHold

    KeptHold.renewable = property(lambda hold: not hold.lease.is_over)  # type: ignore[assignment, method-assign]


# Replies.


@bug("exclusion", "phantoms", "tokens", faults={"restart": 1.0}, transactions=False)
def an_error_read_as_yes(task: Task) -> None:
    from dlocks import LockBackendError
    from tests.internals import DatabaseBackend, Grant

    original = DatabaseBackend.acquire

    def acquire(backend: Any, claim: Any) -> Any:
        try:
            return original(backend, claim)
        except LockBackendError:
            return Grant(time.time_ns() // 1000)

    DatabaseBackend.acquire = acquire  # type: ignore[method-assign]


@bug("releases", "stuck", transactions=False)
def a_release_acknowledged_and_not_sent(task: Task) -> None:
    from tests.internals import DatabaseBackend

    original = DatabaseBackend.release
    DatabaseBackend.release = (  # type: ignore[method-assign]
        lambda backend, claim, **how: (
            time.time_ns() // 1000 % 8 == 0 or original(backend, claim, **how)
        )
    )


@bug(
    "phantoms", "exclusion", "tokens", faults={"crash": 1.0}, transactions=False,
    oddity="unrenewed", workers=3, pause=1.0, seconds=75.0,
)  # fmt: skip
def a_grant_told_before_it_is_durable(task: Task) -> None:
    _in_text(
        lambda sql: (
            sql.replace(
                "WHERE",
                "WHERE set_config('synchronous_commit', 'off', true) <> '' AND",
                1,
            )
            if "begin_time = " in sql and "hold_count = 1" in sql
            else sql
        )
    )


# The queue.


@bug(
    "stuck",
    faults={"kill": 1.0},
    transactions=False,
    oddities=False,
    seek="asking",
    pause=3.0,
)
def handed_over_to_the_dead_without_end(task: Task) -> None:
    from tests.internals import KeyQueue

    original = KeyQueue._columns

    def columns(*args: Any, **kwargs: Any) -> Any:
        names, values, parameters = original(*args, **kwargs)
        return names, values, {**parameters, "handover_ttl": 3600 * 1_000_000}

    KeyQueue._columns = columns  # type: ignore[method-assign]


@bug("exclusion", "tokens", faults=STOPS, transactions=False, seek="asking", pause=0.15)
def a_stale_notice_believed(task: Task) -> None:
    from tests.internals import Grant, Waiter, clock

    apply = Waiter.apply

    def believed(waiter: Any, ticket: Any, sent: float) -> bool:
        if ticket.grant is not None:
            ticket = dataclasses.replace(
                ticket, grant=Grant(ticket.grant.token, waiter.claim.ttl)
            )
        return apply(waiter, ticket, clock.now())

    Waiter.apply = believed  # type: ignore[method-assign]


@bug("releases", "stuck", transactions=False)
def nothing_handed_over(task: Task) -> None:
    from tests.internals import KeyQueue, table

    table.admit = lambda state, at: state
    KeyQueue._hand_over = lambda self, claim, **how: False  # type: ignore[method-assign]
    KeyQueue._advance = lambda self, key, **how: False  # type: ignore[method-assign]


# Shared holds and permits.


@bug("exclusion", keys=("pages",))
def a_writer_who_does_not_see_readers(task: Task) -> None:
    _in_sql(lambda sql: sql.replace(" AND shares = 0", ""))
    from tests.internals import table

    has_room, admit = table._has_room, table.admit
    table._has_room = lambda state, claim, at: has_room(
        state if claim.shared else dataclasses.replace(state, shares=()), claim, at
    )
    table.admit = lambda state, at: dataclasses.replace(
        admit(dataclasses.replace(state, shares=()), at), shares=state.shares
    )


@bug("exclusion", keys=("seats",))
def one_permit_too_many(task: Task) -> None:
    from tests.internals import table

    has_room, admit = table._has_room, table.admit

    def with_one_more(claim: Any) -> Any:
        return dataclasses.replace(claim, permits=claim.permits + 1)

    table._has_room = lambda state, claim, at: has_room(state, with_one_more(claim), at)
    table.admit = lambda state, at: admit(
        dataclasses.replace(
            state,
            queue=tuple(
                dataclasses.replace(one, claim=with_one_more(one.claim))
                for one in state.queue
            ),
        ),
        at,
    )


# Transactions and rows.


@bug("updates", leases=False)
def released_before_the_commit(task: Task) -> None:
    """The lock uses a connection of its own and is released when its block ends."""
    from dlocks import Lock

    original = Lock.acquire
    Lock.acquire = lambda lock: original(
        dataclasses.replace(lock, scope="lease", release_at="exit")
    )  # type: ignore[method-assign]


@bug("tokens", transactions=False)
def a_token_that_does_not_grow(task: Task) -> None:
    from tests.internals import Dialect

    Dialect.next_version = lambda self: "version"  # type: ignore[method-assign]


@bug("tokens", transactions=False, aliases=("insert",), workers=2, oddities=False)
def a_counter_in_a_row_that_is_deleted(task: Task) -> None:
    from tests.internals import Dialect

    Dialect.next_version = lambda self: "version + 1"  # type: ignore[method-assign]
    _in_sql(
        lambda sql: sql.replace("1{at_once_term}, {ticks}", "1, 1").replace(
            "version < {ticks}", "TRUE"
        )
    )


@bug("exclusion", transactions=False, aliases=("insert",), oddities=False)
def a_duplicate_taken_for_an_insert(task: Task) -> None:
    """INSERT ... ON CONFLICT DO NOTHING without a check of the result."""
    from tests.internals import InsertBackend

    original = InsertBackend._insert
    InsertBackend._look = lambda backend, claim: None  # type: ignore[method-assign]
    InsertBackend._insert = lambda backend, claim: (
        original(backend, claim) or time.time_ns() // 1000
    )  # type: ignore[method-assign]
    InsertBackend._draw_again = lambda backend, claim: time.time_ns() // 1000  # type: ignore[method-assign]


@bug(
    "exclusion",
    "tokens",
    transactions=False,
    aliases=("optimistic",),
    workers=2,
    think=0.002,
    oddities=False,
)
def a_swap_that_does_not_compare(task: Task) -> None:
    """Read that the key is free, then acquire it without comparing."""
    from tests.internals import OptimisticBackend

    def take(backend: Any, claim: Any) -> Any:
        row = backend._look(claim)
        return (
            (backend._grant(claim), row)
            if row is not None and row.free
            else (None, row)
        )

    OptimisticBackend._take = take  # type: ignore[method-assign]
    OptimisticBackend._free = _free_or_any  # type: ignore[method-assign]


def _free_or_any(backend: Any, claim: Any, free: str) -> str:
    # The read checks the state. The statement that grants does not check it again.
    import sys

    from tests.internals import DatabaseBackend

    looking = sys._getframe(1).f_code.co_name == "_look"
    return DatabaseBackend._free(backend, claim, free) if looking else "TRUE"


# Deadlocks.

NESTED = {"keys": keys_of("alone", 4), "nested": 0.7, "oddities": False}


@bug("deadlocks", **NESTED)
def deadlocks_that_last_until_the_timeout(task: Task) -> None:
    from tests.internals import DatabaseBackend

    original = DatabaseBackend.__init__

    def create(backend: Any, *args: Any, **options: Any) -> None:
        original(backend, *args, **options)
        backend.deadlock_after = None

    DatabaseBackend.__init__ = create  # type: ignore[method-assign]


@bug("refused", **NESTED)
def a_wait_behind_a_deadlock_taken_for_one(task: Task) -> None:
    """Refuse every claim from which a cycle can be reached."""
    from tests.internals import WaitGraph

    WaitGraph.victims = lambda graph: {  # type: ignore[method-assign]
        owner: [graph._claims[owner]] for owner in graph._waits_for
    }


# Helpers that apply the bugs.


def _in_sql(change: Callable[[str], str]) -> None:
    """Change statements before the engine's own SQL is filled in."""
    from tests.internals import Statements

    original = Statements._text
    Statements._text = lambda self, sql: original(self, change(sql))  # type: ignore[method-assign]


def _in_text(change: Callable[[str], str]) -> None:
    from tests.internals import Statements

    original = Statements._text
    Statements._text = lambda self, sql: change(original(self, sql))  # type: ignore[method-assign]


def _grace(seconds: float) -> None:
    from tests.internals import DatabaseBackend, steps

    moment = steps.Moment
    steps.Moment = lambda now, grace, *others: moment(now, -seconds, *others)
    microseconds = round(seconds * 1_000_000)
    times, parameters = DatabaseBackend._times, DatabaseBackend._parameters
    DatabaseBackend._times = lambda self: {**times(self), "grace": microseconds}  # type: ignore[method-assign]
    DatabaseBackend._parameters = lambda self, claim: {
        **parameters(self, claim),
        "grace": microseconds,
    }  # type: ignore[method-assign]
