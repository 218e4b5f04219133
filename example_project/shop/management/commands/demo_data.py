"""A command that creates demo products and an administrator."""

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from example_project.shop.models import Product

PRODUCTS = {
    "Espresso machine": 5,
    "Coffee mill": 12,
    "Moka pot": 30,
    "Cup": 100,
    "The last biscuit": 1,
}
NAME = PASSWORD = "admin"  # noqa: S105 (for DEBUG only)


class Command(BaseCommand):
    help = (
        "Create demo products and the superuser admin/admin. This needs DEBUG = True."
    )

    def handle(self, *args, **options):
        if not settings.DEBUG:
            raise CommandError(
                "demo_data creates a superuser with a well-known password, so it needs"
                " DEBUG = True."
            )
        for name, stock in PRODUCTS.items():
            Product.objects.get_or_create(name=name, defaults={"stock": stock})
        users = get_user_model().objects
        if not users.filter(username=NAME).exists():
            users.create_superuser(NAME, password=PASSWORD)
        self.stdout.write(f"The shop has {Product.objects.count()} products.")
        self.stdout.write(
            self.style.WARNING(
                f"Demo superuser: name {NAME!r}, password {PASSWORD!r}. Use it"
                " on this machine only."
            )
        )
