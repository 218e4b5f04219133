"""The configuration of the Django app."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DlocksConfig(AppConfig):
    name = "dlocks"
    verbose_name = _("Distributed locks")

    def ready(self) -> None:
        # Importing them registers the system checks and the watchers of locks.
        from dlocks import checks, history, telemetry  # noqa: F401
