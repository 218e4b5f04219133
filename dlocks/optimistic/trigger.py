"""Migration operations of a trigger that replaces versions when raw SQL writes."""

from __future__ import annotations

import hashlib
from typing import Any

from django.core.exceptions import FieldDoesNotExist
from django.db import NotSupportedError
from django.db.migrations.operations.base import Operation

from dlocks.optimistic.version_field import STEPS, VersionField, version_field

# Whether a write does not raise the version. A program that writes whole rows may set
# it back, and an instance with the old version would overwrite that write.
OUTDATED = "NEW.{version} < OLD.{version} OR NEW.{version} = OLD.{version}{changed}"
# How each engine names the time in microseconds, a random step above the old version,
# and whether a column has changed. "{column}" is a quoted name.
POSTGRESQL = """
CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $dlocks$ BEGIN
    IF {outdated} THEN
        NEW.{version} := greatest(
            OLD.{version} + 1 + floor(random() * {steps})::bigint,
            (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
        );
    END IF;
    RETURN NEW;
END $dlocks$
"""
# InnoDB compares text by its collation, in which "A" may be "a".
INNODB = """
CREATE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW
SET NEW.{version} = IF(
    {outdated},
    GREATEST(
        OLD.{version} + 1 + FLOOR(RAND() * {steps}),
        TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))
    ),
    NEW.{version}
)
"""
# SQLite's clock has milliseconds.
SQLITE = """
CREATE TRIGGER {name} AFTER UPDATE ON {table} FOR EACH ROW
WHEN {outdated}
BEGIN
    UPDATE {table} SET {version} = max(
        OLD.{version} + 1 + abs(random() % {steps}),
        CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) * 1000
        + abs(random() % 1000)
    ) WHERE rowid = NEW.rowid;
END
"""
CHANGED = {
    "mysql": "NOT (HEX(CONCAT(NEW.{column})) <=> HEX(CONCAT(OLD.{column})))",
    "sqlite": "NEW.{column} IS NOT OLD.{column}",
}
CALL = """
CREATE TRIGGER {name} BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {name}()
"""
DROP = "DROP TRIGGER IF EXISTS {name}"
ADDED = {"postgresql": [POSTGRESQL, CALL], "mysql": [INNODB], "sqlite": [SQLITE]}
REMOVED = {
    "postgresql": [f"{DROP} ON {{table}}", "DROP FUNCTION IF EXISTS {name}()"],
    "mysql": [DROP],
    "sqlite": [DROP],
}


class _VersionTrigger(Operation):
    """Execute statements about the trigger of a model with a VersionField."""

    forwards: list[dict[str, list[str]]]
    backwards: list[dict[str, list[str]]]
    verb: str

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Leave the state, which has no triggers."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._execute(self.forwards, app_label, schema_editor, to_state)

    def database_backwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        self._execute(self.backwards, app_label, schema_editor, to_state)

    def describe(self) -> str:
        return f"{self.verb} trigger for the version of {self.model_name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"{self.model_name.lower()}_version_trigger"

    def _execute(self, steps: Any, app_label: str, editor: Any, state: Any) -> None:
        connection = editor.connection
        model = state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(connection.alias, model):
            facts = _facts(connection, model)
            for step in steps:
                for statement in step[connection.vendor]:
                    editor.execute(statement.format(**facts), params=None)


class AddVersionTrigger(_VersionTrigger):
    """Replace a row's version at each UPDATE that does not raise it.

    Put it into a migration after the model has its VersionField. Writes of raw SQL and
    of other programs then make loaded instances stale, as ``QuerySet.update()`` does.
    The statements of a VersionedModel set the version themselves. A write that changes
    only ``ignore_fields`` is left alone.

    On SQLite, Django drops the trigger whenever it rebuilds a table. There, and for a
    field that is added to a model with ``ignore_fields``, put the operation again into
    the migration that changes the model. Put it also behind a ``RenameField`` of the
    version: elsewhere, each UPDATE fails while the trigger has the old name.
    """

    forwards, backwards, verb = [REMOVED, ADDED], [REMOVED], "Add a"


class RemoveVersionTrigger(_VersionTrigger):
    """Remove the trigger of ``AddVersionTrigger``."""

    forwards, backwards, verb = [REMOVED], [REMOVED, ADDED], "Remove the"


def _facts(connection: Any, model: Any) -> dict[str, Any]:
    """Return what the statements contain."""
    if connection.vendor not in ADDED:
        raise NotSupportedError(
            f"There is no trigger for versions on {connection.vendor}. Remove the"
            " operation from the migration, or write version = version + 1 in raw SQL."
        )
    field, quote = version_field(model), connection.ops.quote_name
    if field not in model._meta.local_concrete_fields:
        raise FieldDoesNotExist(
            f"The version of {model._meta.label} is in the table of"
            f" {field.model._meta.label}. Name that model."
        )
    digest = hashlib.sha256(model._meta.db_table.encode()).hexdigest()[:16]
    version = quote(field.column)
    changed = _changed(connection, model, field) if field.ignore_fields else ""
    return {
        "name": quote(f"dlocks_version_{digest}"),
        "table": quote(model._meta.db_table),
        "version": version,
        "steps": STEPS,
        "outdated": OUTDATED.format(version=version, changed=changed),
    }


def _changed(connection: Any, model: Any, field: VersionField) -> str:
    """Return the condition that a column has changed that is not ignored."""
    ignored = {model._meta.get_field(name).column for name in field.ignore_fields}
    columns = {one.column for one in model._meta.local_concrete_fields}
    # PostgreSQL computes generated columns after the trigger.
    generated = {one.column for one in model._meta.local_fields if one.generated}
    ignored |= generated | {field.column}
    if connection.vendor == "postgresql":
        names = ", ".join(f"'{name}'" for name in sorted(ignored))
        others = f"to_jsonb({{}}) - ARRAY[{names}]"
        return f" AND {others.format('NEW')} <> {others.format('OLD')}"
    changes = " OR ".join(
        CHANGED[connection.vendor].format(column=connection.ops.quote_name(column))
        for column in sorted(columns - ignored)
    )
    return f" AND ({changes})"
