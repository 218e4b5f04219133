from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [
        ("dlocks", "0003_history"),
    ]

    operations = [
        migrations.AlterModelOptions(
            name="resourcelock",
            options={
                "default_permissions": ("view",),
                "permissions": (
                    ("clear_resourcelock", "Can clear stale locks"),
                    ("force_release_resourcelock", "Can force the release of a held lock"),
                    ("purge_resourcelock", "Can delete the rows of unused keys"),
                ),
                "verbose_name": "lock",
                "verbose_name_plural": "locks",
            },
        ),
    ]
