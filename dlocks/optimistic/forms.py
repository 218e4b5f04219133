"""Model forms that detect a concurrent change of their row.

A form carries the signed version of its row, and shows a conflict instead of losing a
value.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.core.signing import BadSignature, Signer
from django.db import models, router, transaction
from django.forms.formsets import DELETION_FIELD_NAME, ManagementForm
from django.forms.models import BaseInlineFormSet, BaseModelFormSet
from django.template.loader import render_to_string
from django.utils import formats
from django.utils.choices import flatten_choices
from django.utils.crypto import salted_hmac
from django.utils.functional import lazy
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.timezone import template_localtime  # type: ignore[attr-defined]
from django.utils.translation import gettext as _

from dlocks.optimistic.version_field import version_of

# The name of the hidden field.
TOKEN = "row_version"  # noqa: S105
# The types of values of fields with several choices.
SEVERAL = (list, tuple, set, models.QuerySet)


def sign_version(instance: models.Model) -> str:
    """Return the version of the instance, signed for this row of this model."""
    return _signer(instance, "version").sign(str(version_of(instance)))


def unsign_version(instance: models.Model, token: str) -> int:
    """Return the version in a token of this row.

    Raise BadSignature for any other string.
    """
    return int(_signer(instance, "version").unsign(token))


def _signer(instance: models.Model, what: str) -> Signer:
    model: Any = instance._meta.concrete_model
    return Signer(
        salt=f"dlocks.optimistic.{what}:{model._meta.label_lower}:{instance.pk}"
    )


class TokenField(forms.CharField):
    widget = forms.HiddenInput

    def has_changed(self, initial: Any, data: Any) -> bool:
        # The field is not a value of the row.
        return False


@dataclass
class Difference:
    """A field whose submitted value differs from the value in the database.

    Both values are texts for display. ``is_yours`` and ``is_theirs`` say whether the
    field was changed in the form, and in the database. ``control`` is the field's HTML
    with their value, or empty if a script cannot copy it.
    """

    label: str
    yours: str
    theirs: str
    is_yours: bool
    is_theirs: bool
    control: str = ""

    @property
    def is_conflict(self) -> bool:
        return self.is_yours and self.is_theirs


@dataclass
class Conflict:
    """The submitted values and the values that another user has written since.

    ``since`` is the time at which the form was rendered. The admin sets ``change``, the
    last entry of its log since then. As a string, it is an HTML table.
    """

    held: int
    found: int
    since: datetime
    differences: list[Difference]
    change: Any = None

    @property
    def is_merged(self) -> bool:
        """Whether your changes are all of fields that have not changed since."""
        yours = [one for one in self.differences if one.is_yours]
        return bool(yours) and not any(one.is_theirs for one in yours)

    def __str__(self) -> str:
        return render_to_string("dlocks/conflict.html", {"conflict": self})

    __html__ = __str__


class VersionedModelForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form of a VersionedModel with a hidden field for its row's version.

    If the row has another version when the form is submitted, the form has an error and
    ``conflict`` contains the differences. Changed fields keep the submitted values. The
    other fields show the current values of the database. A second submission saves
    them. A change between this check and ``save()`` raises StaleVersion there. Render
    the form's hidden fields, as ``{{ form }}`` does.
    """

    # In a formset, the error contains the differences, and a form without changes has
    # no conflict.
    in_formset = False
    conflict: Conflict | None = None

    class Media:
        css = {"all": ["dlocks/conflict.css"]}
        js = ["dlocks/conflict.js"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.instance._state.adding:
            self._found = version_of(self.instance)
            # Sent with the form, so that it is known later what its user has seen.
            self._values = {
                name: self._written(name, self.get_initial_for_field(field, name))
                for name, field in self.fields.items()
                if not field.disabled
            }
            signer = _signer(self.instance, "form")
            self.initial[TOKEN] = signer.sign_object(
                {"version": self._found, "values": self._values, "time": time.time()},
                compress=True,
            )
            self.fields[TOKEN] = TokenField(required=False)

    def save(self, commit: bool = True) -> Any:
        """Save the row and its many-to-many relations as one change.

        A form that is opened meanwhile cannot have the new version without them.
        """
        if not commit:
            return super().save(commit=False)
        using = router.db_for_write(type(self.instance), instance=self.instance)
        with transaction.atomic(using=using):
            return super().save()

    def full_clean(self) -> None:
        super().full_clean()
        if self.is_bound and TOKEN in self.fields:
            self._compare()

    def _compare(self) -> None:
        try:
            seen = _signer(self.instance, "form").unsign_object(
                str(self[TOKEN].data or "")
            )
        except BadSignature:
            self._refuse(
                "version",
                _(
                    "The form does not contain the version of its row. Nothing was"
                    " saved. Open the form again."
                ),
            )
            return
        if seen["version"] == self._found:
            return
        touched = {
            name
            for name in self._values
            if self._is_touched(name, seen["values"].get(name))
        }
        for name in (*(self._values.keys() - touched), TOKEN):
            # The form contains this version when it is submitted again.
            self.fields[name].bound_data = lambda data, initial: initial  # type: ignore[method-assign]
        if (
            self.in_formset
            and not touched
            and not self.cleaned_data.get(DELETION_FIELD_NAME)
        ):
            # The form must not be written back, although it differs from the database.
            self.changed_data = []
            return
        self.conflict = Conflict(
            seen["version"],
            self._found,
            datetime.fromtimestamp(seen["time"], UTC),
            self._differences(touched, seen["values"]),
        )
        message = _(
            "This object has changed in the meantime and was not saved. Fields that"
            " you did not change show the current values. If you save again, your"
            " other values replace the current ones."
        )
        if self.in_formset:
            # Rendered later, when the admin has set ``change``.
            message = lazy(format_html, SafeString)(
                '<div class="dlocks-row">{} {}</div>', message, self.conflict
            )
        self._refuse("conflict", message)

    def _refuse(self, code: str, message: Any) -> None:
        # A formset validates no form whose row it deletes. A row must not be deleted if
        # its user has not seen its current state.
        self.cleaned_data.pop(DELETION_FIELD_NAME, None)
        self.add_error(None, ValidationError(message, code=code))

    def _written(self, name: str, value: Any) -> str:
        """Return a field's initial value as text, or a digest if it is not shown."""
        field: Any = self.fields[name]
        if _is_hidden(field):
            salt = _signer(self.instance, name).salt
            return salted_hmac(salt, str(value), algorithm="sha256").hexdigest()[:12]
        if isinstance(field, forms.ModelChoiceField):
            value = field.prepare_value(value)
            if isinstance(value, SEVERAL):
                # Their order has no meaning.
                value = sorted(map(str, value))
        return json.dumps(value, default=_plain, sort_keys=True)

    def _is_touched(self, name: str, text: str | None) -> bool:
        """Return whether the submitted value differs from the one that was shown."""
        field, data = self.fields[name], self[name].data
        shown = self._read(name, text)
        if isinstance(shown, str) and isinstance(data, str):
            # Browsers change the ends of lines, and fields strip what they clean.
            shown, data = (one.replace("\r\n", "\n") for one in (shown, data))
            shown = shown.strip() if getattr(field, "strip", False) else shown
        return field.has_changed(shown, data)

    def _read(self, name: str, text: str | None) -> Any:
        """Return the initial value that was written as this text."""
        field = self.fields[name]
        if text is None or _is_hidden(field):
            return None
        if text == self._values[name]:
            return self.get_initial_for_field(field, name)
        value = json.loads(text)
        for column in self._meta.model._meta.concrete_fields:
            if column.name == name:
                items = getattr(column, "base_field", None)
                if items is not None and isinstance(value, list):
                    value = [items.to_python(one) for one in value]
                return column.to_python(value)
        # The field is only in the form.
        return None if isinstance(field, forms.MultiValueField) else value

    def _differences(self, touched: set[str], seen: dict[str, str]) -> list[Difference]:
        differences = []
        for name in self._values:
            bound, field = self[name], self.fields[name]
            is_theirs = self._values[name] != seen.get(name)
            if (
                self._meta.model._meta.pk.name == name
                or not (is_theirs or name in touched)
                or not field.has_changed(bound.initial, bound.data)
            ):
                continue
            yours = shown(field, self.cleaned_data.get(name, bound.data))
            theirs = shown(field, bound.initial)
            kind = getattr(field.widget, "input_type", None)
            if kind == "password":
                # Such a field does not show its value either.
                yours = theirs = "********"
            control = ""
            if name in touched and kind not in {"password", "file"}:
                control = field.widget.render(
                    bound.html_name,
                    field.prepare_value(bound.initial),
                    renderer=self.renderer,
                )
            label = str(capfirst(bound.label))
            differences.append(
                Difference(label, yours, theirs, name in touched, is_theirs, control)
            )
        # The fields that both sides have changed come first.
        return sorted(differences, key=lambda one: not one.is_conflict)


def _plain(value: Any) -> Any:
    """Return a value that JSON does not know as text, or a range as its bounds."""
    return [value.lower, value.upper] if hasattr(value, "isempty") else str(value)


def _is_hidden(field: forms.Field) -> bool:
    """Return whether the field does not show its value, as those of passwords."""
    widget: Any = field.widget
    kind = getattr(widget, "input_type", None)
    return kind == "password" and not getattr(widget, "render_value", False)


def shown(field: forms.Field, value: Any) -> str:
    """Return a value of a form field as text for display."""
    if isinstance(value, bool):
        return _("Yes") if value else _("No")
    if isinstance(field, forms.ModelChoiceField):
        return _shown_objects(field, value)
    if isinstance(value, SEVERAL):
        return ", ".join(shown(field, one) for one in value)
    if isinstance(field, forms.ChoiceField):
        choices: Any = flatten_choices(field.choices)  # type: ignore[arg-type]
        for key, label in choices:
            if str(key) == str(value):
                return str(label)
    return "" if value is None else str(formats.localize(template_localtime(value)))


def _shown_objects(field: Any, value: Any) -> str:
    texts = []
    for one in value if isinstance(value, SEVERAL) else [value]:
        if one in field.empty_values:
            continue
        if not isinstance(one, models.Model):
            one = (
                field.queryset.filter(**{field.to_field_name or "pk": one}).first()
                or one
            )
        texts.append(
            field.label_from_instance(one)
            if isinstance(one, models.Model)
            else str(one)
        )
    return ", ".join(map(str, texts))


class _ManagementForm(ManagementForm):
    """A management form that also renders the versions of the formset's forms.

    The admin's lists render no other hidden fields.
    """

    formset: Any

    def render(self, *args: Any, **kwargs: Any) -> SafeString:
        tokens = [
            (form[TOKEN],)
            for form in self.formset.initial_forms
            if TOKEN in form.fields
        ]
        return format_html(
            "{}{}", super().render(*args, **kwargs), format_html_join("", "{}", tokens)
        )

    __str__ = render
    __html__ = render


class VersionedFormSetMixin:
    """A mixin for formsets whose template renders their parts one by one.

    The admin has such templates. The forms are VersionedModelForms. See
    _ManagementForm.
    """

    @cached_property
    def management_form(self) -> Any:
        form = super().management_form  # type: ignore[misc]
        form.__class__ = _ManagementForm
        form.formset = self
        return form

    def add_fields(self, form: Any, index: Any) -> None:
        super().add_fields(form, index)  # type: ignore[misc]
        form.in_formset = True


class VersionedFormSet(VersionedFormSetMixin, BaseModelFormSet):  # type: ignore[type-arg]
    pass


class VersionedInlineFormSet(VersionedFormSetMixin, BaseInlineFormSet):  # type: ignore[type-arg]
    pass
