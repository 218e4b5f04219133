"""The base of the read-only admins, on the tables of the chosen alias."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self, cast

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, QueryDict
from django.utils.http import urlencode
from django.utils.translation import gettext as _

from dlocks.backends.base import Backend
from dlocks.backends.database.backend import DatabaseBackend
from dlocks.conf import DEFAULT_ALIAS, backends
from dlocks.models import under
from dlocks.text import shows_holder
from dlocks.values import Kept


@dataclass
class Source:
    """The alias that a request chooses, and all aliases that it could choose."""

    alias: str
    backend: Backend | None
    shown: dict[str, Backend]
    # The other aliases, with the reasons why they have no page.
    hidden: list[tuple[str, str]]
    # What transactions keep, once it was looked for.
    kept: Kept = field(default_factory=Kept)

    @classmethod
    def of(cls, request: HttpRequest) -> Self:
        """Return the source of a request, which is found once."""
        found = getattr(request, "_dlocks_source", None)
        if found is None:
            found = request._dlocks_source = cls._find(request)  # type: ignore[attr-defined]
        return cast("Self", found)

    @classmethod
    def _find(cls, request: HttpRequest) -> Self:
        shown: dict[str, Backend] = {}
        hidden = []
        tables: dict[Any, str] = {}
        for alias in dict.fromkeys([DEFAULT_ALIAS, *backends]):
            try:
                backend = backends[alias]
                # A function may return it, and know no tenant here, for example.
                prefix = backend.prefix
            except (ImproperlyConfigured, ValueError):
                hidden.append((alias, _("its settings have an error")))
                continue
            rows = isinstance(backend, DatabaseBackend)
            # Aliases with the same database and prefix have the same rows. The first
            # one stands for them.
            table = (backend.database, prefix) if rows else alias
            if backend.unlisted and not rows:
                hidden.append((alias, backend.unlisted))
            elif (same := tables.setdefault(table, alias)) == alias:
                shown[alias] = backend
            else:
                hidden.append((alias, _("has the same rows as %s") % same))
        # Django keeps the parameters of a list in this one.
        kept = QueryDict(request.GET.get("_changelist_filters", ""))
        alias = request.GET.get("alias", kept.get("alias", ""))
        if alias not in shown:
            alias = next(iter(shown), DEFAULT_ALIAS)
        return cls(alias, shown.get(alias), shown, hidden)

    @property
    def rows(self) -> DatabaseBackend | None:
        """Return the backend if its locks are rows."""
        return self.backend if isinstance(self.backend, DatabaseBackend) else None

    @property
    def database(self) -> DatabaseBackend:
        assert self.rows is not None, "the locks are no rows"  # noqa: S101
        return self.rows

    def select(self, rows: Any) -> Any:
        """Return the rows in the database and under the prefix of the alias."""
        if self.rows is None:
            return rows.none()
        return rows.using(self.rows.database).filter(under(self.rows.prefix))

    @property
    def query(self) -> dict[str, str]:
        """Return the parameters of the address that choose the alias."""
        return {} if self.alias == DEFAULT_ALIAS else {"alias": self.alias}

    @property
    def context(self) -> dict[str, Any]:
        return {
            "source": self,
            "alias": self.query.get("alias"),
            "alias_query": f"?{urlencode(self.query)}" if self.query else "",
            "aliases": [
                (alias, urlencode({"alias": alias}), backend)
                for alias, backend in self.shown.items()
            ],
        }


class AliasChangeList(ChangeList):
    """A list whose alias is no filter, so that clearing the filters keeps it."""

    def get_filters_params(self, params: Any = None) -> Any:
        found = super().get_filters_params(params)
        found.pop("alias", None)
        # PostgreSQL raises an error for a NUL in a query's parameter.
        if any("\0" in value for values in found.values() for value in values):
            raise IncorrectLookupParameters
        return found


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """An admin whose rows change only when locks are used."""

    empty_value_display = ""
    # What an address may look up. Anything else, as ``?owner__startswith=…``, would
    # reveal a secret or a hidden holder letter by letter, although no page shows it.
    lookups: frozenset[str] = frozenset()

    class Media:
        css = {"all": ["dlocks/admin.css"]}

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def lookup_allowed(
        self, lookup: str, value: Any, request: HttpRequest | None = None
    ) -> bool:
        return lookup in self.lookups

    def get_search_fields(self, request: HttpRequest) -> Any:
        # The results of a search must not reveal a hidden holder.
        return self.search_fields if shows_holder() else ("key_resource",)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> Any:
        return AliasChangeList

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        context = {**Source.of(request).context, **(extra_context or {})}
        return super().changelist_view(request, context)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        context |= Source.of(request).context
        return super().render_change_form(request, context, *args, **kwargs)
