"""What differs between the engines: fast statements, error codes, and a few habits.

A fast statement covers one case in one round trip: a free key is acquired, a key
without waiters is released, a lease is renewed. It follows the rules of
``dlocks.backends.table``. If its case is not there, it changes nothing, and a step
decides (``store``). None of these statements waits for a row that another transaction
has locked.

The placeholders in braces are filled in by ``Engine.fill()`` and by ``Session.sql()``,
which knows the names of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from django.core.exceptions import ImproperlyConfigured
from django.db.backends.base.base import BaseDatabaseWrapper

from dlocks.exceptions import LockBackendError
from dlocks.sql.clock import LATER, NEXT, NOW, SECONDS, TICKS

GRANT = (
    "status = %(status)s, owner = %(owner)s, holder = %(holder)s, owner_ip ="
    " %(owner_ip)s, begin_time = {now}, end_time = {after:ttl}, hold_count = 1, version"
    " = {token}"
)
# Already this claim's: the reply was lost, or the key is reserved for it.
OWN = "owner = %(owner)s AND (status = 'P' OR end_time > {now})"
FREE = (
    "(status <> 'P' AND end_time <= {now} AND shares = 0 AND (waiters = 0 OR NOT"
    f" %(fair)s) OR {OWN})"
)
RELEASE = "status = %(status)s, hold_count = 0, end_time = {after:rest_for}"
WAITERS = (
    "(SELECT COUNT(*) FROM {claims} AS queued WHERE queued.key_resource = %(key)s AND"
    " queued.version IS NULL AND queued.end_time > {now})"
)
# The conditions of a claim's own row.
MINE = "owner = %(owner)s"
HELD = "status = 'P'"
SHARED = "version IS NOT NULL AND hold_count > 0"
LIVE = "end_time > {now}"

# A range instead of ``=``. A const lookup of InnoDB keeps a row locked that does not
# match, until the transaction ends. At READ COMMITTED, a range scan unlocks it.
RANGE = "key_resource >= %(key)s AND key_resource <= %(key)s"
# One row of InnoDB, found by its primary key alone.
PRIMARY = "{locks} FORCE INDEX (PRIMARY)"
# The channel of the first waiter of a key that a transaction releases.
FIRST_CHANNEL = (
    "SELECT channel FROM {claims} AS first WHERE first.key_resource = %(key)s AND"
    " first.version IS NULL AND first.end_time > {now} ORDER BY id LIMIT 1"
)
INSERT = (
    "INSERT INTO {locks} (key_resource, status, owner, holder, owner_ip, begin_time,"
    " end_time, hold_count, version)"
)
VALUES = (
    "%(key)s, %(status)s, %(owner)s, %(holder)s, {owner_ip}, {now}, {after:ttl},"
    " %(count)s{wait}, {ticks}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One database engine.

    ``update`` and ``delete`` change the rows of ``{table}`` that match ``{condition}``.
    They skip rows that are locked. Where it costs less, ``write`` changes one lock row.
    """

    vendor: str
    update: str
    delete: str
    write: str = ""
    insert: str
    # A term that adds nothing to a number. It limits how long an insert waits for a
    # transaction that has inserted the same row, and lets a crash lose the new row.
    insert_wait: str = ""
    # Inserts the rows of many free keys in one statement, as ``insert`` does.
    create_many: str = ""
    greatest: str = "GREATEST"
    # A term around the token by which the reply to an UPDATE contains it as its insert
    # id. Elsewhere, the end of a statement that returns its token.
    insert_id: str = "{token}"
    granted: str = ""
    # The end of a statement that returns anything.
    returning: str = ""
    # The end of a release that a crash may lose. The lease then expires.
    unflushed: str = ""
    owner_ip: str = "%(owner_ip)s"
    # Reads the isolation level without a snapshot, and whether a lock wait timeout
    # rolls back the whole transaction. ``fresh`` excludes a transaction whose snapshot
    # may be older than the lock, and one that ends when it meets a locked row.
    isolation: str = ""
    fresh: str = ""
    # The isolation levels of such transactions.
    levels: frozenset[str] = frozenset({"READ COMMITTED"})
    # The end of an UPDATE that returns the channel of the first waiter. Where it is
    # empty, a second statement returns it.
    first_channel: str = ""
    # The settings by which a session is ended that idles in a transaction.
    idle: tuple[str, ...] = ()
    # The setting by which the reads of the next transaction lock nothing.
    plain_reads: str = ""
    # Codes of errors: a row is locked, the statement lost a race, the server has rolled
    # back the transaction, the session may only read, the user has no right, the
    # connection cannot be used any more.
    locked: frozenset[object] = frozenset()
    lost_race: frozenset[object] = frozenset()
    rolled_back: frozenset[object] = frozenset()
    read_only: frozenset[object] = frozenset()
    denied: frozenset[object] = frozenset()
    desynchronised: frozenset[object] = frozenset()
    read_only_settings: str = ""
    # What to do if the user has no right.
    denied_advice: str = (
        "Grant the rights that the documentation lists (Deploy with locks)."
    )
    # Whether a statement can limit how long it waits for a row.
    limits_waits: bool = False
    # Waits for a row in the engine's own queue, for at most ``wait`` seconds. And the
    # code of the error after that.
    in_turn: str = ""
    waited: object = None
    # Whether a rollback to a savepoint unlocks the rows that were locked since.
    unlocks: bool = False
    # Whether a transaction that writes has the whole database to itself.
    one_writer: bool = False
    # Whether several statements are combined into one compound statement.
    compound: bool = False
    # Whether the end of a transaction that kept a key notifies the first waiter.
    commit_notifies: bool = True

    def fill(self, text: str) -> str:
        """Fill in the placeholders of the engine's clock and habits."""
        vendor = self.vendor
        for name, value in {
            "{token}": f"{self.greatest}(version + 1, {{ticks}})",
            "{owner_ip}": self.owner_ip,
            "{now}": NOW[vendor],
            "{ticks}": TICKS[vendor],
            "{left}": SECONDS[vendor].format("end_time"),
            "{next}": NEXT[vendor].format("end_time"),
            "{greatest}": self.greatest,
        }.items():
            text = text.replace(name, value)
        for name in ("ttl", "rest_for", "heard"):
            later = LATER[vendor].format(f"%({name})s")
            text = text.replace(f"{{after:{name}}}", later)
        return " ".join(text.split())

    def one(self, what: str, condition: str, end: str = "") -> str:
        """Return the statement that changes one lock row, unless it is locked."""
        if not self.write:
            condition = f"key_resource = %(key)s AND {condition}"
            return self.many("{locks}", what, condition, end)
        text = self.write.replace("{what}", what).replace("{condition}", condition)
        return text + end

    def many(
        self, table: str, what: str, condition: str, end: str | None = None
    ) -> str:
        """Return the statement that changes the rows that are not locked.

        It deletes them if ``what`` is empty.
        """
        primary = "key_resource" if table == "{locks}" else "id"
        template = self.update if what else self.delete
        for name, value in {
            "{table}": table,
            "{primary}": primary,
            "{what}": what,
            "{condition}": condition,
            "{index}": " FORCE INDEX (PRIMARY)" if primary != "id" else "",
        }.items():
            template = template.replace(name, value)
        return template + (self.returning if end is None else end)

    def acquire(self, *, inside: bool, versioned: bool, queued: bool) -> str:
        """Return the statement that grants a free key.

        ``inside`` is for a caller's transaction. If ``versioned``, the row must have a
        version. A claim that is ``queued`` gets only a key that is already its own,
        because the statement would leave its place in the queue.
        """
        free = f"({OWN})" if queued else FREE
        if versioned:
            free += " AND version = %(version)s"
        if inside and self.fresh:
            free += f" AND {self.fresh}"
        grant = GRANT.replace("{token}", self.insert_id)
        return self.one(grant, free, self.granted)

    def release(self, *, flushed: bool) -> str:
        """Return the statement by which a holder releases a key without waiters."""
        condition = f"{MINE} AND {HELD} AND waiters = 0"
        return self.one(
            RELEASE, condition, self.returning if flushed else self.unflushed
        )

    def release_on_commit(self) -> str:
        """Return the statement that writes what a commit makes of the row.

        Claims that joined while the row was locked could not be counted in it. It
        returns the channel of the first waiter.
        """
        what = f"{RELEASE}, waiters = {WAITERS}"
        if self.first_channel:
            return self.one(what, MINE, self.first_channel)
        first = (
            f"SELECT ({FIRST_CHANNEL}) FROM {{locks}} WHERE key_resource = %(key)s AND"
            " owner = %(owner)s AND hold_count = 0"
        )
        return self.packet(self.one(what, MINE), first)

    def insertion(self, *, nested: bool) -> str:
        """Return the statement that inserts a lock row, unless there is one.

        ``nested`` says that it is part of a caller's transaction, in which it must not
        change a setting.
        """
        return self.insert.replace("{wait}", "" if nested else self.insert_wait)

    def delete_own(self) -> str:
        """Return the statement by which a holder deletes the row of a free key.

        Only once the clock has passed the token. Otherwise the next row could get the
        same token.
        """
        condition = (
            "key_resource = %(key)s AND owner = %(owner)s AND version < {ticks} AND"
            " waiters = 0 AND shares = 0"
        )
        return self.many("{locks}", "", condition, self.unflushed)

    def turns(self, keys: str, owners: str) -> str:
        """Return the statement that reads the live exclusive holders of keys.

        ``keys`` and ``owners`` are conditions. For each key that the owners do not
        hold, it also returns how many waiters are ahead of the first of them, and
        whether there are some that the row does not count.
        """
        queued = (
            "SELECT COUNT(*) FROM {claims} AS queued WHERE queued.key_resource ="
            " {locks}.key_resource AND queued.version IS NULL AND queued.end_time >"
            " {now}"
        )
        first = (
            f"SELECT MIN(mine.id) FROM {{claims}} AS mine WHERE mine.{owners} AND"
            " mine.key_resource = {locks}.key_resource"
        )
        return (
            "SELECT key_resource, owner, version, {left},"
            f" CASE WHEN {owners} THEN 0"
            f" ELSE ({queued} AND queued.id < ({first})) END,"
            f" CASE WHEN NOT {owners} AND ({queued}) > waiters THEN 1 ELSE 0 END"
            f" FROM {{locks}} WHERE {keys} AND status = 'P' AND shares = 0 AND end_time"
            " > {now}"
        )

    def packet(self, *statements: str) -> str:
        """Return several statements as one request. The last one has the result."""
        text = "; ".join(statements)
        return f"BEGIN NOT ATOMIC {text}; END" if self.compound else text

    def code_of(self, error: BaseException) -> object:
        """Return the code of an error that the server sent, or None without one."""
        if self.vendor == "postgresql":
            return sqlstate_of(error)
        if self.vendor == "mysql":
            return error.args[0] if error.args else None
        # The message covers all kinds of locks, for which SQLite has several codes.
        said = str(error)
        if "is locked" in said:
            name = getattr(error.__cause__, "sqlite_errorname", "")
            return "old snapshot" if name == "SQLITE_BUSY_SNAPSHOT" else "locked"
        return "readonly" if "readonly database" in said else None


