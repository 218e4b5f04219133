"""The URLs of the shop."""

from django.urls import path

from example_project.shop import views

app_name = "shop"
urlpatterns = [
    path("", views.index, name="index"),
    path("products/<int:product_id>/buy/", views.buy, name="buy"),
    path("deadlock/", views.deadlock, name="deadlock"),
    path("flash-sale/", views.flash_sale, name="flash_sale"),
    path("flash-sale/now/", views.flash_sale_now, name="flash_sale_now"),
]
