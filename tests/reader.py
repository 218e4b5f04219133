"""A plugin of pytest that runs the examples of the pages as a reader would.

Each page is a module of the app "shop" in the project of the reader.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import MagicMock

import django
from django.core.management import call_command
from django.db import connection, models
from sybil import Example, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.abstract import AbstractCodeBlockParser
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer
from sybil.typing import Evaluator


def code_blocks(language: str, evaluator: Evaluator) -> AbstractCodeBlockParser:
    """Return a parser of fenced blocks. A title may follow their language.

    Sybil's own parser does not find blocks with a title.
    """
    first_line = re.compile(r"(?P<arguments>\w+).*\n")
    return AbstractCodeBlockParser(
        [RawFencedCodeBlockLexer(first_line)], language, evaluator
    )


def prepare(namespace: dict[str, object]) -> None:
    """Define the names that pages take for granted."""
    names = ("Comment", "amount", "scheduler", "ship", "transfer")
    namespace |= {
        "__name__": "shop.page",
        **{name: MagicMock(name=name) for name in names},
        "order": MagicMock(lines=[MagicMock(product_id=7)]),
        "run_due_tasks": lambda token: namespace["election"].stop(),
        "serve_forever": lambda: None,
    }


def evaluate(example: Example) -> None:
    """Run a block. It may announce its error in a comment at the end of the line."""
    try:
        PythonEvaluator()(example)
    except Exception as error:
        line = error.__traceback__.tb_next.tb_next.tb_lineno
        text = example.document.text.splitlines()[line - 1]
        if not text.endswith(f"# {type(error).__name__}"):
            raise


def create(sender: type[models.Model], **kwargs: object) -> None:
    """Create the table of a model of a page, and a row."""
    with connection.schema_editor() as editor:
        editor.create_model(sender)
    sender.objects.create(pk=7)


def pytest_configure() -> None:
    import dramatiq
    from dramatiq.brokers.stub import StubBroker

    # Without a broker, Dramatiq needs the client of RabbitMQ or Redis.
    dramatiq.set_broker(StubBroker())
    django.setup()
    call_command("migrate", run_syncdb=True, verbosity=0)
    models.signals.class_prepared.connect(create)


pytest_collect_file = Sybil(
    [code_blocks("python", evaluate)],
    path=str(Path(__file__).parent.parent / "docs"),
    pattern="*.md",
    # The tutorial has its own test, which makes a project too. A test of the backends
    # has a worker of RQ, and SQLite has no session locks.
    excludes=["tutorial.md", "how-to/workers.md", "how-to/session-locks.md"],
    setup=prepare,
).pytest()
