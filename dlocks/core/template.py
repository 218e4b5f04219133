"""Keys with fields, which the arguments of a call fill."""

from __future__ import annotations

import functools
import inspect
import re
import string
from collections.abc import Callable, Mapping
from typing import Any, cast

from django.db import models
from django.db.models.manager import BaseManager
from django.db.models.query import RawQuerySet

# The end of the text of an object that has no text of its own.
ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+>")
NO_NAME = (
    "whose text is not the same in each process or at each time. Name an attribute, as"
    " in {order.pk}, or pass a function as the key."
)
FIELD = re.compile(r"(?P<name>[^\W\d]\w*)(?:\.[^\W\d]\w*|\[[^\[\]]+\])*")


class Template(string.Formatter):
    """A key with fields in the syntax of ``str.format()``.

    ``names`` are the arguments that the fields start from.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        try:
            self.pieces = list(self.parse(template))
        except ValueError as error:
            raise ValueError(f"{template!r} is not a valid key: {error}.") from error
        self.names: list[str] = []
        for number, (_literal, field, spec, conversion) in enumerate(self.pieces):
            if field is None:
                continue
            self._check(field, spec or "", conversion)
            self.names.append(re.split(r"[.\[]", field, maxsplit=1)[0])
            if number + 1 < len(self.pieces) and not self.pieces[number + 1][0]:
                raise ValueError(
                    f"{template!r} needs a separator between {{{field}}} and the next"
                    " field. Without it, calls with different arguments could have the"
                    " same key."
                )

    def render(self, values: Mapping[str, Any]) -> str:
        key, fields_left = "", len(self.names)
        for number, (literal, field, spec, conversion) in enumerate(self.pieces):
            key += literal
            if field is None:
                continue
            fields_left -= 1
            value, _first = self.get_field(field, (), values)
            why = _why_no_key(value)
            if not why:
                text = self.format_field(
                    self.convert_field(value, cast("Any", conversion)), spec or ""
                )
                if not isinstance(value, str) and ADDRESS.search(text):
                    why = f"{text} in this call, {NO_NAME}"
            if why:
                raise ValueError(f"{{{field}}} of {self.template!r} is {why}")
            if fields_left:
                # A value is unambiguous if the following separator does not occur
                # before its end. The last field may hold any value.
                following = self.pieces[number + 1][0]
                if (text + following).find(following) != len(text):
                    raise ValueError(
                        f"{{{field}}} of {self.template!r} is {text!r} in this call."
                        f" With {following!r} after it, other values could have the"
                        " same key. Put this field last, choose another separator, or"
                        " pass a function as the key."
                    )
            key += text
        return key

    def _check(self, field: str, spec: str, conversion: str | None) -> None:
        if not FIELD.fullmatch(field):
            raise ValueError(
                f"{self.template!r}: {{{field}}} is not a valid field. Name an"
                " argument, as in {order}, {order.pk} or {items[0]}. Double the braces"
                " that are ordinary characters."
            )
        if any(
            name.startswith("_")
            for name in re.findall(r"\.(\w+)", re.sub(r"\[[^\]]*\]", "", field))
        ):
            raise ValueError(
                f"{self.template!r}: {{{field}}} uses an attribute that begins with an"
                " underscore."
            )
        if conversion not in {None, "r", "s", "a"}:
            raise ValueError(
                f"{self.template!r}: {{{field}!{conversion}}} has a conversion other"
                " than !r, !s and !a."
            )
        if "{" in spec:
            raise ValueError(
                f"{self.template!r}: {{{field}}} has a field in its format specifier."
            )


def _why_no_key(value: Any) -> str:
    """Return why the text of a value cannot be part of a key, or an empty text."""
    what = ""
    if value is None:
        what = "None"
    elif isinstance(value, models.Model) and not value._is_pk_set():  # type: ignore[attr-defined]
        what = f"a {type(value).__name__} without a primary key"
    if what:
        return (
            f"{what} in this call, so unrelated calls would have the same key. Save the"
            " object first, or pass a function as the key."
        )
    if isinstance(value, (models.QuerySet, RawQuerySet, BaseManager)):
        return f"a {type(value).__name__} in this call, {NO_NAME}"
    if inspect.isroutine(value):
        return f"{name_of(value)} itself in this call, {NO_NAME}"
    return ""


class KeyOfCall:
    """The key of a call: a template, filled with the call's arguments and defaults."""

    def __init__(self, template: str, function: Callable[..., Any]) -> None:
        self.template = Template(template)
        self.function = function
        # ``method_decorator()`` marks its partial of a bound method as wrapping the
        # plain function, which has one more argument.
        self.signature = inspect.signature(
            function, follow_wrapped=not isinstance(function, functools.partial)
        )
        kinds = {
            parameter.kind: name
            for name, parameter in self.signature.parameters.items()
        }
        self.others = kinds.get(inspect.Parameter.VAR_KEYWORD)
        for name in self.template.names:
            if name not in self.signature.parameters and self.others is None:
                raise ValueError(
                    f"{template!r} needs an argument {name!r}, but"
                    f" {name_of(function)} has"
                    f" {', '.join(map(repr, self.signature.parameters)) or 'none'}."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name_of(self.function)}: {error}") from None
        bound.apply_defaults()
        values = bound.arguments
        if self.others is not None:
            values = {**values[self.others], **values}
        for name in self.template.names:
            if name not in values:
                raise TypeError(
                    f"{name_of(self.function)} needs the argument {name!r} in this"
                    f" call, for the key {self.template.template!r}."
                )
        return self.template.render(values)


def name_of(function: Any) -> str:
    return f"{getattr(function, '__qualname__', None) or repr(function)}()"
