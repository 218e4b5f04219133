"""How the holds of several keys are left together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
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
    trouble: Exception | None = None
    try:
        effects = _leave_simply(entries, failed=failed, by=by)
        done, trouble = _release_together(effects)
        for entry, effect in effects.items():
            hold: Holding = entry.hold
            try:
                if effect is Effect.VERIFY:
                    hold.leave(entry, failed=failed, at_block_end=at_block_end, by=by)
                elif effect is not Effect.RELEASE:
                    hold.perform(effect)
                elif not hold.is_released:
                    hold.send_release(done=done, report=False)
            except (LockError, explain.RefusedReleaseError) as error:
                # A block of another caller may have begun after the first look.
                trouble = trouble or error
        for entry in entries:
            # Only now, since on_lost may acquire all of the keys again.
            _report_if_lost(entry, effects[entry])
    except LockError:
        raise
    except BaseException:
        # An interrupted release must leave no key acquired.
        for entry in entries:
            with suppress(LockError):
                within = transactions_of(entry.hold)
                entry.hold.complete_leave(entry, within, by=by)
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


def _report_if_lost(entry: Entry, effect: Effect) -> None:
    if effect is Effect.RELEASE and entry.hold.life.state.reason is Reason.LOST:
        entry.hold.report_loss()


def _release_together(effects: dict[Entry, Effect]) -> tuple[bool, Exception | None]:
    """Release keys in one request. Return whether all were held, and the error."""
    entries = [one for one in effects if effects[one] is Effect.RELEASE]
    for entry in entries:
        entry.hold.unwatch()
    # An inner block of one of them may have failed.
    failed = {entry.hold.life.state.failed for entry in entries}
    if len(entries) > 1 and len(failed) == 1:
        first: Holding = entries[0].hold
        claims = [entry.hold.claim for entry in entries]
        try:
            release_all = first.backend.release_all
            return first.ask(release_all, claims, failed=failed.pop()), None
        except LockBackendError as error:
            # In a transaction, which is broken now, each hold handles this itself.
            if first.scope == "lease":
                for entry in entries:
                    entry.hold.mark_released()
                return False, error
    return False, None