def sqlstate_of(error: BaseException) -> str | None:
    """Return PostgreSQL's SQLSTATE of an error, or None without one.

    There is none if the server did not send the error.
    """
    cause = error.__cause__
    # psycopg 3 and psycopg 2 name the attribute differently.
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)


def engine_of(connection: BaseDatabaseWrapper) -> Engine:
    """Return the engine of a Django connection.

    On MySQL and MariaDB, the first call queries the server for which one it is.
    """
    vendor = connection.vendor
    if vendor == "mysql" and getattr(connection, "mysql_is_mariadb", False):
        vendor = "mariadb"
    if vendor not in ENGINES:
        raise ImproperlyConfigured(
            f"dlocks has no database backend for {vendor!r}. Use PostgreSQL, MariaDB,"
            " MySQL or SQLite."
        )
    return ENGINES[vendor]


def refuse_lost(connection: BaseDatabaseWrapper) -> None:
    """Raise LockBackendError if only a lost connection turned autocommit off."""
    # On other engines, autocommit is a matter of the client alone.
    if (
        connection.vendor == "mysql"
        and connection.connection is not None
        and not connection.is_usable()
    ):
        raise LockBackendError(
            f"The connection to database {connection.alias!r} was lost while a"
            " transaction ended. Close it with 'connection.close()', as Django does at"
            " the end of a request."
        )


