"""Text for people: holders, times, lengths of time and printable keys.

``DLOCKS_SHOW_HOLDER`` controls the display of holders. Host, process, thread or task,
note and IP reveal how a site is built. Pages and error messages may hide them. Logs,
commands and attributes of errors never do.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.utils import timezone
from django.utils.formats import localize
from django.utils.translation import gettext as _
from django.utils.translation import ngettext_lazy, override

HIDDEN = "a hidden holder"

# Maximum number of characters of a holder's name.
HOLDER_LENGTH = 255

# The number of holders, keys or rows that a message names at most.
NAMED = 10


def shows_holder() -> bool:
    # Any other value, even a mistaken one, hides the holder.
    return getattr(settings, "DLOCKS_SHOW_HOLDER", True) is True


def shown_holder(name: str) -> str:
    """Return a holder's name, or a text that hides it.

    The name is printable, since it ends up in logs and errors. Its process may have had
    another version of dlocks, which did not escape it.
    """
    if shows_holder() or not name:
        return printable(name)
    return HIDDEN


def with_note(holder: str, note: str) -> str:
    """Return a holder's name with what it does in brackets, cut to fit its column."""
    room = HOLDER_LENGTH - len(holder) - len(" []")
    return f"{holder} [{printable(note)[:room]}]" if note and room > 0 else holder


def without_note(holder: str) -> str:
    """Return the part of a holder's name that is the same for all of its notes."""
    return holder.partition(" [")[0]


def shown_address(ip: str | None) -> str | None:
    return printable(ip) if ip and shows_holder() else None


def permits_taken(permits: int, sharers: Sequence[object], waiting: int) -> str:
    """Return a phrase about a full semaphore, with its holders and waiters."""
    taken = len(sharers)
    if permits == 1:
        number = "the only permit is"
    elif taken >= permits:
        number = f"all {permits} permits are"
    else:
        number = f"{taken} of {permits} permits {'is' if taken == 1 else 'are'}"
    *first, last = [str(one) for one in sharers[:NAMED]] + (
        [f"{taken - NAMED} more"] if taken > NAMED else []
    )
    by = f"{', '.join(first)} and {last}" if first else last
    callers = "1 caller is" if waiting == 1 else f"{waiting} callers are"
    return f"{number} held by {by}" + (f"; {callers} waiting" if waiting > 0 else "")


def moment(value: Any) -> str:
    """Return a moment in the current time zone, to the second."""
    # The ``localtime`` of templates does not convert UTC if USE_TZ is off.
    return timezone.localtime(value).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float) -> str:
    """Return a length of time in the largest unit of which there are at least two.

    It is in English, for logs, errors and commands.
    """
    with override(None):
        return shown_duration(seconds)


def shown_duration(seconds: float) -> str:
    """Return a length of time as ``duration()`` does, in the language of the page."""
    for unit, size in _UNITS:
        if abs(seconds) >= 2 * size:
            return str(unit % {"count": round(seconds / size)})
    number = localize(round(float(seconds), 1)) if abs(seconds) < 10 else round(seconds)
    return _("%(number)s s") % {"number": number}


def short_duration(seconds: float) -> str:
    """Return a length of time for a narrow column of a command, such as ``45m``."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if abs(seconds) >= 2 * size:
            return f"{round(seconds / size)}{unit}"
    return f"{round(seconds)}s"


# The names of units, and their seconds.
_UNITS: Any = (
    (ngettext_lazy("%(count)d day", "%(count)d days", "count"), 86400),
    (ngettext_lazy("%(count)d hour", "%(count)d hours", "count"), 3600),
    (ngettext_lazy("%(count)d minute", "%(count)d minutes", "count"), 60),
)


def printable(text: str) -> str:
    """Return the text with control and bidirectional characters escaped.

    Such characters could end a line of a log, act on a terminal or change the direction
    of writing.
    """
    return "".join(
        character.encode("unicode_escape").decode() if _acts(character) else character
        for character in text
    )


def _acts(character: str) -> bool:
    return (
        unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}
        or unicodedata.bidirectional(character) in _DIRECTIONS
        or character in "\u061c\u200e\u200f"
    )


_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
