"""An OpenTelemetry SDK for the tests of metrics and spans."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.internals import signals, telemetry


@pytest.fixture
def sdk(monkeypatch):
    """Install an OpenTelemetry SDK for one test."""
    meters = MeterProvider([reader := InMemoryMetricReader()])
    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter := InMemorySpanExporter()))
    monkeypatch.setattr(metrics, "get_meter", meters.get_meter)
    monkeypatch.setattr(trace, "get_tracer", tracers.get_tracer)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: tracers)
    monkeypatch.setattr(
        signals, "watchers", [telemetry.Log(), telemetry.OpenTelemetry()]
    )
    reader.spans = exporter.get_finished_spans
    yield reader
    meters.shutdown()
    tracers.shutdown()


@pytest.fixture
def measured(sdk):
    """Return a function that returns the points of an instrument.

    Its result maps attributes to the sum or the count of the points.
    """

    def points(name, *attributes):
        data, found = sdk.get_metrics_data(), Counter()
        scopes = data.resource_metrics[0].scope_metrics if data else ()
        for metric in itertools.chain.from_iterable(scope.metrics for scope in scopes):
            for point in metric.data.data_points if metric.name == name else ():
                place = [point.attributes.get(f"dlocks.{one}") for one in attributes]
                number = point.count if hasattr(point, "count") else point.value
                found[tuple(place)] += number
        return found

    return points


@pytest.fixture
def spans(sdk):
    """Return a function that returns the ended spans with a name."""
    return lambda name: [span for span in sdk.spans() if span.name == name]
