from django.db import migrations, models

import dlocks.models


class Migration(migrations.Migration):
    dependencies = [
        ("dlocks", "0001_initial"),
    ]

    operations = [
        migrations.AddField(
            model_name="resourcelock",
            name="shares",
            field=models.PositiveIntegerField(db_default=0, help_text="How many share the key.", verbose_name="shares"),
        ),
        migrations.AddField(
            model_name="resourcelock",
            name="waiters",
            field=models.PositiveIntegerField(
                db_default=0,
                help_text="Not fewer than the claims in line that were counted in.",
                verbose_name="waiters",
            ),
        ),
        migrations.CreateModel(
            name="LockClaim",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("key_resource", dlocks.models.KeyField(max_length=255, verbose_name="key")),
                ("owner", dlocks.models.KeyField(max_length=32, unique=True, verbose_name="owner")),
                ("holder", models.CharField(max_length=255, verbose_name="holder")),
                ("owner_ip", models.GenericIPAddressField(null=True, verbose_name="owner IP")),
                ("begin_time", dlocks.models.ClockField(verbose_name="begin time")),
                ("end_time", dlocks.models.ClockField(verbose_name="end time")),
                ("version", models.BigIntegerField(null=True, verbose_name="version")),
                ("hold_count", models.PositiveIntegerField(default=0, verbose_name="hold count")),
                ("shared", models.BooleanField(verbose_name="shared")),
                (
                    "permits",
                    models.PositiveIntegerField(
                        help_text="How many may share the key, this one counted.", verbose_name="permits"
                    ),
                ),
                (
                    "scope",
                    models.CharField(
                        help_text="The status of the lock row once it is granted.", max_length=1, verbose_name="scope"
                    ),
                ),
                ("takeover", models.BooleanField(verbose_name="takeover")),
                (
                    "counted",
                    models.BooleanField(
                        help_text="Whether the waiters of the lock row include it.", verbose_name="counted"
                    ),
                ),
                (
                    "patience",
                    models.BigIntegerField(
                        help_text="Microseconds for which it is granted unasked.", verbose_name="patience"
                    ),
                ),
                (
                    "channel",
                    models.CharField(blank=True, help_text="Where it is told.", max_length=63, verbose_name="channel"),
                ),
            ],
            options={
                "verbose_name": "claim",
                "verbose_name_plural": "claims",
                "default_permissions": (),
                "indexes": [models.Index(fields=["key_resource", "id"], name="dlocks_line")],
            },
        ),
    ]
