"""What can go wrong with a lock: busy, lost, stale, or could not ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from django.db.models import Model

    from dlocks.backends.base import Holder


# Rows that one message names.
NAMED = 10


class LockError(Exception):
    """Base class of every error of dlocks."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the constructors, whose keywords pickle does not know: task queues and process pools send errors.
        return _restored, (type(self), self.args, self.__dict__)


class LockTimeout(LockError, TimeoutError):
    """Somebody else has the lock, and still had it when the time to wait was over."""

    def __init__(self, message: str, *, key: str, timeout: float | None, holder: Holder | None) -> None:
        super().__init__(message)
        self.key = key
        self.timeout = timeout
        self.holder = holder


class LockNotAwaitable(LockError):
    """
    Somebody else has the lock, and it cannot be waited for where the caller stands: inside a transaction on SQLite.

    Who only tries, with ``timeout=0``, finds it busy.
    """

    def __init__(self, message: str, *, key: str, holder: Holder | None) -> None:
        super().__init__(message)
        self.key = key
        self.holder = holder


class LockLost(LockError):
    """The hold ended before its holder ended it: exclusion is no longer given."""

    def __init__(self, message: str, *, key: str, token: int) -> None:
        super().__init__(message)
        self.key = key
        self.token = token


class LockStale(LockError):
    """The last holder never came back, and this lock was told not to take over from it."""

    def __init__(self, *, key: str, holder: Holder | None) -> None:
        super().__init__(
            f"{key!r} was never given back by {holder or 'its holder'}. takeover=False leaves it to a person: see what "
            "became of that run, then clear the key; where it is in a database, with 'manage.py clear_lock' or in the "
            "admin."
        )
        self.key = key
        self.holder = holder


class LockBackendError(LockError):
    """The backend could not be asked, or did not answer; its own error is the ``__cause__``."""


class StaleVersion(LockError):
    """
    A row of a ``VersionedModel`` was changed since it was read: nothing was written.

    ``held`` is the version that the caller had, ``found`` the one in the database, None when the row is gone.
    ``bulk_update()`` names all of its stale rows in ``pks``, and the first of them in ``pk``.
    """

    def __init__(
        self, model: type[Model], pk: Any, held: int | None, found: int | None, pks: Sequence[Any] | None = None
    ) -> None:
        # All of them are the arguments, so that the error can be pickled.
        super().__init__(model, pk, held, found, pks)
        self.model = model
        self.pk = pk
        self.held = held
        self.found = found
        self.pks = tuple(pks) if pks is not None else (pk,)

    def __str__(self) -> str:
        held = "no version" if self.held is None else f"version {self.held}"
        if self.found is None:
            what = f"{self.model._meta.label} {self.pk!r} is gone; {held} was held"
        else:
            what = f"{self.model._meta.label} {self.pk!r} has changed: {held} was held, version {self.found} was found"
        if len(self.pks) > 1:
            named = ", ".join(map(repr, self.pks[:NAMED])) + (", ..." if len(self.pks) > NAMED else "")
            what += f"; {len(self.pks)} rows are stale: {named}"
        return f"{what}. Nothing was written: read it again, and decide anew."


class StaleToken(LockError):
    """
    A write to a row of a ``FencedModel`` came with an older token than one that has been there: nothing was written.

    ``found`` is the token in the row, None when the row is gone.
    """

    def __init__(self, model: type[Model], pk: Any, token: int, found: int | None) -> None:
        super().__init__(model, pk, token, found)
        self.model = model
        self.pk = pk
        self.token = token
        self.found = found

    def __str__(self) -> str:
        what = f"{self.model._meta.label} {self.pk!r}"
        if self.found is None:
            return f"{what} is gone; token {self.token} can write nothing there."
        return (
            f"{what} has been claimed with token {self.found}; the older token {self.token} writes nothing any more. "
            "The lock has changed hands: stop this work."
        )


def _restored(kind: type[LockError], args: tuple[Any, ...], state: dict[str, Any]) -> LockError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error
