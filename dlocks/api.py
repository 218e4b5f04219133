"""The functions that return locks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Never, TypeVar, Unpack, overload

from dlocks.conf import DEFAULT_ALIAS
from dlocks.core.lock import Lock
from dlocks.core.options import KEY, KEYS, LOCK, KeyOptions, LockOptions, refuse_unknown
from dlocks.core.shared import ReadWriteLock
from dlocks.decorators import Key, LockDecorator, refuse_bare

T = TypeVar("T")


class _Options(KeyOptions, total=False):
    using: str


@overload
def db_lock(
    key: Key, *, busy: Literal["raise"], **options: Unpack[_Options]
) -> LockDecorator[Never]: ...


@overload
def db_lock(
    key: Key, *, busy: Literal["skip"], **options: Unpack[_Options]
) -> LockDecorator[None]: ...


@overload
def db_lock(
    key: Key, *, busy: Callable[..., T], **options: Unpack[_Options]
) -> LockDecorator[T]: ...


@overload
def db_lock(key: str, **options: Unpack[_Options]) -> Lock: ...


@overload
def db_lock(
    key: str, second: str, /, *more: str, **options: Unpack[_Options]
) -> Lock: ...


@overload
def db_lock(
    key: Callable[..., str], **options: Unpack[_Options]
) -> LockDecorator[Never]: ...


def db_lock(key: Any, *more: str, using: str = DEFAULT_ALIAS, **options: Any) -> Any:
    """Return a lock on one key or on several.

        with db_lock("stock:7") as hold:
            ...

        @db_lock("report:{region}")
        def build_report(region):
            ...

    Several keys are all acquired or none. Their order does not matter, and no two
    callers ever wait for each other.

    ``using`` is an alias of the DLOCKS setting. All durations are seconds or a
    ``timedelta``. The other options are the policy:

    ``timeout``
        How long to wait. ``None`` is no limit, and ``0`` is not to wait. The default
        comes from the settings (10).
    ``ttl``
        How long the lease outlives its last renewal. The default comes from the
        settings (30). For a node that died, this is ShedLock's ``lockAtMostFor``.
    ``max_hold``
        How long the lease is renewed at most (``lockAtMostFor`` for a live node).
    ``min_hold``
        How long the key stays taken after this acquisition, even if the work ends
        sooner (``lockAtLeastFor``). If one caller acquires it several times, the
        longest rest counts.
    ``reentrant``
        Whether the same thread or task may enter again. Otherwise the key is busy for
        it too, and LockTimeout is raised at once, since the wait would not end.
    ``renew``
        Whether the lease is renewed in the background while it is held.
    ``scope``
        ``"lease"``, ``"transaction"``, or ``None`` for the transaction if the caller is
        in one, and else a lease.
    ``takeover``
        Whether to take over a lease that the last holder never released. Otherwise
        LockStale is raised.
    ``fair``
        Whether to wait in the queue. Otherwise the key is acquired as soon as it is
        free, also before the callers in the queue.
    ``release_at``
        When to release a lease that is left inside an open transaction: at the end of
        that ``"transaction"``, or at the ``"exit"`` of the block.
    ``on_lost``
        Called with the hold when it is lost, perhaps in another thread. It may acquire
        the key again.
    ``note``
        What the work is, for people: the last part of the holder in errors, lists, the
        admin and the history.
    ``busy``
        What a decorated call does when the key is busy: ``"raise"`` LockTimeout,
        ``"skip"`` the work and return None, or return the result of a function. The
        function gets the LockTimeout and the call's arguments.

    In a decorator, the fields of the key are the arguments of the call, and the key may
    be a function of them. In a ``with`` block, braces are ordinary characters.

    A wrong key or option raises TypeError or ValueError before any request.
    """
    if more:
        refuse_unknown(
            "db_lock() of several keys",
            options,
            KEYS,
            busy="A decorator takes the lock on one key.",
        )
        return Lock.on_keys((key, *more), using=using, **options)
    if options:
        refuse_unknown("db_lock()", options, KEY)
    if callable(key) or "busy" in options:
        refuse_bare("db_lock", key)
        return LockDecorator(key, using=using, **options)
    return Lock(key=key, using=using, **options)


def db_rwlock(
    key: str, *, using: str = DEFAULT_ALIAS, **options: Unpack[LockOptions]
) -> ReadWriteLock:
    """Return the read-write lock on ``key``.

    Use it as in ``with db_rwlock("catalogue").read()``. The options are those of
    ``db_lock``. ``write()`` returns ``db_lock(key)`` itself, so the two exclude each
    other.
    """
    policy: dict[str, Any] = {**options}
    refuse_unknown("db_rwlock()", policy, LOCK)
    return ReadWriteLock(Lock(key=key, using=using, **policy))


def db_semaphore(
    key: str,
    permits: int,
    *,
    using: str = DEFAULT_ALIAS,
    **options: Unpack[LockOptions],
) -> Lock:
    """Return a semaphore: a lock that up to ``permits`` callers hold at once.

    Each holder has a token and a lease of its own.

    ``permits`` applies to new callers, not to current holders. After the number has
    been lowered, no caller is admitted until enough holders have released. The options
    are those of ``db_lock``. With ``reentrant=False`` a caller that acquires again
    takes another permit. ``db_lock(key)`` excludes all holders of the semaphore.
    """
    policy: dict[str, Any] = {**options}
    refuse_unknown("db_semaphore()", policy, LOCK)
    return Lock(key=key, using=using, shared=True, permits=permits, **policy)