def _picked(verb: str, of: str) -> str:
    """Return a statement of InnoDB on rows that a subquery finds and locks.

    LIMIT keeps the subquery from being merged. A merged statement would write the table
    that it reads.
    """
    return (
        f"{verb} (SELECT {{primary}} AS picked FROM {{table}}{{index}} WHERE"
        " {condition} LIMIT 1000000 FOR UPDATE SKIP LOCKED) AS picks STRAIGHT_JOIN"
        f" {{table}} FORCE INDEX (PRIMARY) ON {{primary}} = picked{of}"
    )


# At SERIALIZABLE, a SELECT in a transaction waits for rows that others have locked.
# Without a scope, this is for the next transaction alone. It is not READ COMMITTED,
# where a server whose binary log has statements refuses to write.
PLAIN_READS = "@@{0} = IF(@@{0} = 'SERIALIZABLE', 'REPEATABLE-READ', @@{0})"
# With sql_safe_updates, MariaDB refuses to write a table that is joined to a subquery
# (error 1175), even if the rows are found by the primary key.
SAFELY = "SET STATEMENT sql_safe_updates = 0 FOR "
INNODB = {
    "vendor": "mysql",
    "insert_id": "LAST_INSERT_ID({token})",
    "locked": frozenset({1205, 3572}),  # lock wait timeout, not locked at once
    # A deadlock, and an error during commit, from a node of a Galera cluster if another
    # node has committed first. 1020 is a row that changed since the snapshot. 1467
    # means that no number could be generated.
    "lost_race": frozenset({1213, 1180, 1020, 1467}),
    "rolled_back": frozenset({1213, 1180, 1020}),
    "read_only": frozenset({1290, 1836, 1792}),  # of the server, InnoDB, the session
    "denied": frozenset({1044, 1142, 1143}),  # to a database, a table, a column
    # An interrupt came before a reply was read.
    "desynchronised": frozenset({2014}),
    "read_only_settings": (
        "read_only or transaction_read_only is on, as it is on a replica"
    ),
    "commit_notifies": False,
}

