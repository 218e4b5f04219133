"""Backends that do what a test says at one of their documented methods."""

from dataclasses import replace

from dlocks.backends.database import PessimisticBackend
from dlocks.backends.memory import MemoryBackend


class Interposed(PessimisticBackend):
    before_clear = staticmethod(lambda key: None)

    def clear(self, key, version, **options):
        self.before_clear(key)
        return super().clear(key, version, **options)


def before_clear(settings, function):
    """Let the default alias call ``function(key)`` just before it clears a key."""
    Interposed.before_clear = staticmethod(function)
    default = {"BACKEND": f"{__name__}.Interposed"}
    settings.DLOCKS = {**settings.DLOCKS, "default": default}


class Reporting(MemoryBackend):
    """A backend that reports the keys and the facts about holders that a test wants."""

    reported = MemoryBackend.keys
    known = {"holder": "web-1:4711:MainThread", "owner_ip": "192.0.2.7"}

    def keys(self):
        return self.reported()

    def holder(self, key):
        found = super().holder(key)
        return found and replace(found, **self.known)


REPORTING = {"BACKEND": f"{__name__}.Reporting"}
