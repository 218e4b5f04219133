"""Run a command as an operator does, and answer its question."""

import io
import json
import sys

import pytest
from django.core.management import CommandError, call_command, load_command_class


def run(*args, **options) -> str:
    out = io.StringIO()
    call_command(*args, stdout=out, no_color=True, **options)
    return out.getvalue()


def lines(*args) -> list[str]:
    """Return the first word of each line below the header."""
    return [line.split()[0] for line in run(*args).splitlines()[1:]]


def listed(*args):
    """Return what ``list_locks --json`` says, by key."""
    return {
        lock["key"]: lock for lock in json.loads(run("list_locks", "--json", *args))
    }


def refused(*args) -> str:
    """Return the error of a command, which is one line."""
    with pytest.raises(CommandError) as caught:
        run(*args)
    assert "\n" not in str(caught.value).strip()
    return str(caught.value)


def exit_of(*args) -> int:
    """Run ``run_locked`` in this process, and return its exit status."""
    command = load_command_class("dlocks", "run_locked")
    with pytest.raises(SystemExit) as caught:
        command.run_from_argv(["manage.py", "run_locked", *args])
        raise SystemExit(0)
    return caught.value.code


@pytest.fixture(autouse=True)
def without_terminal(monkeypatch):
    """Run commands without a terminal, as cron does."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def answer(monkeypatch):
    """Return a function that simulates a terminal with a given answer.

    That function returns the list of the questions.
    """

    def sit(reply, before=lambda: None):
        asked = []

        def ask(question):
            asked.append(question)
            before()
            if isinstance(reply, BaseException):
                raise reply
            return reply

        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        monkeypatch.setattr("builtins.input", ask)
        return asked

    return sit
