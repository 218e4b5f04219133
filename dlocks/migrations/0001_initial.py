from typing import Any

from django.db import migrations, models

import dlocks.models


def keep_updates_in_place(apps: Any, schema_editor: Any) -> None:
    # PostgreSQL: room on each page, so that a new version of a row needs no new page and no new index entry (HOT),
    # and a vacuum that does not wait for a share of a large table.
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(
            "ALTER TABLE dlocks_resourcelock SET (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01,"
            " autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0)"
        )


class Migration(migrations.Migration):
    initial = True
    dependencies = []
    operations = [
        migrations.CreateModel(
            name="ResourceLock",
            fields=[
                (
                    "key_resource",
                    dlocks.models.KeyField(max_length=255, primary_key=True, serialize=False, verbose_name="key"),
                ),
                (
                    "status",
                    models.CharField(
                        choices=[("P", "processing"), ("S", "succeeded"), ("F", "failed")],
                        max_length=1,
                        verbose_name="status",
                    ),
                ),
                (
                    "owner",
                    models.CharField(help_text="The capability of one hold.", max_length=32, verbose_name="owner"),
                ),
                (
                    "holder",
                    models.CharField(help_text="Host, process and thread.", max_length=255, verbose_name="holder"),
                ),
                ("owner_ip", models.GenericIPAddressField(null=True, verbose_name="owner IP")),
                ("begin_time", dlocks.models.ClockField(null=True, verbose_name="begin time")),
                ("end_time", dlocks.models.ClockField(verbose_name="end time")),
                ("hold_count", models.PositiveIntegerField(default=0, verbose_name="hold count")),
                ("version", models.BigIntegerField(verbose_name="version")),
            ],
            options={
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
                "permissions": (
                    ("clear_resourcelock", "Can clear stale locks"),
                    ("force_release_resourcelock", "Can force the release of a held lock"),
                ),
                "default_permissions": ("view",),
            },
        ),
        migrations.RunPython(keep_updates_in_place, migrations.RunPython.noop, elidable=False),
    ]