# What ``insert_wait`` is on PostgreSQL.
INSERT_WAIT = (
    " + 0 * length(set_config('lock_timeout', '50ms', true) ||"
    " set_config('synchronous_commit', 'off', true))"
)
# The rows on PostgreSQL that no other transaction has locked. An array keeps the plan
# on the primary key, for one row and for many.
UNLOCKED = (
    "WHERE {primary} = ANY (ARRAY(SELECT {primary} FROM {table} WHERE {condition} FOR"
    " UPDATE SKIP LOCKED))"
)

ENGINES: dict[str, Engine] = {
    "postgresql": Engine(
        vendor="postgresql",
        update=f"UPDATE {{table}} SET {{what}} {UNLOCKED}",
        delete=f"DELETE FROM {{table}} {UNLOCKED}",
        # An insert that meets a row of an open transaction waits for it, even with ON
        # CONFLICT.
        insert=f"{INSERT} VALUES ({VALUES}) ON CONFLICT DO NOTHING RETURNING 1",
        insert_wait=INSERT_WAIT,
        create_many=(
            f"{INSERT} SELECT one, 'S', '', '', NULL, NULL, {{now}}, 0{INSERT_WAIT},"
            " {ticks} FROM unnest(%(keys)s::text[]) AS one ON CONFLICT DO NOTHING"
            " RETURNING 1"
        ),
        granted=" RETURNING version",
        returning=" RETURNING 1",
        unflushed=" RETURNING set_config('synchronous_commit', 'off', true)",
        owner_ip="%(owner_ip)s::inet",
        isolation="SHOW transaction_isolation",
        fresh=(
            "current_setting('transaction_isolation') IN ('read committed', 'read"
            " uncommitted')"
        ),
        # It treats READ UNCOMMITTED as READ COMMITTED.
        levels=frozenset({"READ COMMITTED", "READ UNCOMMITTED"}),
        first_channel=f" RETURNING ({FIRST_CHANNEL})",
        locked=frozenset({"55P03"}),  # lock_not_available
        # serialization_failure, deadlock_detected
        lost_race=frozenset({"40001", "40P01"}),
        read_only=frozenset({"25006"}),  # read_only_sql_transaction
        denied=frozenset({"42501"}),  # insufficient_privilege
        read_only_settings=(
            "the transaction is READ ONLY, default_transaction_read_only is on, or the"
            " server is a standby (connect with target_session_attrs=read-write)"
        ),
        limits_waits=True,
        unlocks=True,
    ),
    "mariadb": Engine(
        **INNODB,  # type: ignore[arg-type]
        # This costs half as much as a locking subquery. A locked row is error 1205.
        write=(
            "SET STATEMENT innodb_lock_wait_timeout = 0 FOR UPDATE"
            f" {PRIMARY} SET {{what}} WHERE {RANGE} AND {{condition}}"
        ),
        update=_picked(f"{SAFELY}UPDATE", " SET {what}"),
        delete=_picked(f"{SAFELY}DELETE {{table}} FROM", ""),
        insert=(
            "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
            f"{INSERT} VALUES ({VALUES}) ON DUPLICATE KEY UPDATE"
            " hold_count = hold_count"
        ),
        isolation="SELECT @@tx_isolation, @@innodb_rollback_on_timeout",
        fresh=(
            "@@tx_isolation = 'READ-COMMITTED' AND @@innodb_rollback_on_timeout = 0"
        ),
        # In a transaction, these come before wait_timeout.
        idle=("idle_readonly_transaction_timeout", "idle_write_transaction_timeout"),
        plain_reads=PLAIN_READS.format("tx_isolation"),
        # Its own limit, WAIT, is in whole seconds.
        in_turn=(
            "SET STATEMENT max_statement_time = %(wait)s FOR SELECT 1 FROM {locks}"
            " WHERE key_resource = %(key)s FOR UPDATE"
        ),
        waited=1969,
        compound=True,
    ),
    "mysql": Engine(
        **INNODB,  # type: ignore[arg-type]
        # The optimizer evaluates the subquery before the UPDATE locks a row.
        write=(
            f"UPDATE {PRIMARY} SET {{what}} WHERE key_resource = (SELECT picked FROM"
            f" (SELECT key_resource AS picked FROM {PRIMARY} WHERE {RANGE} AND"
            " {condition} LIMIT 1 FOR UPDATE SKIP LOCKED) AS picks)"
        ),
        update=_picked("UPDATE", " SET {what}"),
        delete=_picked("DELETE {table} FROM", ""),
        # An insert would wait for a transaction that has locked an existing row.
        insert=(
            f"{INSERT} SELECT {VALUES} FROM DUAL WHERE NOT EXISTS (SELECT 1 FROM"
            " {locks} WHERE key_resource = %(key)s FOR SHARE NOWAIT) ON DUPLICATE KEY"
            " UPDATE hold_count = {locks}.hold_count"
        ),
        isolation="SELECT @@transaction_isolation",
        fresh="@@transaction_isolation = 'READ-COMMITTED'",
        idle=("wait_timeout",),
        plain_reads=PLAIN_READS.format("transaction_isolation"),
    ),
    "sqlite": Engine(
        vendor="sqlite",
        update="UPDATE {table} SET {what} WHERE {condition}",
        delete="DELETE FROM {table} WHERE {condition}",
        insert=f"{INSERT} VALUES ({VALUES}) ON CONFLICT DO NOTHING",
        greatest="MAX",
        granted=" RETURNING version",
        first_channel=f" RETURNING ({FIRST_CHANNEL})",
        locked=frozenset({"locked", "old snapshot"}),
        # A step is tried again. The transaction of a caller stays as it is.
        read_only=frozenset({"old snapshot"}),
        read_only_settings=(
            "its transaction began as a reader, and another one has written since (set"
            " 'transaction_mode': 'IMMEDIATE' in OPTIONS)"
        ),
        denied=frozenset({"readonly"}),
        denied_advice="The process must be able to write the file and its directory.",
        one_writer=True,
    ),
}
