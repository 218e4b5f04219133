from django.db import migrations, models

import dlocks.models


class Migration(migrations.Migration):
    dependencies = [
        ("dlocks", "0002_line"),
    ]

    operations = [
        migrations.CreateModel(
            name="HoldRecord",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("key_resource", dlocks.models.KeyField(max_length=255, verbose_name="key")),
                ("token", models.BigIntegerField(verbose_name="token")),
                ("holder", models.CharField(max_length=255, verbose_name="holder")),
                ("owner_ip", models.GenericIPAddressField(null=True, verbose_name="owner IP")),
                (
                    "scope",
                    models.CharField(
                        choices=[("L", "lease"), ("T", "transaction")], max_length=1, verbose_name="scope"
                    ),
                ),
                ("shared", models.BooleanField(verbose_name="shared")),
                (
                    "waited",
                    models.FloatField(help_text="Seconds for which its holder waited for it.", verbose_name="waited"),
                ),
                ("begin_time", dlocks.models.ClockField(verbose_name="begin time")),
                ("end_time", dlocks.models.ClockField(verbose_name="end time")),
                (
                    "ending",
                    models.CharField(
                        choices=[("R", "released"), ("F", "failed"), ("L", "lost"), ("D", "handed over")],
                        max_length=1,
                        verbose_name="ending",
                    ),
                ),
            ],
            options={
                "verbose_name": "finished hold",
                "verbose_name_plural": "finished holds",
                "default_permissions": (),
                "indexes": [models.Index(fields=["end_time"], name="dlocks_record_end")],
                "constraints": [models.UniqueConstraint(fields=("key_resource", "token"), name="dlocks_record_once")],
            },
        ),
    ]
