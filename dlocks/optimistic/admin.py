"""Optimistic locking in Django's admin.

If a row has changed since it was read, an edit saves nothing and shows both versions.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import TO_FIELD_VAR, get_content_type_for_model
from django.contrib.admin.utils import unquote
from django.core import checks
from django.core.signing import BadSignature
from django.db import connections, router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.forms import (
    TOKEN,
    VersionedFormSet,
    VersionedInlineFormSet,
    VersionedModelForm,
    sign_version,
    unsign_version,
    version_of,
)
from dlocks.transactions import TransactionMarker


class _CheckForm:
    """A system check that the project's own form carries the version."""

    form: Any
    formset: Any = VersionedFormSet

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        messages: list[checks.CheckMessage] = super().check(**kwargs)  # type: ignore[misc]
        if not issubclass(self.form, VersionedModelForm):
            messages.append(
                checks.Error(
                    f"{type(self).__name__}.form carries no version, so it would"
                    " overwrite concurrent changes.",
                    hint=(
                        "Derive the form from"
                        " dlocks.optimistic.forms.VersionedModelForm."
                    ),
                    obj=type(self),
                    id="dlocks.E025",
                )
            )
        return messages


class VersionedModelAdmin(_CheckForm, admin.ModelAdmin):  # type: ignore[type-arg]
    """A ModelAdmin for a VersionedModel.

    The version of the displayed row is part of the change form, of the lists'
    ``list_editable`` and of the page that confirms a deletion. If the row has another
    version when the form is submitted, nothing is written, and the page shows both.
    """

    form = VersionedModelForm

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().changeform_view(request, *args, **kwargs)
        except StaleVersion:
            if _is_committed(request):
                raise
            # The row changed between the form's check and the write, which is rolled
            # back. The form detects this change when it runs again.
            return super().changeform_view(request, *args, **kwargs)

    def changelist_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        try:
            response: Any = super().changelist_view(request, *args, **kwargs)
        except StaleVersion:
            if "_save" not in request.POST or _is_committed(request):
                # The error of an action, which must not run twice.
                raise
            response = super().changelist_view(request, *args, **kwargs)
        change_list = (getattr(response, "context_data", None) or {}).get("cl")
        for form in getattr(getattr(change_list, "formset", None), "forms", ()):
            _set_change(form, form.instance)
        return response

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        admin_form = context["adminform"]
        form = admin_form.form
        if TOKEN in form.fields and admin_form.fieldsets:
            # The field is a hidden row, so any fieldset will do.
            (name, options), *others = admin_form.fieldsets
            admin_form.fieldsets = [
                (name, {**options, "fields": [*options["fields"], TOKEN]}),
                *others,
            ]
        forms = [form]
        for inline in context.get("inline_admin_formsets", ()):
            forms += inline.formset.forms
        for one in forms:
            # Django logs the changes of inline rows with the object of the page.
            _set_change(one, form.instance)
        response: Any = super().render_change_form(request, context, *args, **kwargs)
        if getattr(form, "conflict", None) is not None:
            response.context_data["changed_template"] = response.resolve_template(
                response.template_name
            )
            response.context_data["conflict"] = form.conflict
            response.template_name = "admin/dlocks/conflict.html"
        return response

    def get_changelist_form(self, request: HttpRequest, **kwargs: Any) -> Any:
        return super().get_changelist_form(
            request, **{"form": VersionedModelForm, **kwargs}
        )

    def get_changelist_formset(self, request: HttpRequest, **kwargs: Any) -> Any:
        return super().get_changelist_formset(
            request, **{"formset": self.formset, **kwargs}
        )

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        """Delete the object as it was displayed.

        The version is in the address of the page that asks for confirmation.
        """
        read = partial(
            self.get_object, request, unquote(object_id), self._to_field(request)
        )
        shown = read()
        if shown is None or not self.has_delete_permission(request, shown):
            return super().delete_view(request, object_id, extra_context)
        try:
            if unsign_version(shown, request.GET.get(TOKEN, "")) == version_of(shown):
                # Django reads the object again.
                request._dlocks_shown = version_of(shown)  # type: ignore[attr-defined]
                return super().delete_view(request, object_id, extra_context)
            raise StaleVersion(self.model, shown.pk, None, version_of(shown))
        except BadSignature:
            pass
        except StaleVersion:
            if _is_committed(request):
                raise
            self.message_user(
                request,
                _(
                    "%(object)s has changed in the meantime and was not deleted. Review"
                    " the changes before you confirm again."
                )
                % {"object": shown},
                messages.ERROR,
            )
        query = request.GET.copy()
        # The current version. If the object is gone, Django reports it there.
        query[TOKEN] = sign_version(read() or shown)
        return HttpResponseRedirect(f"{request.path}?{query.urlencode()}")

    def save_model(
        self, request: HttpRequest, obj: Any, form: Any, change: Any
    ) -> None:
        _watch(request, obj)
        super().save_model(request, obj, form, change)

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        _watch(request, obj)
        shown = getattr(request, "_dlocks_shown", version_of(obj))
        if version_of(obj) != shown:
            error = StaleVersion(self.model, obj.pk, shown, version_of(obj))
            error.instance = obj
            raise error
        super().delete_model(request, obj)

    def _to_field(self, request: HttpRequest) -> str | None:
        """Return the field by which the address names the object.

        Django's own view refuses a field that is not allowed.
        """
        to_field = request.POST.get(TO_FIELD_VAR, request.GET.get(TO_FIELD_VAR))
        return (
            to_field if to_field and self.to_field_allowed(request, to_field) else None
        )


def _set_change(form: Any, logged: Any) -> None:
    """Let the conflict of a form, if any, name its author.

    A user that may see the form may see the object's history too.
    """
    conflict = getattr(form, "conflict", None)
    if conflict is not None:
        conflict.change = (
            LogEntry.objects.filter(
                content_type=get_content_type_for_model(logged),
                object_id=logged.pk,
                action_time__gte=conflict.since,
            )
            .select_related("user")
            .first()
        )


def _watch(request: Any, obj: Any) -> None:
    """Record whether the request's writes are committed.

    A callback that fails after the commit is not a conflict.
    """
    if not hasattr(request, "_dlocks_marker"):
        # Register at the first of several writes, before the callbacks of all of them.
        request._dlocks_marker = TransactionMarker.before_callbacks(
            connections[router.db_for_write(type(obj))]
        )


def _is_committed(request: Any) -> bool:
    marker = getattr(request, "_dlocks_marker", None)
    return marker is not None and marker.committed


class _VersionedInline(_CheckForm):
    form: Any = VersionedModelForm
    formset: Any = VersionedInlineFormSet


class VersionedTabularInline(_VersionedInline, admin.TabularInline):  # type: ignore[type-arg]
    """A TabularInline for a VersionedModel, in a VersionedModelAdmin."""


class VersionedStackedInline(_VersionedInline, admin.StackedInline):  # type: ignore[type-arg]
    """A StackedInline for a VersionedModel, in a VersionedModelAdmin."""
