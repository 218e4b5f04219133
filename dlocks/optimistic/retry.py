"""A decorator that retries a transaction after a conflict with another one."""

from __future__ import annotations

import functools
import inspect
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connections, transaction

from dlocks.exceptions import StaleVersion
from dlocks.runtime import clock
from dlocks.sql.engines import sqlstate_of
from dlocks.transactions import TransactionMarker, open_connections, why_end_is_unknown
from dlocks.values import Duration, check_count, seconds

F = TypeVar("F", bound=Callable[..., Any])


def retry_on_conflict(
    attempts: int = 5,
    backoff: Duration = 0.05,
    jitter: bool = True,
    *,
    max_backoff: Duration = 2.0,
    using: str = DEFAULT_DB_ALIAS,
) -> Callable[[F], F]:
    """Run the function in a transaction, and retry it in a new one on conflict.

    The transaction is on the database ``using``. A conflict is a StaleVersion, a
    deadlock or a serialization failure. A lock-wait timeout is not retried, since there
    is no reason to expect success.

    The pause before the n-th retry is at most ``backoff * 2 ** (n - 1)``, and never
    more than ``max_backoff``. Both are seconds or a ``timedelta``. With ``jitter``, the
    pause is a random part of that. The error of the last attempt is raised with a note.

    The body of a coroutine function is retried as a whole. It manages its own
    transactions, as Django has none for coroutines. Raise RuntimeError inside an open
    atomic block, where another attempt could not see new data.
    """
    if callable(attempts):
        raise TypeError("Write @retry_on_conflict() with parentheses.")
    check_count("attempts", attempts)
    first = seconds("backoff", backoff)
    limit = seconds("max_backoff", max_backoff)

    def decorate(function: F) -> F:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(
            function
        ):
            raise TypeError(
                "A generator cannot be retried, because the caller already has the"
                " yielded values."
            )
        name = getattr(function, "__qualname__", repr(function))

        def delay(attempt: int, began: float, error: Exception) -> float:
            """Return the seconds to wait after a failed attempt, or raise its error."""
            if not is_conflict(error):
                raise error
            if attempt == attempts:
                if attempts > 1:
                    took = clock.real_now() - began
                    error.add_note(
                        f"{name} failed in all {attempts} attempts, within"
                        f" {took:.2f} s."
                    )
                raise error
            longest = min(limit, first * 2 ** min(attempt - 1, 60))
            return random.uniform(0, longest) if jitter else longest  # noqa: S311

        if iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                await sync_to_async(_refuse_open_transactions)(name, None)
                began, attempt = clock.real_now(), 0
                while True:
                    attempt += 1
                    try:
                        return await function(*args, **kwargs)
                    except Exception as error:  # noqa: BLE001 (delay() raises all errors but conflicts)
                        pause = delay(attempt, began, error)
                    await clock.asleep(pause)

            return cast("F", run_async)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            _refuse_open_transactions(name, using)
            began, attempt = clock.real_now(), 0
            while True:
                attempt += 1
                marker = None
                try:
                    with transaction.atomic(using=using):
                        marker = TransactionMarker.before_callbacks(
                            transaction.get_connection(using)
                        )
                        result = function(*args, **kwargs)
                        if inspect.iscoroutine(result):
                            result.close()
                            raise TypeError(
                                f"{name} returned a coroutine, which would run after"
                                " the transaction. Make it an 'async def', or mark it"
                                " with asgiref.sync.markcoroutinefunction()."
                            )
                        return result
                except Exception as error:
                    if marker is not None and marker.committed:
                        # A callback of on_commit() raised it.
                        raise
                    pause = delay(attempt, began, error)
                time.sleep(pause)

        return cast("F", run)

    return decorate


def is_conflict(error: BaseException) -> bool:
    """Return whether the error is a conflict that may not occur in a retry."""
    if isinstance(error, StaleVersion):
        return True
    if not isinstance(error, DatabaseError):
        return False
    cause = error.__cause__
    return (
        # PostgreSQL: serialization_failure, deadlock_detected.
        sqlstate_of(error) in {"40001", "40P01"}
        # MySQL and MariaDB: a deadlock; a row that has changed since the snapshot.
        or (bool(error.args) and error.args[0] in {1213, 1020})
        # SQLITE_BUSY_SNAPSHOT: a row that has changed since the snapshot.
        or getattr(cause, "sqlite_errorcode", None) == 517
    )


def _refuse_open_transactions(name: str, using: str | None) -> None:
    opened = [connection.alias for connection in open_connections()]
    if (
        using is not None
        and not connections[using].get_autocommit()
        and why_end_is_unknown(connections[using]) is not None
    ):
        opened.append(using)
    if opened:
        raise RuntimeError(
            f"{name} retries a whole transaction, but was called inside an open one on"
            f" {opened[0]!r}, where a retry could not see new data. Put"
            " retry_on_conflict() around the outermost transaction."
        )
