"""Forms with the fields of PostgreSQL: arrays and ranges."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pytest
from django.db import models
from django.test.utils import isolate_apps

from dlocks.optimistic import VersionedModel
from dlocks.optimistic.forms import TOKEN, VersionedModelForm
from tests.for_each import for_each

pytestmark = [pytest.mark.engine("postgresql"), pytest.mark.django_db]

PRICES = [(None, None), (Decimal(1), None), (Decimal("1.50"), Decimal(2))]


@isolate_apps("tests")
def plan_form():
    """Return a form of a model with arrays and ranges. Its table is not created."""
    from django.contrib.postgres import fields

    class Plan(VersionedModel):
        days = fields.ArrayField(models.DateField())
        period = fields.DateRangeField()
        price = fields.DecimalRangeField(null=True, blank=True)
        title = models.CharField(max_length=20)

        class Meta(VersionedModel.Meta):
            app_label = "tests"

    class PlanForm(VersionedModelForm):
        class Meta:
            model = Plan
            fields = ["days", "period", "price", "title"]

    return PlanForm


def form_of(kind, version, *args, year, price):
    from django.db.backends.postgresql.psycopg_any import DateRange, NumericRange

    first = date(year, 1, 1)
    values = {
        "id": 1,
        "version": version,
        "days": [first],
        "period": DateRange(first, date(year, 2, 1)),
        "price": None if price == (None, None) else NumericRange(*price),
        "title": "first",
    }
    plan = kind.Meta.model.from_db("default", [*values], [*values.values()])
    return kind(*args, instance=plan)


def yours(form):
    assert not form.is_valid()
    return [one.label for one in form.conflict.differences if one.is_yours]


@for_each("price", PRICES)
def test_arrays_and_ranges_that_only_others_changed_show_their_values(price):
    kind = plan_form()
    data = {
        "days": "2020-01-01",
        "period_0": "2020-01-01",
        "period_1": "2020-02-01",
        "price_0": price[0] or "",
        "price_1": price[1] or "",
        "title": "mine",
        TOKEN: form_of(kind, 1, year=2020, price=price)[TOKEN].value(),
    }
    theirs = {"year": 2021, "price": (Decimal(7), Decimal(8))}
    form = form_of(kind, 2, data, **theirs)
    assert yours(form) == ["Title"]
    assert form["days"].value() == "2021-01-01"
    data |= {"days": "2020-01-02", "period_1": "2020-02-02", "price_0": "3"}
    form = form_of(kind, 2, data, **theirs)
    assert sorted(yours(form)) == ["Days", "Period", "Price", "Title"]
