"""The Django app."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DlocksConfig(AppConfig):
    name = "dlocks"
    verbose_name = _("Distributed locks")

    def ready(self) -> None:
        from dlocks import checks  # noqa: F401 (registers the system checks)
