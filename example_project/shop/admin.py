"""The admin of the shop."""

from django.contrib import admin

from example_project.shop.models import Product, Sale


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):
    list_display = ("name", "stock", "version")
    readonly_fields = ("version",)
    search_fields = ("name",)


@admin.register(Sale)
class SaleAdmin(admin.ModelAdmin):
    list_display = ("product", "buyer", "created")
    list_filter = ("product",)
    list_select_related = ("product",)
    search_fields = ("buyer",)
    date_hierarchy = "created"
