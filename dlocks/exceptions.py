"""The exceptions that dlocks raises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dlocks.text import NAMED

if TYPE_CHECKING:
    from django.db.models import Model

    from dlocks.values import Holder, Waiter


class LockError(Exception):
    """The base class of all dlocks errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle does not know the constructors' keywords. Task queues and process pools
        # send errors, and not every model instance can be pickled.
        state = {**self.__dict__}
        state.pop("instance", None)
        return _restored, (type(self), self.args), state


class LockTimeout(LockError, TimeoutError):
    """The key was still held when ``timeout`` had passed."""

    def __init__(
        self, message: str, *, key: str, timeout: float | None, holder: Holder | None
    ) -> None:
        super().__init__(message)
        self.key = key
        self.timeout = timeout
        self.holder = holder


class LockDeadlock(LockTimeout):
    """Callers waited for each other's keys, and this one gave up before ``timeout``.

    ``members`` are the callers, in the order in which they began to wait. The last one
    gets this error. The others continue once it has released what it holds.
    """

    members: tuple[Waiter, ...] = ()


class LockNotAwaitable(LockError):
    """The key is held by another caller and cannot be waited for here.

    This happens inside a transaction on SQLite. With ``timeout=0``, LockTimeout is
    raised instead.
    """

    def __init__(self, message: str, *, key: str, holder: Holder | None) -> None:
        super().__init__(message)
        self.key = key
        self.holder = holder


class LockShutDown(LockError):
    """``shutdown()`` has ended the wait for the key, or was called before the wait.

    After a test that calls it, ``dlocks.testing.undo_shutdown()`` lets other tests wait
    again.
    """

    def __init__(self, message: str, *, key: str) -> None:
        super().__init__(message)
        self.key = key


class LockLost(LockError):
    """The hold ended before its release. Exclusion is no longer guaranteed."""

    def __init__(self, message: str, *, key: str, token: int) -> None:
        super().__init__(message)
        self.key = key
        self.token = token


class LockStale(LockError):
    """The key is stale, and ``takeover=False`` forbids taking it over."""

    def __init__(self, *, key: str, holder: Holder | None) -> None:
        super().__init__(
            f"{key!r} is stale: held by {holder or 'an unknown holder'}. takeover=False"
            " forbids taking it over. Find out how that run ended, then clear the key."
            " If it is in a database, use 'manage.py clear_lock' or the admin."
        )
        self.key = key
        self.holder = holder


class LockBackendError(LockError):
    """The backend could not be reached, or did not answer.

    The ``__cause__`` is the backend's own error. ``changed_nothing`` is true if the
    request was certainly not carried out: it was not sent, or the server refused it.
    """

    changed_nothing = False
    # Whether another thread still has the request, and carries it out when it can.
    is_pending = False


class StaleVersion(LockError):
    """A row of a ``VersionedModel`` was changed since it was read.

    Nothing was written. ``instance`` was refused. ``held`` is its version. ``found`` is
    the one in the database, or None if the row is gone. ``bulk_update()`` lists all
    stale rows in ``pks``, and the first in ``pk`` and ``instance``. An unpickled error
    has no instance.
    """

    instance: Model | None = None

    def __init__(
        self,
        model: type[Model],
        pk: Any,
        held: int | None,
        found: int | None,
        pks: Sequence[Any] | None = None,
    ) -> None:
        # All of them, so that the error can be pickled.
        super().__init__(model, pk, held, found, pks)
        self.model = model
        self.pk = pk
        self.held = held
        self.found = found
        self.pks = tuple(pks) if pks is not None else (pk,)

    def __str__(self) -> str:
        held = "no version" if self.held is None else f"version {self.held}"
        if self.found is None:
            what = f"{self.model._meta.label} {self.pk!r} is gone; expected {held}"
            way_out = "To insert it again, use save(force_insert=True)."
        else:
            what = (
                f"{self.model._meta.label} {self.pk!r} has changed: expected {held},"
                f" found version {self.found}"
            )
            way_out = "Read it again, then repeat the change."
        if len(self.pks) > 1:
            named = ", ".join(map(repr, self.pks[:NAMED])) + (
                ", ..." if len(self.pks) > NAMED else ""
            )
            what += f"; {len(self.pks)} rows are stale: {named}"
        return f"{what}. Nothing was written. {way_out}"


class StaleToken(LockError):
    """A write to a ``FencedModel`` row carried an outdated fencing token.

    Nothing was written. ``found`` is the token in the row, or None if the row is gone.
    It is older if the claim of the row was rolled back.
    """

    instance: Model | None = None

    def __init__(
        self, model: type[Model], pk: Any, token: int, found: int | None
    ) -> None:
        super().__init__(model, pk, token, found)
        self.model = model
        self.pk = pk
        self.token = token
        self.found = found

    def __str__(self) -> str:
        what = f"{self.model._meta.label} {self.pk!r}"
        if self.found is None:
            return f"{what} is gone. Token {self.token} cannot write to it."
        if self.found < self.token:
            return (
                f"{what} has token {self.found}, so the claim with token {self.token}"
                " was rolled back. Nothing was written. Claim the row again."
            )
        return (
            f"{what} has token {self.found}, which is newer than token {self.token}."
            " Nothing was written. Another caller has acquired the lock: stop this"
            " work."
        )


def _restored(kind: type[LockError], args: tuple[Any, ...]) -> LockError:
    error = kind.__new__(kind)
    error.args = args
    return error
