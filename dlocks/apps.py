"""The configuration of the Django app."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DlocksConfig(AppConfig):
    name = "dlocks"
    verbose_name = _("Distributed locks")

    def ready(self) -> None:
        # They register the system checks and the observers of locks.
        from dlocks import checks, history, telemetry  # noqa: F401
