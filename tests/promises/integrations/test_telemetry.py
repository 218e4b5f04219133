"""Logs, metrics and spans of locks, as in docs/how-to/metrics.md."""

from __future__ import annotations

import io
import json
import logging
import re
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from django.core.management import call_command
from django.db import transaction
from django.test import override_settings
from opentelemetry import trace

from dlocks import LockLost, LockTimeout, db_lock, resume_hold
from dlocks.testing import abandoned, held_elsewhere, lose
from tests import pages
from tests.otel import measured, sdk, spans
from tests.scripts import run_python

pytestmark = pytest.mark.front

__all__ = ["measured", "sdk", "spans"]

ROOT = Path(__file__).parent.parent.parent.parent
CONTRIB = ROOT / "contrib"
STUCK_LOCKS = CONTRIB / "prometheus" / "stuck_locks.jq"
DUMMY = "dlocks.backends.dummy.DummyBackend"

database = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def installed(sdk):
    """Install an OpenTelemetry SDK for each test."""


# Log lines.


@pytest.mark.usefixtures("memory_locks")
def test_a_hold_is_logged_with_key_holder_token_waited_and_held(
    caplog, frozen_lock_clock
):
    """A takeover is a warning. Without thresholds nothing is slow."""
    with db_lock("stock:7"):
        frozen_lock_clock.tick(9)
    assert not caplog.records
    abandoned("stock:8")
    with db_lock("stock:8"):
        pass
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "'stock:8' was taken over by" in record.getMessage()
    caplog.clear()
    caplog.set_level(logging.DEBUG, "dlocks.access")
    with db_lock("stock:7") as hold:
        frozen_lock_clock.tick(2.5)
    got, gave = caplog.records
    who = f"by {hold.claim.holder}, token {hold.token}, waited 0.000 s"
    assert got.getMessage() == f"'stock:7' acquired {who}"
    assert gave.getMessage() == f"'stock:7' released {who}, held 2.500 s"
    facts = (gave.lock_key, gave.lock_holder, gave.lock_token)
    assert facts == ("stock:7", hold.claim.holder, hold.token)
    assert (got.lock_waited, got.lock_held, gave.lock_held) == (0.0, None, 2.5)
    caplog.clear()
    with held_elsewhere("stock:7", holder="web-2:1:x"), suppress(LockTimeout):
        db_lock("stock:7", timeout=2).acquire()
    (late,) = caplog.records
    start = "'stock:7' not acquired, waited 2.000 s, held by web-2:1:x"
    assert late.getMessage().startswith(start)
    assert (late.lock_holder, late.lock_waited) == ("web-2:1:x", pytest.approx(2))


def slow(**options):
    memory = "dlocks.backends.memory.MemoryBackend"
    default = {"BACKEND": memory, "OPTIONS": options}
    return override_settings(DLOCKS={"default": default})


@slow(slow_hold=2)
def test_a_slow_hold_is_a_warning_and_a_quicker_one_is_not(caplog, frozen_lock_clock):
    """A slow hold that is lost is one too."""
    for seconds in (1.9, 2.0):
        with db_lock("stock:7") as hold:
            frozen_lock_clock.tick(seconds)
    # The keeper may have logged a warning before the end.
    (record,) = (one for one in caplog.records if one.name == "dlocks.access")
    held = f"'stock:7' was held for 2.000 s by {hold.claim.holder}, token {hold.token}"
    assert record.getMessage() == f"{held}, longer than slow_hold (2 s)"
    with suppress(LockLost), db_lock("stock:7") as hold:
        frozen_lock_clock.tick(3)
        lose(hold)
    assert "was held for 3.000 s" in caplog.text


@slow(slow_wait=2)
def test_a_slow_wait_is_a_warning_whether_or_not_it_got_the_key(
    caplog, frozen_lock_clock
):
    with held_elsewhere("stock:7", holder="web-2:1:x"):
        for timeout in (1.9, 2):
            with suppress(LockTimeout):
                db_lock("stock:7", timeout=timeout).acquire()
    (record,) = caplog.records
    said = "'stock:7': a caller waited 2.000 s, longer than slow_wait (2 s): not"
    assert record.getMessage().startswith(f"{said} acquired, held by web-2")
    caplog.clear()
    with held_elsewhere("stock:7", ttl=5), db_lock("stock:7", timeout=10) as hold:
        assert hold.waited > 5
    assert "'stock:7': a caller waited 5." in caplog.text
    assert "slow_wait (2 s): acquired by" in caplog.text


# Metrics.


