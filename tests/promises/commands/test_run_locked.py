"""The output of run_locked. Its other tests are in integrations/test_schedules.py."""

import pytest
from django.core.management import CommandError, call_command

from dlocks.testing import held_elsewhere
from tests.promises.commands.running import exit_of

pytestmark = [pytest.mark.front, pytest.mark.django_db(transaction=True)]


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
