"""What is wrong with a round, as the callers and the backend recorded it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.campaign.backends import freed, lost
from tests.campaign.callers import PERMITS, Entry
from tests.campaign.plans import Plan, letter

# What is searched for. A round may have several findings.
WHAT = {
    "overlap": "two holds of a key at once, and neither was reported as lost",
    "leak": "a key is taken a second after its last entry was left",
    "freed": "a key was freed under a caller's work, which ended without an error",
    "lost": "a hold was reported as lost, although no caller took it",
    "refused": "a caller was refused its own key, or its right to use or leave it",
    "stray": "a caller left the entry of another one",
    "error": "an unexpected error",
    "hang": "callers did not end",
}


@dataclass(frozen=True)
class Finding:
    kind: str
    # The same for findings that may have the same cause.
    label: str
    text: str
    plan: Plan

    def lines(self) -> list[str]:
        return [
            f"{self.kind}: {WHAT[self.kind]} ({self.label})",
            f"    {self.text}",
            *(f"    {line}" for line in self.plan.lines()),
        ]


def plain(text: str) -> str:
    """Return a message without the names and numbers of one round."""
    text = re.sub(r"'[^']*:[a-f]'", "'key'", text.splitlines()[0])
    text = re.sub(r"\b(by|\(token) [^ ]*\d[^ ]*( \(token \d+\))?", "", text)
    return re.sub(r"\d[\d.]*", "0", text)[:160]


def end_of(entry: Entry) -> int | None:
    """Return until when a caller believed that it had the key.

    A caller that ended believes nothing.
    """
    if entry.leaving is not None:
        return entry.leaving
    return entry.caller.ended_at


def check(round_: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what the records show: the kind, the label and the text."""
    entries = list(round_.entries)
    for entry in entries:
        yield from _freed(entry)
        yield from _lost(entry)
    for key, mode in enumerate(round_.plan.modes):
        yield from _overlaps(
            [entry for entry in entries if key in entry.keys], key, mode
        )
    for when, mine, label, text in round_.suspects:
        # Otherwise the end of its hold is the finding.
        if all(
            entry.outcome != "lost"
            and not entry.excuse
            and not any(freed.get(owner, when) < when for owner in entry.owners)
            for entry in mine
        ):
            yield "refused", label, text


def _freed(entry: Entry):
    end = end_of(entry)
    if end is None or entry.outcome == "lost":
        return
    if entry.leaving is not None and entry.outcome is None:
        # It has not ended yet.
        return
    for key, owner, _ in entry.parts:
        when = freed.get(owner)
        if when is not None and when < end:
            before = "before it began" if when < entry.began else "meanwhile"
            text = f"{entry.caller.name} used {letter(key)!r} by {entry.what}"
            yield (
                "freed",
                f"{entry.what}, {before}",
                f"{text}, which was freed {before}",
            )


def _lost(entry: Entry):
    if entry.outcome == "lost" and not entry.excuse:
        keys = ", ".join(letter(key) for key in sorted(entry.keys))
        yield "lost", entry.what, f"{entry} lost {keys!r}"


def _overlaps(entries, key, mode):
    held = []
    for entry in entries:
        owner = next(owner for number, owner, _ in entry.parts if number == key)
        end = end_of(entry)
        # A caller that ended without a release learns of no loss.
        was_reported = entry.leaving is None and owner in lost
        if end is not None and entry.outcome != "lost" and not was_reported:
            held.append((entry.began, end, owner, entry.hold.lock.shared, entry))
    for one in held:
        # Those who have the key at the beginning of this one, by hold.
        others = {
            other[2]: other
            for other in held
            if other[2] != one[2] and other[0] < one[0] < other[1]
        }
        for other in others.values():
            # A caller that uses a write lock may also acquire the read lock, also one
            # to which the hold was lent.
            users = [one[4].caller]
            if mode == "rw":
                users += [
                    each[4].caller
                    for each in held
                    if each[2] == one[2] and each[0] < one[0] < each[1]
                ]
            beside_it = [
                each[4].caller
                for each in held
                if each[2] == other[2] and each[0] < one[0] < each[1]
            ]
            if any(caller is user for caller in beside_it for user in users):
                continue
            both = one[3] and other[3]
            if both and (mode == "rw" or len(others) < PERMITS):
                continue
            beside = ", ".join(str(each[4]) for each in others.values())
            freed_ones = sorted(
                {
                    each[4].what
                    for each in (one, *others.values())
                    if freed.get(each[2], each[1]) < each[1]
                }
            )
            yield (
                "overlap",
                f"after {', '.join(freed_ones) or 'nothing'} was freed",
                f"{letter(key)!r}: {one[4]} beside {beside}",
            )
            break


def leak_label(round_: Any, key: int, token: int) -> str:
    """Return who left the hold that still has the key."""
    mine = [
        entry
        for entry in round_.entries
        if any(number == key and at == token for number, _, at in entry.parts)
    ]
    if not mine:
        return "no caller received the hold"
    still_open = sorted({one.what for one in mine if one.leaving is None})
    if still_open:
        return f"open: {', '.join(still_open)}"
    return f"left last by {max(mine, key=lambda one: one.leaving).what}"
