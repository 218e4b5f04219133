"""What tests of elections share."""

import queue

import pytest

from dlocks import LeaderElection


@pytest.fixture
def elections():
    """Return a function that creates elections and stops them after the test."""
    made = []

    def make(name="scheduler", **options):
        made.append(LeaderElection(name, **{"using": "memory", **options}))
        return made[-1]

    yield make
    for one in made:
        assert one.stop(10)


@pytest.fixture
def heard():
    return queue.SimpleQueue()


def telling(heard, who):
    return {
        "on_elected": lambda hold: heard.put((who, "elected", hold)),
        "on_deposed": lambda hold: heard.put((who, "deposed", hold)),
    }


def next_of(heard):
    who, what, hold = heard.get(timeout=20)
    return f"{who} {what}", hold


def fail(hold):
    raise ZeroDivisionError("on purpose")
