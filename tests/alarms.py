"""Signals that strike at random moments."""

from __future__ import annotations

import gc
import random
import signal

import pytest


class Alarm:
    """A signal handler that raises an error at a random moment while armed."""

    class TimeIsUpError(BaseException):
        pass

    def __init__(self):
        self._armed = False

    def arm(self, longest=0.000_060):
        self._armed = True
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.000_001, longest))

    def disarm(self):
        # The system may have sent the signal already, even to another thread. Python
        # calls the handler later.
        self._armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def __call__(self, *_):
        if self._armed:
            self._armed = False
            raise self.TimeIsUpError


@pytest.fixture
def alarm():
    alarm = Alarm()
    # An error that is raised during garbage collection is ignored. Hypothesis runs
    # Python code at that time.
    gc.disable()
    before = signal.signal(signal.SIGALRM, alarm)
    yield alarm
    alarm.disarm()
    signal.signal(signal.SIGALRM, before)
    gc.enable()
