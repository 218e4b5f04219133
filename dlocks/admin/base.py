"""The base of the read-only admins, on the tables of the chosen backend."""

from __future__ import annotations

import copy
from typing import Any, Self

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.response import TemplateResponse
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.models import under
from dlocks.text import shows_holder


class AliasChangeList(ChangeList):
    """A list whose alias is no filter, so that clearing the filters keeps it."""

    def get_filters_params(self, params: Any = None) -> Any:
        found = super().get_filters_params(params)
        found.pop("alias", None)
        return found


def _sources() -> tuple[dict[str, Backend], list[tuple[str, str]]]:
    """Return the aliases with pages of their own, and the others with reasons.

    Aliases with the same database and prefix have the same rows. The first one stands
    for them.
    """
    shown: dict[str, Backend] = {}
    hidden = []
    tables: dict[Any, str] = {}
    for alias in dict.fromkeys([DEFAULT_ALIAS, *backends]):
        try:
            backend = backends[alias]
        except ImproperlyConfigured:
            hidden.append((alias, _("its settings have an error")))
            continue
        rows = isinstance(backend, DatabaseBackend)
        table = (backend.database, backend.prefix) if rows else alias
        if backend.unlisted and not rows:
            hidden.append((alias, backend.unlisted))
        elif (same := tables.setdefault(table, alias)) == alias:
            shown[alias] = backend
        else:
            hidden.append((alias, _("has the same rows as %s") % same))
    return shown, hidden


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin whose rows change only when locks are used.

    Each request has a copy of the admin, for the alias that its address chooses.
    """

    empty_value_display = "-"
    change_list_template = "admin/dlocks/resourcelock/change_list.html"
    alias = DEFAULT_ALIAS

    class Media:
        css = {"all": ["dlocks/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def backend(self) -> DatabaseBackend | None:
        backend = backends[self.alias]
        return backend if isinstance(backend, DatabaseBackend) else None

    def chosen(self, request: HttpRequest, *, live: bool = False) -> Self:
        """Return the admin of the alias in the address, or of the first alias.

        Only the live page shows an alias without rows.
        """
        # Django keeps the parameters of a list in this one.
        kept = QueryDict(request.GET.get("_changelist_filters", ""))
        alias = request.GET.get("alias", kept.get("alias"))
        shown = [
            name
            for name, backend in _sources()[0].items()
            if live or isinstance(backend, DatabaseBackend)
        ]
        chosen = copy.copy(self)
        chosen.alias = alias if alias in shown else next(iter(shown), DEFAULT_ALIAS)
        if not live:
            chosen._find_kept(request)
        return chosen

    def _find_kept(self, request: HttpRequest) -> None:
        """Load the expired leases that transactions keep, for all querysets."""

    @property
    def query(self) -> dict[str, str]:
        """Return the parameters of the address that choose the alias."""
        return {} if self.alias == DEFAULT_ALIAS else {"alias": self.alias}

    @property
    def alias_context(self) -> dict[str, Any]:
        shown, hidden = _sources()
        return {
            "alias": self.query.get("alias"),
            "alias_query": f"?{urlencode(self.query)}" if self.query else "",
            "aliases": [
                {
                    "name": alias,
                    "query": urlencode({"alias": alias}),
                    "is_current": alias == self.alias,
                    "database": backend.database,
                    "prefix": backend.prefix,
                }
                for alias, backend in shown.items()
            ],
            "hidden_aliases": hidden,
        }

    def page(self, request: HttpRequest, name: str, **context: Any) -> TemplateResponse:
        """Return a page from the template with this name."""
        request.current_app = self.admin_site.name
        context = {
            **self.admin_site.each_context(request),
            "subtitle": None,
            "opts": self.opts,
            "media": self.media,
            **self.alias_context,
            **context,
        }
        template = f"admin/dlocks/resourcelock/{name}.html"
        return TemplateResponse(request, template, context)

    def rows_of_alias(self, rows: Any) -> Any:
        """Return the rows in the database and under the prefix of the alias."""
        if (backend := self.backend()) is None:
            return rows
        return rows.using(backend.database).filter(under(backend.prefix))

    def get_search_fields(self, request: HttpRequest) -> Any:
        # The results of a search must not reveal a hidden holder.
        return self.search_fields if shows_holder() else ("key_resource",)

    def changelist_view(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        chosen = self.chosen(request)
        return super(ReadOnlyAdmin, chosen).changelist_view(
            request, chosen.alias_context
        )

    def changeform_view(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        chosen = self.chosen(request)
        return super(ReadOnlyAdmin, chosen).changeform_view(request, *args, **kwargs)

    def history_view(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        chosen = self.chosen(request)
        return super(ReadOnlyAdmin, chosen).history_view(request, *args, **kwargs)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        context |= self.alias_context
        return super().render_change_form(request, context, *args, **kwargs)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return AliasChangeList

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Any:
        # PostgreSQL raises an error for a NUL in a query's parameter.
        if "\0" in object_id:
            return None
        return super().get_object(request, object_id, from_field)
