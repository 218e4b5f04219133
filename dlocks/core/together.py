"""How the holds of several keys are left together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from dlocks.core import explain
from dlocks.core.entry import Entry
from dlocks.core.holding import Holding
from dlocks.core.life import Effect, Reason
from dlocks.core.settlement import transactions_of
from dlocks.exceptions import LockBackendError, LockError
from dlocks.runtime.requests import refuse_nested


def leave_together(
    entries: Sequence[Entry], *, failed: bool, at_block_end: bool, by: Any = None
) -> None:
    """Leave the entries of several keys, with one request if all keys are released.

    Each key is released, even if the release of another one fails. ``by`` is the caller
    of ``release()``, which leaves no entry that another one's block uses.
    """
    refuse_nested()
    for entry in entries:
        entry.hold.has_ended_with_transaction()
        if by not in (None, entry.caller) and entry in entry.hold.life.state.blocks:
            raise explain.release_error(entry.hold)
    leave = partial(_leave_alone, failed=failed, at_block_end=at_block_end, by=by)
    trouble: Exception | None = None
    try:
        effects = _leave_simply(entries, failed=failed, by=by)
        together = _all_with(effects, Effect.RELEASE)
        done, trouble = _release_together(together, failed=failed)
        for entry, effect in effects.items():
            error = _finish(entry, effect, done, leave)
            trouble = trouble or error
        for entry in together:
            # Only now, since on_lost may acquire all of the keys again.
            _report_if_lost(entry.hold)
    except LockError:
        raise
    except BaseException:
        # An interrupted release must leave no key acquired.
        for entry in entries:
            with suppress(LockError):
                entry.hold.complete_leave(entry, transactions_of(entry.hold))
        raise
    finally:
        for entry in entries:
            entry.hold.forget_entry(entry)
    if trouble is not None:
        raise trouble


def _leave_simply(
    entries: Sequence[Entry], *, failed: bool, by: Any
) -> dict[Entry, Effect]:
    """Leave those entries whose leave does no more than to release a key.

    The effect of all others is VERIFY, and they are still open.
    """
    effects = {}
    is_alike = len({entry.hold.scope for entry in entries}) == 1
    for entry in entries:
        hold: Holding = entry.hold
        effects[entry] = (
            hold.life.leave(entry, failed=failed, by=by)
            if is_alike and _is_released_simply(hold, entry)
            else Effect.VERIFY
        )
    return effects


def _is_released_simply(hold: Holding, entry: Entry) -> bool:
    """Return whether a leave of this entry does no more than release the key."""
    return (
        hold.held
        and hold.life.state.entries == (entry,)
        and not hold.min_hold_left
        and not transactions_of(hold)
    )


def _report_if_lost(hold: Holding) -> None:
    if hold.life.state.reason is Reason.LOST:
        hold.report_loss()


def _all_with(effects: dict[Entry, Effect], effect: Effect) -> list[Entry]:
    return [entry for entry in effects if effects[entry] is effect]


def _release_together(
    entries: Sequence[Entry], *, failed: bool
) -> tuple[bool, Exception | None]:
    """Release keys in one request. Return whether all were held, and the error."""
    for entry in entries:
        entry.hold.unwatch()
    if len(entries) > 1:
        first: Holding = entries[0].hold
        claims = [entry.hold.claim for entry in entries]
        try:
            return first.ask(first.backend.release_all, claims, failed=failed), None
        except LockBackendError as error:
            # In a transaction, which is broken now, each hold handles this itself.
            if first.scope == "lease":
                for entry in entries:
                    entry.hold.is_released = True
                return False, error
    return False, None


def _leave_alone(entry: Entry, **options: Any) -> None:
    entry.hold.leave(entry, **options)


def _finish(
    entry: Entry, effect: Effect, done: bool, leave: Callable[[Entry], None]
) -> Exception | None:
    """Complete the leave of one of several keys, and return the error."""
    hold: Holding = entry.hold
    try:
        if effect is Effect.VERIFY:
            leave(entry)
        elif effect is not Effect.RELEASE:
            hold.perform(effect)
        elif not hold.is_released:
            hold.send_release(done=done, report=False)
    except (LockError, explain.RefusedReleaseError) as error:
        # A block of another caller may have begun after the first look.
        return error
    return None
