"""The columns of the list of locks, and the cells of its tables."""

from __future__ import annotations

import math
from typing import Any

from django.contrib import admin
from django.contrib.admin import helpers
from django.utils.html import format_html
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from dlocks.admin.base import ReadOnlyAdmin
from dlocks.admin.links import lock_url
from dlocks.admin.target import Target, to_form
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.core.lease import slow_after
from dlocks.models import ClaimState, LockState, ResourceLock
from dlocks.operations import (
    LockRow,
    address_of,
    in_row,
    last_seen_of,
    mode,
    name_of,
    state_of,
    time_left,
)
from dlocks.text import moment, printable, shown_duration


class LockColumns(ReadOnlyAdmin):
    """The cells of locks, shared holds and claims."""

    def _own_backend(self) -> DatabaseBackend:
        backend = self.backend()
        assert backend is not None, "an action needs a backend"  # noqa: S101
        return backend

    @admin.display(description=gettext_lazy("key"), ordering="key_resource")
    def key(self, lock: LockRow) -> str:
        return key_html(lock.pk)

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def state(self, lock: LockRow) -> str:
        return badge(lock, is_long=is_long(lock, self.backend()))

    @admin.display(description=gettext_lazy("holder"), ordering="holder")
    def who(self, lock: LockRow) -> str | None:
        # The row of a shared key describes only its last exclusive holder.
        if not in_row(lock) or not lock.holder:
            return None
        name = name_of(lock)
        if lock.state == LockState.FREE:
            name = _("last holder: %s") % name
        elif lock.hold_count > 1:
            name += f" ×{lock.hold_count}"
        return who_html(name, lock)

    @admin.display(description=gettext_lazy("holder"))
    def who_unsorted(self, lock: LockRow) -> str | None:
        return self.who(lock)

    @admin.display(description=gettext_lazy("holder"))
    def holder_name(self, lock: LockRow) -> str | None:
        return who_html(name_of(lock), lock) if lock.holder else None

    @admin.display(description=gettext_lazy("last holder"))
    def last_holder(self, lock: LockRow) -> str | None:
        return self.holder_name(lock)

    @admin.display(description=gettext_lazy("last outcome"))
    def last_outcome(self, lock: LockRow) -> str:
        return str(lock.get_status_display())

    @admin.display(description=gettext_lazy("acquired"), ordering="begin_time")
    def begin(self, lock: LockRow) -> str:
        if lock.begin_time is None or not in_row(lock):
            return self.empty_value_display
        return time_html(lock.begin_time, lock.seconds_held)

    @admin.display(description=gettext_lazy("end of the lease"), ordering="end_time")
    def end(self, lock: LockRow) -> str:
        return time_html(lock.end_time, -lock.seconds_left)

    @admin.display(description=gettext_lazy("time left"), ordering="seconds_left")
    def left(self, lock: LockRow) -> str:
        if lock.state == LockState.FREE or not in_row(lock):
            return self.empty_value_display
        return short_time_left(lock)

    @admin.display(description=gettext_lazy("waiters"), ordering="waiting")
    def waiting(self, lock: LockRow) -> str:
        return str(lock.waiting) if lock.waiting else self.empty_value_display

    @admin.display(description=gettext_lazy("token"), ordering="version")
    def token(self, lock: LockRow) -> str:
        # No thousands separators: users compare the token with their logs.
        return str(lock.version)

    def action_checkbox(self, obj: ResourceLock) -> Any:
        return super().action_checkbox(ResourceLock(pk=to_form(obj.pk)))

    def form_of(self, target: Target) -> dict[str, str]:
        """Return the form fields that identify a lock, a shared hold or a claim."""
        return {
            "field": to_form(target.key),
            "version": target.field,
            "action_checkbox_name": helpers.ACTION_CHECKBOX_NAME,
        }

    def link(self, key: str) -> str:
        """Return a link to the page of a lock."""
        return format_html('<a href="{}">{}</a>', lock_url(self, key), key_html(key))

    def _row(self, shown: LockRow, may_force: bool = False) -> dict[str, Any]:
        """Return the table row of a lock, a shared hold or a queued claim."""
        target = Target.of(shown)
        if target.kind == "claim":
            left = "" if shown.state == ClaimState.WAITING else last_seen_of(shown)
        else:
            left = short_time_left(shown)
        return {
            **self.form_of(target),
            "key": key_html(target.key),
            "state": badge(shown),
            "holder": name_of(shown),
            "owner_ip": address_of(shown),
            "begin": (
                None
                if shown.begin_time is None
                else time_html(shown.begin_time, shown.seconds_held)
            ),
            "left": left,
            "mode": _("exclusive") if target.kind == "lock" else mode(shown),
            "token": "" if target.kind == "claim" else str(target.number),
            "holds": [self.link(key) for key in getattr(shown, "held_keys", ())],
            "may_force": may_force,
        }


def key_html(key: str) -> str:
    return format_html('<bdi class="dlocks-key">{}</bdi>', printable(key))


def who_html(name: str, held: LockRow) -> str:
    return format_html(
        '<span class="dlocks-who">{} <small>{}</small></span>', name, address_of(held)
    )


def is_long(lock: LockRow, backend: DatabaseBackend | None) -> bool:
    """Return whether a key is held for so long that its release may be missing."""
    return (
        backend is not None
        and lock.state == LockState.HELD
        and lock.begin_time is not None
        and lock.seconds_held > slow_after(backend, backend.ttl)
    )


def badge(shown: LockRow, *, is_long: bool = False) -> str:
    return format_html(
        '<span class="dlocks-state dlocks-{}">{}</span>',
        "long" if is_long else shown.state,
        label(shown, is_long=is_long),
    )


def label(shown: LockRow, *, is_long: bool) -> str:
    """Return the state in words, and how long a key has been held if that is long."""
    if is_long:
        return _("held for %s") % shown_duration(shown.seconds_held)
    return state_of(shown)


def short_time_left(lock: LockRow) -> str:
    """Return the time left for a cell whose heading says what it is."""
    left: float = lock.seconds_left
    return shown_duration(left) if 0 < left < math.inf else time_left(lock)


def time_html(value: Any, ago: float) -> str:
    """Return an age, or the time left, with the exact time as its title."""
    text = _("%s ago") if ago >= 0 else _("in %s")
    return format_html(
        '<time datetime="{}" title="{}">{}</time>',
        value.isoformat(),
        moment(value),
        text % shown_duration(abs(ago)),
    )