@pytest.mark.usefixtures("memory_locks")
def test_waits_and_holds_are_measured_by_group_and_scope(
    measured, frozen_lock_clock, sdk
):
    for key in ("stock:7", "stock:8", "report"):
        with db_lock(key):
            frozen_lock_clock.tick(3)
    assert measured("dlocks.wait.duration", "group", "scope", "outcome", "alias") == {
        ("stock", "lease", "acquired", "default"): 2,
        ("", "lease", "acquired", "default"): 1,
    }
    found = measured("dlocks.hold.duration", "group", "outcome")
    assert found == {("stock", "released"): 2, ("", "released"): 1}
    (scope,) = sdk.get_metrics_data().resource_metrics[0].scope_metrics
    (hold,) = [one for one in scope.metrics if one.name == "dlocks.hold.duration"]
    assert hold.unit == "s"
    assert sum(point.sum for point in hold.data.data_points) == pytest.approx(9)
    assert hold.data.data_points[0].explicit_bounds[0] == 0.001


@pytest.mark.usefixtures("memory_locks")
def test_contention_timeouts_losses_and_takeovers_are_counted(
    measured, frozen_lock_clock
):
    with held_elsewhere("stock:7"):
        for timeout in (0, 2):
            with suppress(LockTimeout):
                db_lock("stock:7", timeout=timeout).acquire()
    assert measured("dlocks.timeouts", "group") == {("stock",): 2}
    with held_elsewhere("stock:7", ttl=1), db_lock("stock:7"):
        pass
    assert measured("dlocks.contentions", "group") == {("stock",): 3}
    assert measured("dlocks.takeovers", "group") == {("stock",): 1}
    with suppress(LockLost), db_lock("stock:7") as hold:
        lose(hold)
    assert measured("dlocks.losses", "group") == {("stock",): 1}
    resume_hold(db_lock("stock:7").acquire().detach()).release()
    found = measured("dlocks.hold.duration", "outcome")
    assert found == {("released",): 2, ("lost",): 1, ("detached",): 1}


@pytest.mark.storage
@database
def test_only_takeovers_are_counted_as_takeovers(measured):
    takeovers, holds = Counter(), Counter()
    for using in ("default", "optimistic", "insert"):
        for _ in range(2):
            with db_lock("stock:7", using=using):
                pass
        assert measured("dlocks.takeovers", "scope") == takeovers, using
        abandoned("stock:7", using=using)
        with db_lock("stock:7", using=using):
            pass
        abandoned("stock:7", using=using)
        with transaction.atomic(), db_lock("stock:7", using=using):
            pass
        with db_lock("stock:7", using=using):
            pass
        takeovers.update({("lease",): 1, ("transaction",): 1})
        holds.update({("lease",): 4, ("transaction",): 1})
        assert measured("dlocks.takeovers", "scope") == takeovers, using
        assert measured("dlocks.hold.duration", "scope") == holds, using


# Spans.


@pytest.mark.usefixtures("memory_locks")
def test_holds_and_waits_are_child_spans(spans, frozen_lock_clock):
    """Losses and timeouts are errors of their spans."""
    tracer = trace.get_tracer("test")
    with (
        tracer.start_as_current_span("request") as request,
        held_elsewhere("stock:7", ttl=1),
        db_lock("stock:7") as hold,
    ):
        assert not spans("dlocks.hold")
    (wait,), (held,) = spans("dlocks.wait"), spans("dlocks.hold")
    for span in (wait, held):
        assert span.parent.span_id == request.get_span_context().span_id
        assert span.attributes["dlocks.key"] == "stock:7"
        assert span.attributes["dlocks.token"] == hold.token
    seconds = (wait.end_time - wait.start_time) / 1e9
    assert seconds == pytest.approx(hold.waited, abs=0.5)
    assert held.attributes["dlocks.takeover"] is True
    assert held.attributes["dlocks.outcome"] == "released"
    with suppress(LockLost), db_lock("stock:8") as hold:
        lose(hold)
    with held_elsewhere("stock:8"), suppress(LockTimeout):
        db_lock("stock:8", timeout=2).acquire()
    (_, lost), (_, late) = spans("dlocks.hold"), spans("dlocks.wait")
    for span, description in ((lost, "lost"), (late, "timeout")):
        status = span.status
        assert status.status_code == trace.StatusCode.ERROR
        assert status.description == description
    assert late.attributes["dlocks.holder"] == "elsewhere:1:MainThread"


# Without OpenTelemetry.


def test_locks_work_without_opentelemetry():
    code = """
import sys
sys.modules["opentelemetry"] = None
from django.conf import settings
settings.configure(
    DLOCKS={"default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}},
    INSTALLED_APPS=["dlocks"],
)
import django; django.setup()
from dlocks import db_lock, signals, telemetry
with db_lock("stock:7"):
    names = [type(watcher).__name__ for watcher in signals.watchers]
    print(telemetry.HAS_OPENTELEMETRY, names)
"""
    assert run(code) == "False ['History', 'Log']\n"


def run(code):
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


# The examples of the page.


