"""
What is shown of a holder to whoever sees a page or an error: the setting ``DLOCKS_SHOW_HOLDER``.

Host, process, thread and IP tell how a site is built. Logs, commands and the attributes of errors always have them.
"""

from __future__ import annotations

from django.conf import settings
from django.utils.crypto import salted_hmac

HASH = "hash"
HIDDEN = "a hidden holder"


def shows_holder() -> bool:
    # Whatever else it may be set to by mistake hides.
    return getattr(settings, "DLOCKS_SHOW_HOLDER", True) is True


def holder(name: str) -> str:
    """Return a holder's name as it may be shown: itself, by a keyed hash that tells it from others, or not."""
    if shows_holder() or not name:
        return name
    if getattr(settings, "DLOCKS_SHOW_HOLDER", True) == HASH:
        # With the site's secret: hosts and processes are few enough to be guessed.
        return f"holder {salted_hmac('dlocks.privacy', name, algorithm='sha256').hexdigest()[:10]}"
    return HIDDEN


def address(ip: str | None) -> str | None:
    return ip if shows_holder() else None
