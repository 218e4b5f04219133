"""Log lines, warnings about slow locks, and OpenTelemetry metrics and spans."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dlocks.conf import backends
from dlocks.signals import Event, watchers
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


class Log:
    """The watcher that writes log lines.

    Their records have the fields ``lock_key``, ``lock_holder``, ``lock_token``,
    ``lock_waited`` and ``lock_held``.
    """

    def acquired(self, event: Event, hold: Hold) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            _log(
                logging.DEBUG,
                "%(lock_key)r acquired by %(lock_holder)s, token %(lock_token)d, waited"
                " %(lock_waited).3f s",
                _fields(hold),
            )
        if hold.takeover:
            _log(
                logging.WARNING,
                "%(lock_key)r was taken over by %(lock_holder)s, token %(lock_token)d:"
                " its last holder never released it",
                _fields(hold),
            )
        slow = hold.backend.slow_wait
        if slow is not None and hold.waited >= slow:
            _slow_wait(slow, f"acquired by {hold.claim.holder}", _fields(hold))

    def ended(self, event: Event, hold: Hold) -> None:
        slow = hold.backend.slow_hold
        debugged = logger.isEnabledFor(logging.DEBUG)
        if slow is None and not debugged:
            return
        held = hold.age
        fields = {**_fields(hold), "lock_held": held}
        if debugged:
            _log(
                logging.DEBUG,
                "%(lock_key)r %(event)s by %(lock_holder)s, token %(lock_token)d,"
                " waited %(lock_waited).3f s, held %(lock_held).3f s",
                fields,
                event=event,
            )
        if slow is not None and held >= slow:
            _log(
                logging.WARNING,
                "%(lock_key)r was held for %(lock_held).3f s by %(lock_holder)s, token"
                " %(lock_token)d, longer than slow_hold (%(slow)g s)",
                fields,
                slow=slow,
            )

    released = lost = detached = ended

    def timed_out(
        self, event: Event, lock: LockPolicy, holder: Holder | None, waited: float
    ) -> None:
        fields = {
            "lock_key": lock.key,
            "lock_holder": holder.holder if holder is not None else "",
            "lock_token": holder.token if holder is not None else None,
            "lock_waited": waited,
            "lock_held": None,
        }
        who = f"held by {holder}" if holder is not None else "holder unknown"
        message = "%(lock_key)r not acquired, waited %(lock_waited).3f s, %(who)s"
        _log(logging.DEBUG, message, fields, who=who)
        slow = backends[lock.using].slow_wait
        if slow is not None and waited >= slow:
            _slow_wait(slow, f"not acquired, {who}", fields)


def _fields(hold: Hold) -> dict[str, Any]:
    return {
        "lock_key": hold.key,
        "lock_holder": hold.claim.holder,
        "lock_token": hold.token,
        "lock_waited": hold.waited,
        "lock_held": None,
    }


def _slow_wait(slow: float, what: str, fields: dict[str, Any]) -> None:
    _log(
        logging.WARNING,
        "%(lock_key)r: a caller waited %(lock_waited).3f s, longer than slow_wait"
        " (%(slow)g s): %(what)s",
        fields,
        slow=slow,
        what=what,
    )


def _log(level: int, message: str, fields: dict[str, Any], **more: Any) -> None:
    logger.log(level, message, {**fields, **more}, extra=fields)


class OpenTelemetry:
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
        self._contentions, self._timeouts, self._losses, self._takeovers = (
            meter.create_counter(f"dlocks.{name}", unit, text)
            for name, unit, text in (
                ("contentions", "{attempt}", "Attempts that found the key busy."),
                ("timeouts", "{attempt}", "Attempts that timed out."),
                ("losses", "{hold}", "Holds that were lost."),
                ("takeovers", "{hold}", "Holds that took over an expired lease."),
            )
        )

    def acquired(self, event: Event, hold: Hold) -> None:
        attributes = self._attributes(hold.lock, hold.scope)
        self._wait.record(hold.waited, {**attributes, "dlocks.outcome": event})
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

    def ended(self, event: Event, hold: Hold) -> None:
        attributes = self._attributes(hold.lock, hold.scope)
        self._hold.record(hold.age, {**attributes, "dlocks.outcome": event})
        span = self._spans.pop(hold, None)
        if event == "lost":
            self._losses.add(1, attributes)
            if span is not None:
                span.set_status(trace.StatusCode.ERROR, "lost")
        if span is not None:
            span.set_attribute("dlocks.outcome", event)
            span.end()

    released = lost = detached = ended

    def timed_out(
        self, event: Event, lock: LockPolicy, holder: Holder | None, waited: float
    ) -> None:
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


watchers.append(Log())
if HAS_OPENTELEMETRY:
    watchers.append(OpenTelemetry())
