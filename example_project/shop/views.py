"""The pages of the shop."""

from __future__ import annotations

from django.contrib import messages
from django.db.models import Count
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from dlocks import LockTimeout
from example_project.shop import services
from example_project.shop.models import Product

# How many seconds a customer waits for a page while others buy.
PATIENCE = 2.0


@require_GET
def index(request: HttpRequest) -> HttpResponse:
    products = Product.objects.annotate(sold=Count("sales")).order_by("name")
    return render(request, "shop/index.html", {"products": products})


@require_POST
def buy(request: HttpRequest, product_id: int) -> HttpResponse:
    product = get_object_or_404(Product, pk=product_id)
    buyer = request.user.get_username() or "a guest"
    try:
        purchase = services.buy(product.pk, buyer, timeout=PATIENCE)
    except (LockTimeout, services.TooBusyError):
        return render(request, "shop/busy.html", {"product": product}, status=409)
    if not purchase.sold:
        messages.warning(request, f"Sorry, “{product}” is sold out.")
    elif purchase.had_to_wait:
        messages.success(request, f"You have bought “{product}”, after waiting {purchase.waited:.2f} s for your turn.")
    else:
        messages.success(request, f"You have bought “{product}”.")
    return redirect("shop:index")
