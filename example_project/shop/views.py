"""The pages of the shop."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from dlocks import LockTimeout
from example_project.shop import backstage, services
from example_project.shop.forms import FlashSaleForm
from example_project.shop.models import FLASH_SALE, FlashSale, Product
from example_project.shop.plots import plots
from example_project.shop.sale import TITLES, Round
from example_project.shop.services import NO_LOCK

# Seconds for which a request waits while other customers buy.
TIMEOUT = 2.0


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    products = Product.objects.exclude(name__startswith=FLASH_SALE)
    products = products.annotate(sold=Count("sales")).order_by("name")
    return render(request, "shop/index.html", {"products": products})


@require_POST
def buy(request: HttpRequest, product_id: int) -> HttpResponse:
    product = get_object_or_404(Product, pk=product_id)
    buyer = request.user.get_username() or "a guest"
    try:
        purchase = services.buy(product.pk, buyer, timeout=TIMEOUT)
    except (LockTimeout, services.TooBusyError):
        return render(request, "shop/busy.html", {"product": product}, status=409)
    if not purchase.sold:
        messages.warning(request, f"Sorry, “{product}” is sold out.")
    elif purchase.had_to_wait:
        messages.success(
            request,
            f"You have bought “{product}”, after waiting {purchase.waited:.2f} s for"
            " your turn.",
        )
    else:
        messages.success(request, f"You have bought “{product}”.")
    return redirect("shop:index")


@require_http_methods(["GET", "HEAD", "POST"])
def flash_sale(request: HttpRequest) -> HttpResponse:
    last = FlashSale.objects.first()
    form = FlashSaleForm(
        request.POST if request.method == "POST" else None,
        initial=(
            {"stock": last.stock, "buyers": last.buyers, "locks": last.locks}
            if last
            else None
        ),
        label_suffix="",
    )
    if form.is_valid():
        try:
            backstage.begin(**form.cleaned_data)
        except LockTimeout as busy:
            since = (
                f", started at {busy.holder.since:%H:%M:%S} UTC"
                if busy.holder and busy.holder.since
                else ""
            )
            messages.warning(
                request,
                f"A sale is already running{since}. Only one can run at a time, so"
                " yours was not started.",
            )
        return redirect("shop:flash_sale")
    return render(request, "shop/flash_sale.html", {"form": form, **_latest()})


@require_http_methods(["GET", "HEAD", "POST"])
def deadlock(request: HttpRequest) -> HttpResponse:
    """Show how two callers that wait for each other are told."""
    reports = services.let_clerks_meet() if request.method == "POST" else []
    return render(request, "shop/deadlock.html", {"reports": reports})


@require_GET
@never_cache
def flash_sale_now(request: HttpRequest) -> HttpResponse:
    """Return the part of the page that changes during a sale."""
    return render(request, "shop/_sale.html", _latest())


def _latest() -> dict[str, Any]:
    sale = FlashSale.objects.first()
    if sale is None:
        return {"sale": None}
    # Query this first. A sale that ends in between is shown as ended the next time.
    going_on = backstage.is_going_on(sale)
    sale.refresh_from_db()
    rounds = [Round(**one) for one in sale.rounds]
    return {
        "sale": sale,
        "going_on": going_on and sale.ended is None,
        "rounds": list(zip(rounds, plots(rounds), strict=True)),
        "to_come": [TITLES[lock] for lock in sale.locks[len(rounds) :]],
        "kept": all(one.complaint is None for one in rounds if one.lock != NO_LOCK),
        "oversold": sum(one.oversold for one in rounds),
    }
