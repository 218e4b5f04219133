"""Optimistic locking in Django's admin.

If a row has changed since it was read, an edit saves nothing and shows both versions.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.models import LogEntry
from django.contrib.admin.options import get_content_type_for_model
from django.core import checks
from django.core.signing import BadSignature
from django.db import connections, router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.timezone import get_default_timezone, make_naive
from django.utils.translation import gettext as _

from dlocks.exceptions import StaleVersion
from dlocks.optimistic.forms import (
    TOKEN,
    VersionedFormSet,
    VersionedFormSetMixin,
    VersionedInlineFormSet,
    VersionedModelForm,
    sign_version,
    unsign_version,
)
from dlocks.optimistic.version_field import version_of
from dlocks.transactions import TransactionMarker


class _Versioned:
    """The form and the formset, and a check that they carry the version."""

    form: Any = VersionedModelForm
    formset: Any = VersionedInlineFormSet

    def check(self, **kwargs: Any) -> list[checks.CheckMessage]:
        messages: list[checks.CheckMessage] = super().check(**kwargs)  # type: ignore[misc]
        for name, base, consequence in (
            ("form", VersionedModelForm, "it would overwrite concurrent changes"),
            ("formset", VersionedFormSetMixin, "its rows could not be saved"),
        ):
            if not issubclass(getattr(self, name), base):
                what = f"{type(self).__name__}.{name}"
                messages.append(
                    checks.Error(
                        f"{what} carries no version, so {consequence}.",
                        hint=f"Derive it from dlocks.optimistic.forms.{base.__name__}.",
                        obj=type(self),
                        id="dlocks.E025",
                    )
                )
        return messages


class VersionedModelAdmin(_Versioned, admin.ModelAdmin):  # type: ignore[type-arg]
    """A ModelAdmin for a VersionedModel.

    The version of the displayed row is part of the change form, of the lists'
    ``list_editable`` and of the page that confirms a deletion. If the row has another
    version when the form is submitted, nothing is written, and the page shows both.
    """

    # The formset of the list.
    formset = VersionedFormSet

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
        try:
            request._dlocks_confirms = request.method == "POST"  # type: ignore[attr-defined]
            if request.method != "POST" or TOKEN in request.GET:
                return super().delete_view(request, object_id, extra_context)
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
                % {"object": request._dlocks_shown},  # type: ignore[attr-defined]
                messages.ERROR,
            )
        # Ask again. If the object is gone, Django reports it there.
        return HttpResponseRedirect(request.get_full_path())

    def render_delete_form(self, request: HttpRequest, context: Any) -> HttpResponse:
        query = request.GET.copy()
        query[TOKEN] = sign_version(context["object"])
        if query != request.GET:
            return HttpResponseRedirect(f"{request.path}?{query.urlencode()}")
        response: HttpResponse = super().render_delete_form(request, context)
        return response

    def save_form(self, request: HttpRequest, form: Any, change: Any) -> Any:
        # Not in save_model(), which a project may replace.
        _watch(request, form.instance)
        return super().save_form(request, form, change)

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        if getattr(request, "_dlocks_confirms", False):
            # Not in delete_model(), which a project may replace.
            (obj,) = objs
            _watch(request, obj)
            request._dlocks_shown = obj  # type: ignore[attr-defined]
            shown, found = unsign_version(obj, request.GET[TOKEN]), version_of(obj)
            if found != shown:
                error = StaleVersion(self.model, obj.pk, shown, found)
                error.instance = obj
                raise error
        return super().get_deleted_objects(objs, request)


def _set_change(form: Any, logged: Any) -> None:
    """Let the conflict of a form, if any, name its author.

    A user that may see the form may see the object's history too.
    """
    conflict = getattr(form, "conflict", None)
    if conflict is not None:
        since = conflict.since
        if not settings.USE_TZ:
            since = make_naive(since, get_default_timezone())
        conflict.change = (
            LogEntry.objects.filter(
                content_type=get_content_type_for_model(logged),
                object_id=logged.pk,
                action_time__gte=since,
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


class VersionedTabularInline(_Versioned, admin.TabularInline):  # type: ignore[type-arg]
    """A TabularInline for a VersionedModel, in a VersionedModelAdmin."""


class VersionedStackedInline(_Versioned, admin.StackedInline):  # type: ignore[type-arg]
    """A StackedInline for a VersionedModel, in a VersionedModelAdmin."""
