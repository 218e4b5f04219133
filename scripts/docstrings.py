"""Conversion of this project's docstrings to Markdown, for the documentation."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

# One or several terms in double backticks on a line of their own, followed by their
# meaning, which is indented by four spaces.
TERM = re.compile(
    r"^(?P<term>``\w.*``)\n(?P<meaning>(?: {4}\S.*(?:\n|\Z))+)", re.MULTILINE
)

CODE = re.compile(
    r"^\.\. code-block:: (?P<language>\w+)\n\n(?P<code>(?: {4}.*(?:\n|\Z)|\n)+)",
    re.MULTILINE,
)


def as_markdown(text: str) -> str:
    """Return a docstring as Markdown.

    Lists of terms become definition lists, and code blocks become fenced code.
    """

    def definition(match: re.Match[str]) -> str:
        return f"{match['term']}\n:   {match['meaning'].strip()}\n\n"

    def fence(match: re.Match[str]) -> str:
        return (
            f"```{match['language']}\n{textwrap.dedent(match['code']).strip()}\n```\n\n"
        )

    return CODE.sub(fence, TERM.sub(definition, text))


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: Any, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
