from typing import Any

from django.db import migrations, models

import dlocks.fields


def set_storage(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        # Leave space on each page, so that a new version of a row needs no new page and
        # no new index entry (HOT). Autovacuum must not wait until a share of a large
        # table has changed.
        schema_editor.execute(
            "ALTER TABLE dlocks_resourcelock SET (fillfactor = 50,"
            " autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold ="
            " 1000, autovacuum_vacuum_cost_delay = 0)"
        )
    elif schema_editor.connection.vendor == "mysql":
        # InnoDB updates persistent statistics some seconds late. For a queue that was
        # empty until then, MySQL scans the whole table instead of an index.
        schema_editor.execute("ALTER TABLE dlocks_lockclaim STATS_PERSISTENT = 0")


class CreateTable(migrations.CreateModel):
    """Create a table in whose indexes a key of 255 characters fits.

    In the row formats COMPACT and REDUNDANT, which a server may have as default, InnoDB
    indexes at most 767 bytes of a column. See
    https://dev.mysql.com/doc/refman/8.4/en/innodb-limits.html
    """

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        usual = schema_editor.sql_create_table
        if schema_editor.connection.vendor == "mysql":
            schema_editor.sql_create_table = f"{usual} ROW_FORMAT=DYNAMIC"
        super().database_forwards(app_label, schema_editor, from_state, to_state)
        schema_editor.sql_create_table = usual


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        CreateTable(
            name="ResourceLock",
            fields=[
                (
                    "key_resource",
                    dlocks.fields.KeyField(
                        max_length=255,
                        primary_key=True,
                        serialize=False,
                        verbose_name="key",
                    ),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[
                            ("P", "processing"),
                            ("S", "succeeded"),
                            ("F", "failed"),
                        ],
                        max_length=1,
                        verbose_name="status",
                    ),
                ),
                (
                    "owner",
                    dlocks.fields.OwnerField(
                        help_text="The secret, random identity of one hold.",
                        max_length=32,
                        verbose_name="owner",
                    ),
                ),
                (
                    "holder",
                    dlocks.fields.UnicodeField(
                        help_text="Host, process, thread or task, and note.",
                        max_length=255,
                        verbose_name="holder",
                    ),
                ),
                (
                    "owner_ip",
                    models.GenericIPAddressField(null=True, verbose_name="owner IP"),
                ),
                (
                    "begin_time",
                    dlocks.fields.ClockField(null=True, verbose_name="begin time"),
                ),
                ("end_time", dlocks.fields.ClockField(verbose_name="end time")),
                (
                    "hold_count",
                    models.PositiveIntegerField(default=0, verbose_name="hold count"),
                ),
                ("version", models.BigIntegerField(verbose_name="version")),
                (
                    "shares",
                    models.PositiveIntegerField(
                        db_default=0,
                        help_text="The number of shared holds.",
                        verbose_name="shares",
                    ),
                ),
                (
                    "waiters",
                    models.PositiveIntegerField(
                        db_default=0,
                        help_text="The number of claims in the queue, as last counted.",
                        verbose_name="waiters",
                    ),
                ),
            ],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "permissions": (
                    ("clear_resourcelock", "Can clear stale locks"),
                    (
                        "force_release_resourcelock",
                        "Can force the release of a held lock",
                    ),
                ),
                "default_permissions": ("view",),
            },
        ),
        CreateTable(
            name="LockClaim",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "key_resource",
                    dlocks.fields.KeyField(max_length=255, verbose_name="key"),
                ),
                (
                    "owner",
                    dlocks.fields.ClaimOwnerField(
                        max_length=32, unique=True, verbose_name="owner"
                    ),
                ),
                (
                    "holder",
                    dlocks.fields.UnicodeField(max_length=255, verbose_name="holder"),
                ),
                (
                    "owner_ip",
                    models.GenericIPAddressField(null=True, verbose_name="owner IP"),
                ),
                ("begin_time", dlocks.fields.ClockField(verbose_name="begin time")),
                ("end_time", dlocks.fields.ClockField(verbose_name="end time")),
                ("version", models.BigIntegerField(null=True, verbose_name="version")),
                (
                    "hold_count",
                    models.PositiveIntegerField(default=0, verbose_name="hold count"),
                ),
                ("shared", models.BooleanField(verbose_name="shared")),
                (
                    "permits",
                    models.PositiveIntegerField(
                        help_text="The number of holds that may share the key.",
                        verbose_name="permits",
                    ),
                ),
                (
                    "scope",
                    models.CharField(
                        help_text="The status of the lock row after the grant.",
                        max_length=1,
                        verbose_name="scope",
                    ),
                ),
                ("takeover", models.BooleanField(verbose_name="takeover")),
                (
                    "handover_ttl",
                    models.BigIntegerField(
                        help_text="Microseconds of the lease after a handover.",
                        verbose_name="handover ttl",
                    ),
                ),
                (
                    "channel",
                    models.CharField(
                        blank=True,
                        help_text="The channel for its notification.",
                        max_length=63,
                        verbose_name="channel",
                    ),
                ),
                (
                    "holding",
                    dlocks.fields.HoldingField(
                        blank=True,
                        help_text="The keys that a waiting caller holds, as JSON.",
                        verbose_name="holding",
                    ),
                ),
            ],
            options={
                "verbose_name": "claim",
                "verbose_name_plural": "claims",
                "default_permissions": (),
                "indexes": [
                    models.Index(fields=["key_resource", "id"], name="dlocks_line")
                ],
            },
        ),
        CreateTable(
            name="HoldRecord",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                (
                    "key_resource",
                    dlocks.fields.KeyField(max_length=255, verbose_name="key"),
                ),
                ("token", models.BigIntegerField(verbose_name="token")),
                (
                    "holder",
                    dlocks.fields.UnicodeField(max_length=255, verbose_name="holder"),
                ),
                (
                    "owner_ip",
                    models.GenericIPAddressField(null=True, verbose_name="owner IP"),
                ),
                (
                    "scope",
                    models.CharField(
                        choices=[("L", "lease"), ("T", "transaction")],
                        max_length=1,
                        verbose_name="scope",
                    ),
                ),
                ("shared", models.BooleanField(verbose_name="shared")),
                (
                    "waited",
                    models.FloatField(
                        help_text="Seconds for which the holder waited.",
                        verbose_name="waited",
                    ),
                ),
                ("begin_time", dlocks.fields.ClockField(verbose_name="begin time")),
                ("end_time", dlocks.fields.ClockField(verbose_name="end time")),
                (
                    "ending",
                    models.CharField(
                        choices=[
                            ("R", "released"),
                            ("F", "failed"),
                            ("L", "lost"),
                            ("D", "handed over"),
                        ],
                        max_length=1,
                        verbose_name="outcome",
                    ),
                ),
            ],
            options={
                "verbose_name": "ended hold",
                "verbose_name_plural": "ended holds",
                "default_permissions": ("view",),
                "indexes": [
                    models.Index(fields=["end_time"], name="dlocks_record_end")
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("key_resource", "token"), name="dlocks_record_once"
                    )
                ],
            },
        ),
        migrations.RunPython(
            set_storage, migrations.RunPython.noop, atomic=False, elidable=False
        ),
    ]
