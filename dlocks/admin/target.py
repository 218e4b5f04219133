"""What an action of the admin is about, and its fields in forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self
from urllib.parse import unquote

from dlocks.models import ResourceLock
from dlocks.operations import LockRow


@dataclass(frozen=True)
class Target:
    """The target of an action.

    It is a lock with its version, a shared hold with its token, or a claim with its id.
    """

    key: str
    kind: Literal["lock", "share", "claim"]
    number: int

    @classmethod
    def parse(cls, key: str, field: str) -> Self:
        """Return the target from two fields of a form, or raise ValueError."""
        kind, _, number = field.rpartition(":")
        if kind not in {"", "share", "claim"}:
            raise ValueError(kind)
        return cls(from_form(key), kind or "lock", int(number))  # type: ignore[arg-type]

    @classmethod
    def of(cls, shown: LockRow) -> Self:
        if isinstance(shown, ResourceLock):
            return cls(shown.pk, "lock", shown.version)
        if shown.version is not None:
            return cls(shown.key_resource, "share", shown.version)
        return cls(shown.key_resource, "claim", shown.pk)

    @property
    def field(self) -> str:
        return str(self.number) if self.kind == "lock" else f"{self.kind}:{self.number}"


def to_form(key: str) -> str:
    # Browsers send every line break in a form as CR LF.
    return key.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def from_form(field: str) -> str:
    return unquote(field)
