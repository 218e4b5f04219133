"""The form with the options of a flash sale."""

from __future__ import annotations

from django import forms

from example_project.shop.sale import TITLES

MOST_PIECES = 1_000
MOST_BUYERS = 2_000


class FlashSaleForm(forms.Form):
    use_required_attribute = False

    stock = forms.IntegerField(
        label="Pieces in stock",
        initial=50,
        min_value=1,
        max_value=MOST_PIECES,
        error_messages={
            "required": "How many pieces are there?",
            "invalid": "That is not a whole number.",
            "min_value": "There must be at least one piece to sell.",
            "max_value": f"There can be at most {MOST_PIECES:,} pieces.",
        },
    )
    buyers = forms.IntegerField(
        label="Buyers",
        initial=150,
        min_value=2,
        max_value=MOST_BUYERS,
        error_messages={
            "required": "How many buyers are there?",
            "invalid": "That is not a whole number.",
            "min_value": "There must be at least two buyers.",
            "max_value": f"There can be at most {MOST_BUYERS:,} buyers.",
        },
    )
    locks = forms.MultipleChoiceField(
        label="Locks",
        choices=list(TITLES.items()),
        initial=list(TITLES),
        widget=forms.CheckboxSelectMultiple,
        error_messages={
            "required": "Choose at least one lock.",
            "invalid_choice": "“%(value)s” is not one of the locks.",
        },
    )

    def clean(self) -> None:
        stock, buyers = self.cleaned_data.get("stock"), self.cleaned_data.get("buyers")
        if stock is not None and buyers is not None and buyers <= stock:
            self.add_error(
                "buyers",
                "There must be more buyers than pieces.",
            )

    def clean_locks(self) -> list[str]:
        # Each lock once, in the order of the form.
        return [lock for lock in TITLES if lock in self.cleaned_data["locks"]]