def test_the_documented_log_formatter_works(memory_locks):
    import logging.config

    page = pages.run("how-to/metrics", only=2)
    assert page.DLOCKS["default"]["OPTIONS"] == {"slow_wait": 1, "slow_hold": 30}
    out = io.StringIO()
    page.LOGGING["handlers"]["locks"]["stream"] = out
    logger = logging.getLogger("dlocks.access")
    before = logger.level, logger.propagate
    try:
        logging.config.dictConfig({**page.LOGGING, "disable_existing_loggers": False})
        with db_lock("stock:7"):
            pass
    finally:
        logger.handlers.clear()
        logger.setLevel(before[0])
        logger.propagate = before[1]
    got, gave = out.getvalue().splitlines()
    assert got.endswith("key=stock:7 waited=0.0 held=None")
    assert gave.startswith("DEBUG 'stock:7' released by")


def scrape():
    """Return what Prometheus reads after one event of each kind."""
    reader, view = pages.blocks("how-to/metrics")[2:4]
    return run(f"""
from django.conf import settings
settings.configure(
    DLOCKS={{"default": {{"BACKEND": "dlocks.backends.memory.MemoryBackend"}}}},
    INSTALLED_APPS=["dlocks"],
    ROOT_URLCONF="__main__", ALLOWED_HOSTS=["*"],
)
import django; django.setup()
from dlocks import LockLost, db_lock
from dlocks.testing import abandoned, held_elsewhere, lose
{reader}
{view}
from django.test import Client
from django.urls import path
urlpatterns = [path("metrics", scrape)]
with db_lock("stock:7"):
    pass
with held_elsewhere("stock:7"):
    assert db_lock("stock:7").try_acquire() is None
abandoned("stock:8")
try:
    with db_lock("stock:8"):
        lose("stock:8")
except LockLost:
    pass
print(Client().get("/metrics").content.decode())
""")


def test_the_dashboard_and_the_alerts_use_existing_metrics():
    """Names and labels are those that the documented Prometheus scrape has."""
    scraped = scrape()
    names = pages.blocks("how-to/metrics", "text")[-1].split()
    assert len(names) == 4
    for name in names:
        assert f"\n{name}" in scraped
    assert 'dlocks_group="stock"' in scraped
    (line,) = re.findall(r"^dlocks_timeouts_total.*", scraped, re.MULTILINE)
    assert line.endswith(" 1.0")
    known = set(re.findall(r"^(dlocks_\w+)\{", scraped, re.MULTILINE))
    labels = set(re.findall(r"[{,](\w+)=\"", scraped))
    board = json.loads((CONTRIB / "grafana" / "dlocks.json").read_text())
    alerts = yaml.safe_load((CONTRIB / "prometheus" / "alerts.yml").read_text())
    rules = alerts["groups"][0]["rules"]
    (pasted,) = yaml.safe_load(*pages.blocks("how-to/metrics", "yaml"))
    (rule,) = (rule for rule in rules if rule["alert"] == pasted["alert"])
    assert pasted.items() <= rule.items()
    targets = [one for panel in board["panels"] for one in panel["targets"]]
    expressions = [target["expr"] for target in targets]
    expressions += [rule["expr"] for rule in rules]
    expressions += [one["query"] for one in board["templating"]["list"][1:]]
    known |= set(re.findall(r"dlocks_\w+(?={)", STUCK_LOCKS.read_text()))
    used = set(re.findall(r"\bdlocks_\w+", " ".join(expressions)))
    assert used - labels <= known
    assert {"dlocks_losses_total", "dlocks_stale", "dlocks_waiting"} <= used
    # Each counter and each histogram is on the dashboard.
    shown = " ".join(expressions[: -len(rules)])
    for name in known:
        if name.endswith("_total"):
            assert name in shown
    for rule in rules:
        assert set(re.findall(r"\$labels\.(\w+)", str(rule))) <= labels
        assert rule["annotations"].keys() == {"summary", "description"}
        # The first event of a process alerts too, though its counter begins with 1.
        for name in re.findall(r"increase\((\w+)\[10m\]\)", rule["expr"]):
            assert f"({name} > 0 unless {name} offset 10m)" in rule["expr"]


@database
@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_stale_locks_and_waiters_are_metrics():
    """The file in contrib/ makes them of the report of the health check."""
    out = io.StringIO()
    abandoned("stock:7")
    with override_settings(DLOCKS={"default": {}, "dummy": {"BACKEND": DUMMY}}):
        call_command("dlocks_health", "--json", stdout=out)
    made = subprocess.run(
        ["jq", "-rf", STUCK_LOCKS], input=out.getvalue(), capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    assert made.stdout.splitlines() == [
        'dlocks_stale{dlocks_alias="default"} 1',
        'dlocks_waiting{dlocks_alias="default"} 0',
    ]
