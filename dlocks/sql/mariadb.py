"""The SQL of MariaDB, as far as MySQL's differs."""

from __future__ import annotations

from dlocks.sql.innodb import InnoDB, limit_idle


def _compound(statements: str) -> str:
    """Return statements combined into one compound statement.

    The server reads and answers it once. In total it takes a seventh less time.
    """
    return f"BEGIN NOT ATOMIC {statements}; END"


class MariaDB(InnoDB):
    """The SQL of MariaDB."""

    for_update_in_turn = for_update_patiently = " FOR UPDATE WAIT 1"
    # With sql_safe_updates the server refuses to write a table that is joined to a
    # subquery (error 1175). It does so even if the rows are found by the primary key.
    unsafely = "SET STATEMENT sql_safe_updates = 0 FOR "
    show_isolation = "SELECT @@tx_isolation, @@innodb_rollback_on_timeout"
    read_committed = (
        "@@tx_isolation = 'READ-COMMITTED' AND @@innodb_rollback_on_timeout = 0"
    )
    fails_alone = True
    at_once = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
    queue = _compound(InnoDB.queue)
    hand_over = _compound(InnoDB.hand_over)
    # In a transaction, these come before wait_timeout.
    idle_limit, no_idle_limit = limit_idle(
        "idle_readonly_transaction_timeout", "idle_write_transaction_timeout"
    )

    def compare_and_swap(self, table: str, assignments: str, where: str) -> str:
        # This costs half as much as the locking subquery. A locked row is error 1205.
        # The primary key is forced in any case, since a full scan of a small table
        # would meet locked rows of other keys.
        return (
            f"{self.at_once}UPDATE {table} FORCE INDEX (PRIMARY) SET {assignments}"
            f" WHERE {where}"
        )
