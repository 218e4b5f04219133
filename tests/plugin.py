"""The plugin of pytest that gives each process of the tests a server of its own.

tests/run.py loads it, and names the engine in DLOCKS_TEST_ENGINE. The server is started
by the process that runs tests. With pytest-xdist, this is each worker. The process that
distributes the tests only prepares the data that the servers of its workers copy.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile

import pytest

from tests.run import stacks_file
from tests.servers import SERVERS, Server

_server: Server | None = None
# tests/run.py aborts a run that does not end, and asks for the stacks. faulthandler
# writes each part of a line by itself. Processes that share a pipe would mix them.
faulthandler.register(signal.SIGUSR2, file=stacks_file(os.getpid()).open("w"))


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config):
    """Start a server before pytest-django reads the settings."""
    global _server
    engine = os.environ["DLOCKS_TEST_ENGINE"]
    options = early_config.known_args_namespace
    distributes = bool(options.numprocesses) and not is_worker()
    try:
        if engine in SERVERS:
            SERVERS[engine].prepare()
            if not distributes:
                _server = SERVERS[engine]().__enter__()
                os.environ.update(_server.environment)
    except (FileNotFoundError, RuntimeError) as error:
        raise pytest.UsageError(f"{engine} could not be started: {error}") from error
    if not distributes:
        os.environ["DLOCKS_TEST_DIRECTORY"] = tempfile.mkdtemp(prefix="dlocks-tests-")
    return (yield)


def is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_unconfigure():
    if _server is not None:
        _server.__exit__()


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_handlecrashitem(report):
    """Let the crash of a worker be a failure.

    pytest-rerunfailures would run the test again, whatever the reason of the crash.
    """
    yield
    report.outcome = "failed"
