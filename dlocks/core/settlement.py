"""The end of a lease that was left in open transactions.

It earns promise 3 of docs/safety.md: the key is free after their commits, not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dlocks.core.life import Effect, Phase, Reason
from dlocks.runtime.keeper import keeper
from dlocks.transactions import TransactionMarker, open_connections

# Seconds for which the end of a transaction waits while another thread releases a lease
# that was left in it.
SETTLE_TIMEOUT = 5.0


def transactions_of(hold: Any) -> Sequence[TransactionMarker]:
    """Return those open transactions of this thread that keep a lease.

    Their changes are not visible before they end. With ``release_at="exit"``, only
    those beside which the release cannot be written: the database has a single writer.
    """
    if hold.scope == "transaction":
        return ()
    opened = open_connections()
    if hold.lock.release_at == "exit" and all(
        entry.lock.release_at == "exit" for entry in hold.life.state.entries
    ):
        # A rollback would undo a release written beside the only writer.
        has_one_writer = hold.backend.refusal(hold.claim) is not None
        database = hold.backend.database
        opened = [one for one in opened if has_one_writer and one.alias == database]
    return [TransactionMarker.whole(one) for one in opened] if opened else ()


def pins_here(hold: Any) -> list[TransactionMarker]:
    """Return the transactions of this thread that have locked the row of a hold."""
    return _here(hold.life.state.pins)


def marks_here(hold: Any) -> list[TransactionMarker]:
    """Return the transactions of this thread in which a lease was left."""
    return _here(hold.life.state.marks)


def _here(markers: Sequence[TransactionMarker]) -> list[TransactionMarker]:
    return [one for one in markers if one.stands and not one.is_elsewhere]


def is_undone(hold: Any) -> bool:
    """Return whether work under a hold is about to be rolled back.

    Only the transactions of this thread count.
    """
    if hold.transaction is not None:
        return bool(hold.transaction.connection.needs_rollback)
    return any(pin.is_undone for pin in pins_here(hold))


def await_transactions(hold: Any) -> None:
    """Let each of the transactions in which a lease was left settle it at its end."""
    state = hold.life.state
    if state.phase is not Phase.LEFT:
        return
    for marker in (*state.pins, *state.marks):
        if hold.settle not in marker.at_commit:
            marker.at_commit.append(hold.settle)
    # A rollback drops the on_commit() callbacks, perhaps with the last reference to the
    # hold.
    keeper.add_left(hold)


def settle(hold: Any, timeout: float) -> None:
    """Release a lease that was left, once all of the transactions have ended.

    If another thread does so, wait for it, at most ``timeout`` seconds.
    """
    try:
        if hold.life.settle() & Effect.RELEASE:
            hold.perform_quietly(Effect.RELEASE)
        elif hold.life.state.reason is Reason.RELEASED:
            # The keeper may have noticed the end of the transaction first.
            hold.await_release(timeout)
    except BaseException:
        # Perhaps the release was not sent yet, and nothing else would send it.
        hold.complete_leave(None)
        raise
