"""The tables of the shop."""

import django.db.models.deletion
from django.db import migrations, models

import dlocks.optimistic


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="Product",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("name", models.CharField(max_length=100, unique=True)),
                ("stock", models.PositiveIntegerField()),
                (
                    "version",
                    dlocks.optimistic.VersionField(
                        default=0, editable=False, verbose_name="version"
                    ),
                ),
            ],
            options={
                "ordering": ("name",),
            },
            managers=[
                ("objects", models.Manager()),
                ("_versioned", models.Manager()),
            ],
        ),
        migrations.CreateModel(
            name="Sale",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
                ("buyer", models.CharField(max_length=100)),
                ("created", models.DateTimeField(auto_now_add=True)),
                (
                    "product",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="sales",
                        to="shop.product",
                    ),
                ),
            ],
            options={
                "ordering": ("-created", "-pk"),
            },
        ),
        migrations.CreateModel(
            name="FlashSale",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True,
                        primary_key=True,
                        serialize=False,
                        verbose_name="ID",
                    ),
                ),
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
