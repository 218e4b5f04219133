"""What an operator ends, and its field in forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self, cast
from urllib.parse import unquote

from dlocks.models import ResourceLock
from dlocks.operations import LockRow, is_column

Kind = Literal["lock", "share", "claim"]


@dataclass(frozen=True)
class Target:
    """What an operator ends.

    It is a lock with its version, a shared hold with its token, or a claim with its id.
    """

    key: str
    kind: Kind
    number: int

    @classmethod
    def parse(cls, field: str) -> Self:
        """Return the target from a field of a form, or raise ValueError."""
        kind, number, key = field.split(" ", 2)
        if kind not in {"lock", "share", "claim"} or not is_column(int(number)):
            raise ValueError(field)
        return cls(from_form(key), cast("Kind", kind), int(number))

    @classmethod
    def of(cls, shown: LockRow) -> Self:
        if isinstance(shown, ResourceLock):
            return cls(shown.pk, "lock", shown.version)
        if shown.version is not None:
            return cls(shown.key_resource, "share", shown.version)
        return cls(shown.key_resource, "claim", shown.pk)

    @property
    def field(self) -> str:
        return f"{self.kind} {self.number} {to_form(self.key)}"


def to_form(key: str) -> str:
    # Browsers send every line break in a form as CR LF.
    return key.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def from_form(field: str) -> str:
    return unquote(field)
