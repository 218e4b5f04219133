"""Log lines, warnings about slow locks, and OpenTelemetry metrics and spans."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dlocks.conf import backends
from dlocks.signals import End, Watcher, watchers
from dlocks.version import __version__

try:
    from opentelemetry import metrics, trace
except ImportError:
    HAS_OPENTELEMETRY = False
else:
    HAS_OPENTELEMETRY = True

if TYPE_CHECKING:
    from dlocks.core.hold import Hold
    from dlocks.core.policy import LockPolicy
    from dlocks.values import Holder

# A logger of its own, so that a formatter can rely on the fields of its records.
logger = logging.getLogger("dlocks.access")

# Histogram boundaries in seconds, from one statement on a nearby server to a job that
# runs all night.
BOUNDARIES = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1, 2.5, 5, 10, 30, 60, 300, 1800, 7200, 28800,
)  # fmt: skip


class Log(Watcher):
    """The watcher that writes log lines.

    Their records have the fields ``lock_key``, ``lock_holder``, ``lock_token``,
    ``lock_waited`` and ``lock_held``.
    """

    def acquired(self, hold: Hold) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            who = hold.claim.holder
            message = "%r acquired by %s, token %d, waited %.3f s"
            logger.debug(
                message, hold.key, who, hold.token, hold.waited, extra=_fields(hold)
            )
        if hold.takeover:
            message = (
                "%r was taken over by %s, token %d: its last holder never released it"
            )
            logger.warning(
                message, hold.key, hold.claim.holder, hold.token, extra=_fields(hold)
            )
        slow = hold.backend.slow_wait
        if slow is not None and hold.waited >= slow:
            self._slow_wait(slow, f"acquired by {hold.claim.holder}", _fields(hold))

    def ended(self, hold: Hold, how: End) -> None:
        slow = hold.backend.slow_hold
        debugged = logger.isEnabledFor(logging.DEBUG)
        if slow is None and not debugged:
            return
        held, who = hold.age, hold.claim.holder
        if debugged:
            message = "%r %s by %s, token %d, waited %.3f s, held %.3f s"
            logger.debug(
                message,
                hold.key,
                how,
                who,
                hold.token,
                hold.waited,
                held,
                extra=_fields(hold, held),
            )
        if slow is not None and held >= slow:
            message = (
                "%r was held for %.3f s by %s, token %d, longer than slow_hold (%g s)"
            )
            logger.warning(
                message,
                hold.key,
                held,
                who,
                hold.token,
                slow,
                extra=_fields(hold, held),
            )

    def timed_out(self, lock: LockPolicy, holder: Holder | None, waited: float) -> None:
        fields = {
            "lock_key": lock.key,
            "lock_holder": holder.holder if holder is not None else "",
            "lock_token": holder.token if holder is not None else None,
            "lock_waited": waited,
            "lock_held": None,
        }
        who = f"held by {holder}" if holder is not None else "holder unknown"
        logger.debug(
            "%r not acquired, waited %.3f s, %s", lock.key, waited, who, extra=fields
        )
        slow = backends[lock.using].slow_wait
        if slow is not None and waited >= slow:
            self._slow_wait(slow, f"not acquired, {who}", fields)

    def _slow_wait(self, slow: float, what: str, fields: Mapping[str, Any]) -> None:
        logger.warning(
            "%r: a caller waited %.3f s, longer than slow_wait (%g s): %s",
            fields["lock_key"],
            fields["lock_waited"],
            slow,
            what,
            extra=fields,
        )


class OpenTelemetry(Watcher):
    """The watcher that records histograms, counters and spans.

    It uses only OpenTelemetry's API. Without an SDK nothing is recorded.
    """

    def __init__(self) -> None:
        meter = metrics.get_meter("dlocks", __version__)
        self._tracer = trace.get_tracer("dlocks", __version__)
        self._spans: WeakKeyDictionary[Hold, trace.Span] = WeakKeyDictionary()
        self._wait, self._hold = (
            meter.create_histogram(
                name, "s", text, explicit_bucket_boundaries_advisory=BOUNDARIES
            )
            for name, text in (
                ("dlocks.wait.duration", "Time for which callers waited for a key."),
                ("dlocks.hold.duration", "Time for which keys were held."),
            )
        )
        self._contentions = meter.create_counter(
            "dlocks.contentions", "{attempt}", "Attempts that found the key busy."
        )
        self._timeouts = meter.create_counter(
            "dlocks.timeouts", "{attempt}", "Attempts that timed out."
        )
        self._losses = meter.create_counter(
            "dlocks.losses", "{hold}", "Holds that were lost."
        )
        self._takeovers = meter.create_counter(
            "dlocks.takeovers", "{hold}", "Holds that took over an expired lease."
        )

    def acquired(self, hold: Hold) -> None:
        attributes = self._attributes(hold.lock, hold.scope)
        self._wait.record(hold.waited, {**attributes, "dlocks.outcome": "acquired"})
        if hold.waited:
            self._contentions.add(1, attributes)
        if hold.takeover:
            self._takeovers.add(1, attributes)
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            # Without an SDK spans are discarded, and creating one costs more than the
            # rest of this method.
            return
        if hold.waited:
            self._span(
                "dlocks.wait", hold.lock, hold.waited, {"dlocks.token": hold.token}
            ).end()
        self._spans[hold] = self._span(
            "dlocks.hold",
            hold.lock,
            0.0,
            {"dlocks.token": hold.token, "dlocks.takeover": hold.takeover},
        )

    def ended(self, hold: Hold, how: End) -> None:
        attributes = self._attributes(hold.lock, hold.scope)
        self._hold.record(hold.age, {**attributes, "dlocks.outcome": how})
        span = self._spans.pop(hold, None)
        if how == "lost":
            self._losses.add(1, attributes)
            if span is not None:
                span.set_status(trace.StatusCode.ERROR, "lost")
        if span is not None:
            span.set_attribute("dlocks.outcome", how)
            span.end()

    def timed_out(self, lock: LockPolicy, holder: Holder | None, waited: float) -> None:
        attributes = self._attributes(lock)
        self._wait.record(waited, {**attributes, "dlocks.outcome": "timeout"})
        self._contentions.add(1, attributes)
        self._timeouts.add(1, attributes)
        if waited:
            span = self._span(
                "dlocks.wait",
                lock,
                waited,
                {"dlocks.holder": holder.holder if holder else ""},
            )
            span.set_status(trace.StatusCode.ERROR, "timeout")
            span.end()

    def _attributes(self, lock: LockPolicy, scope: str | None = None) -> dict[str, str]:
        # The number of different keys is unlimited, and one time series for each would
        # overload a metrics store.
        group, colon, _rest = lock.key.partition(":")
        attributes = {
            "dlocks.alias": lock.using,
            "dlocks.group": group if colon else "",
        }
        return attributes if scope is None else {**attributes, "dlocks.scope": scope}

    def _span(
        self, name: str, lock: LockPolicy, ago: float, attributes: Mapping[str, Any]
    ) -> trace.Span:
        began = time.time_ns() - round(ago * 1e9)
        attributes = {"dlocks.key": lock.key, "dlocks.alias": lock.using, **attributes}
        return self._tracer.start_span(name, start_time=began, attributes=attributes)


def _fields(hold: Hold, held: float | None = None) -> dict[str, Any]:
    return {
        "lock_key": hold.key,
        "lock_holder": hold.claim.holder,
        "lock_token": hold.token,
        "lock_waited": hold.waited,
        "lock_held": held,
    }


watchers.append(Log())
if HAS_OPENTELEMETRY:
    watchers.append(OpenTelemetry())
