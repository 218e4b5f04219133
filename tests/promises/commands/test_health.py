"""The command dlocks_health, what commands say before ``migrate``, and run_locked.

The other tests of run_locked are in integrations/test_schedules.py.
"""

import io
import json
import re
import time

import pytest
from django.core.management import CommandError, call_command

from dlocks import db_lock
from dlocks.models import ResourceLock
from dlocks.testing import held_elsewhere
from tests import rows
from tests.promises.commands.running import exit_of, refused, run

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]

HEALTH = ("dlocks_health", "--using", "default")


@pytest.mark.storage
def test_a_working_alias_is_healthy(in_other_thread, monkeypatch):
    """A probe gets exit status 0, and figures as JSON.

    A limit that is exceeded and a clock that differs are problems. The lock of another
    check is none.
    """
    rows.held("stock:7")
    rows.stale("report")
    rows.waits("stock:7")
    report = json.loads(run(*HEALTH, "--json"))["default"]
    assert report["healthy"]
    assert report["problems"] == []
    assert report["round_trip_ms"] > 0
    assert abs(report["clock_skew_s"]) < 5
    counts = {"held": 1, "shared": 0, "stale": 1, "waiting": 1}
    assert report.items() >= counts.items()
    state, figures, counted = run(*HEALTH).splitlines()
    assert state == "default: healthy"
    assert re.match(r"  acquired and released in [\d.]+ ms, clocks ", figures)
    assert counted == "  1 held, 0 shared, 1 stale, 1 waiting"
    assert not db_lock("dlocks_health").locked()
    held = in_other_thread(db_lock("dlocks_health").acquire)
    for option, problem in (
        ("--max-stale", "1 stale locks, more than 0"),
        ("--max-waiting", "1 waiters, more than 0"),
    ):
        out = io.StringIO()
        call_command(*HEALTH, option, "1", stdout=out)
        with pytest.raises(CommandError, match=r"^Not healthy: default\.$"):
            call_command(*HEALTH, option, "0", stdout=out)
        assert problem in out.getvalue()
    in_other_thread(held.release)
    monkeypatch.setattr(time, "time", float)
    with pytest.raises(CommandError, match="Not healthy"):
        run(*HEALTH, "--max-clock-skew", "1m")


def test_each_alias_is_reported(settings):
    """One alias that fails does not hide the others."""
    settings.DLOCKS = {
        "default": {},
        "typo": {"OPTIONS": {"tll": 5}},
        "tenants": {"OPTIONS": {"prefix": lambda: None}},
        "memory": {"BACKEND": "dlocks.backends.memory.MemoryBackend"},
    }
    out = io.StringIO()
    with pytest.raises(CommandError, match=r"^Not healthy: typo, tenants\.$"):
        call_command("dlocks_health", "--json", stdout=out)
    reports = json.loads(out.getvalue())
    assert "'tll'" in reports["typo"]["problems"][0]
    assert "'prefix'] returned None" in reports["tenants"]["problems"][0]
    for command in (("list_locks",), ("clear_lock", "a"), ("reap_locks",)):
        assert "'prefix'] returned None" in refused(*command, "--using", "tenants")
    assert list(reports["memory"]) == ["healthy", "round_trip_ms", "problems"]
    with pytest.raises(CommandError, match="Not healthy: nonsense"):
        run("dlocks_health", "--using", "nonsense")


@pytest.mark.storage
def test_a_missing_table_is_an_error(caplog):
    """Before ``migrate`` every command says once, in one line, what to run."""
    fix = "Run 'manage.py migrate dlocks --database default'."
    with rows.without_table(ResourceLock):
        for command in (("list_locks",), ("clear_lock", "a"), ("reap_locks",)):
            message = refused(*command)
            assert message.startswith("Database 'default' is not migrated (")
            assert "dlocks_resourcelock" in message
            assert message.endswith(f"). {fix}"), command
        caplog.clear()
        with pytest.raises(CommandError, match=fix):
            call_command("run_locked", "backup", command=["true"])
        assert caplog.messages == []
        out = io.StringIO()
        with pytest.raises(CommandError, match="Not healthy: default"):
            call_command(*HEALTH, stdout=out)
        assert "manage.py migrate dlocks --database default" in out.getvalue()


def test_a_busy_key_prints_nothing_at_verbosity_0(capfd):
    """Cron would mail it. The status is 75 in any case, and errors are printed."""
    run = "--", "echo", "ran"
    with held_elsewhere("sync"):
        assert exit_of("sync", "-v", "0", *run) == 75
        assert capfd.readouterr() == ("", "")
        assert exit_of("sync", *run) == 75
        out, err = capfd.readouterr()
        assert (out, "held by elsewhere" in err) == ("", True)
        with pytest.raises(CommandError) as caught:
            call_command("run_locked", "sync", command=["echo", "ran"])
        assert caught.value.returncode == 75
    call_command("run_locked", "sync", command=["echo", "ran"], verbosity=0)
    assert capfd.readouterr() == ("ran\n", "")
    assert exit_of("sync", "-v", "0", "--", "/nowhere/to/be/found") == 127
    assert "/nowhere/to/be/found" in capfd.readouterr().err
