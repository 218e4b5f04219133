"""The cells of the tables of locks, shared holds and claims."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.http import urlencode
from django.utils.safestring import SafeString, mark_safe
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from dlocks.admin.changes import Target
from dlocks.core.lease import slow_after
from dlocks.keys import LEADER_PREFIX
from dlocks.models import ClaimState, LockState
from dlocks.operations import (
    LockRow,
    address_of,
    in_row,
    is_kept,
    is_resting,
    is_session,
    last_seen_of,
    mode,
    name_of,
    state_of,
    time_left,
)
from dlocks.text import moment, printable, shown_duration

# A lease is renewed when a third of its ttl has passed, so its ttl is at most this
# multiple of the time that is left, unless a renewal is late.
TTLS_PER_REST = 1.5


class Cells:
    """The cells for one request: the links of its site, and the buttons of its user."""

    def __init__(self, site: Any, source: Any, may: frozenset[str]) -> None:
        self.site = site
        self.source = source
        self.may = may

    def url(self, key: str, **query: str) -> str:
        """Return the address of the page of a key."""
        address = reverse(
            "admin:dlocks_resourcelock_change",
            args=[quote(key)],
            current_app=self.site.name,
        )
        query = {**self.source.query, **query}
        return f"{address}?{urlencode(query)}" if query else address

    def link(self, key: str) -> SafeString:
        return format_html('<a href="{}">{}</a>', self.url(key), key_html(key))

    def holds(self, claim: LockRow) -> SafeString:
        """Return the links to the keys that a waiter holds."""
        keys = getattr(claim, "held_keys", ())
        return format_html_join(", ", "{}", ((self.link(key),) for key in keys))

    def row(self, shown: LockRow, *, buttons: bool = True) -> dict[str, Any]:
        """Return the table row of a lock, a shared hold or a queued claim."""
        target = Target.of(shown)
        is_claim = target.kind == "claim"
        return {
            "id": f"{target.kind}-{target.number}",
            "key": key_html(target.key),
            "state": badge(shown),
            "holder": (holder_of(shown) if target.kind == "lock" else who_html(shown)),
            "age": self.age(shown),
            "left": (
                ("" if shown.state == ClaimState.WAITING else last_seen_of(shown))
                if is_claim
                else time_left(shown)
            ),
            "mode": _("exclusive") if target.kind == "lock" else mode(shown),
            "token": ("" if is_claim or is_session(shown) else str(target.number)),
            "holds": self.holds(shown),
            "target": target.field,
            "buttons": self.buttons(shown) if buttons else "",
        }

    def buttons(self, shown: LockRow, described_by: str = "") -> SafeString:
        """Return the buttons that end a hold or a dead claim.

        They belong to the form ``dlocks-end`` of the page.
        """
        target, found = Target.of(shown), []
        if "clear" in self.may and shown.state in {LockState.STALE, ClaimState.DEAD}:
            found.append(("clear", _("Clear")))
        if "force_release" in self.may and target.kind != "claim":
            found.append(("force_release", _("Force release")))
        row = f"{identity(target.key)}-{target.kind}{target.number}"
        described = described_by and format_html(' aria-describedby="{}"', described_by)
        return format_html_join(
            " ",
            '<button class="button" form="dlocks-end" name="{}" value="{}"'
            ' id="{}-{}"{}>{}</button>',
            ((name, target.field, name, row, described, text) for name, text in found),
        )

    def age(self, held: LockRow) -> SafeString | str:
        """Return for how long a key has been held, in amber if that is long."""
        if held.begin_time is None:
            return ""
        return format_html(
            '<time{} title="{}">{}</time>',
            mark_safe(' class="dlocks-long"' if self.is_long(held) else ""),  # noqa: S308
            moment(held.begin_time),
            shown_duration(held.seconds_held),
        )

    def is_long(self, held: LockRow) -> bool:
        """Return whether a key is held for so long that its release may be missing.

        A leader holds its key for as long as it lives. A row does not have the ttl of
        its lease, but it cannot be shorter than the time that is left.
        """
        backend = self.source.rows
        if backend is None or held.state != LockState.HELD or held.seconds_left <= 0:
            return False
        if held.key_resource.startswith(f"{backend.prefix}{LEADER_PREFIX}"):
            return False
        ttl = max(backend.ttl, TTLS_PER_REST * held.seconds_left)
        return bool(held.seconds_held > slow_after(backend, ttl))


def identity(key: str) -> str:
    """Return an id for the row of a key, by which the script finds it again."""
    encoded = key.encode("utf-8", "surrogatepass")
    return "lock-" + hashlib.blake2s(encoded, digest_size=8).hexdigest()


def key_html(key: str) -> SafeString:
    return format_html('<bdi class="dlocks-key">{}</bdi>', printable(key))


def who_html(held: LockRow, name: str | None = None) -> SafeString | str:
    """Return the holder of a hold, or the waiter of a claim."""
    if not held.holder:
        return ""
    return format_html(
        '<bdi class="dlocks-holder">{}</bdi> <small>{}</small>',
        name_of(held) if name is None else name,
        address_of(held),
    )


def badge(shown: LockRow) -> SafeString:
    """Return the state in words and, by its class, in colour."""
    style, label = str(shown.state), state_of(shown)
    if is_kept(shown):
        style = "kept"
    elif is_resting(shown):
        # min_hold is the name of an option.
        style, label = "resting", _("resting (%(option)s)") % {"option": "min_hold"}
    return format_html('<span class="dlocks-state dlocks-{}">{}</span>', style, label)


def time_html(value: Any, ago: float) -> SafeString:
    """Return an age, or the time left, with the exact time as its title."""
    text = _("%s ago") if ago >= 0 else _("in %s")
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        value.isoformat(),
        moment(value),
        text % shown_duration(abs(ago)),
    )


def sparkline(bars: Sequence[Mapping[str, Any]]) -> SafeString | str:
    """Return the last hour of a key as a small chart. Its page says it in words."""
    if not bars:
        return ""
    drawn = format_html_join(
        "",
        '<rect class="dlocks-all" x="{}" width="0.8" height="{}"/>'
        '<rect class="dlocks-waited" x="{}" width="0.8" height="{}"/>',
        ((bar["x"], bar["holds"], bar["x"], bar["waits"]) for bar in bars),
    )
    return format_html(
        '<svg class="dlocks-spark" viewBox="0 0 60 100" preserveAspectRatio="none"'
        ' aria-hidden="true"><g transform="matrix(1 0 0 -1 0 100)">{}</g></svg>',
        drawn,
    )


def labelled(text: str, cell: Any) -> Any:
    """Return a cell with its label, which is shown where the table has no headings."""
    if not cell:
        return None
    return format_html(
        '<span class="dlocks-label" aria-hidden="true">{}</span>{}',
        capfirst(text),
        cell,
    )


def last_holder(lock: LockRow) -> SafeString | str:
    return who_html(lock, _("last holder: %s") % name_of(lock))


def holder_of(lock: LockRow) -> SafeString | str:
    """Return the holder in the row of a lock.

    The row of a shared key describes only its last exclusive holder.
    """
    if not in_row(lock):
        return ""
    if lock.state == LockState.FREE:
        return last_holder(lock)
    times = f" ×{lock.hold_count}" if lock.hold_count > 1 else ""
    return who_html(lock, name_of(lock) + times)
