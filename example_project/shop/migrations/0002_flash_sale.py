"""The flash sales that the page has begun."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("shop", "0001_initial"),
    ]

    operations = [
        migrations.CreateModel(
            name="FlashSale",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("locks", models.JSONField()),
                ("stock", models.PositiveIntegerField()),
                ("buyers", models.PositiveIntegerField()),
                ("rounds", models.JSONField(default=list)),
                ("trouble", models.TextField(blank=True)),
                ("begun", models.DateTimeField(auto_now_add=True)),
                ("ended", models.DateTimeField(null=True)),
            ],
            options={
                "ordering": ("-pk",),
            },
        ),
    ]
