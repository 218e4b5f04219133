"""The admin of the shop."""

from django.contrib import admin, messages

from dlocks import LockNotAwaitable, LockTimeout
from dlocks.optimistic.admin import VersionedModelAdmin
from example_project.shop.models import Product, Sale
from example_project.shop.services import restock

PIECES = 10


@admin.register(Product)
class ProductAdmin(VersionedModelAdmin):
    """The products. A person who edits an outdated page sees the conflict."""

    list_display = ("name", "stock", "version")
    readonly_fields = ("version",)
    search_fields = ("name",)
    actions = ("restock",)

    @admin.action(description=f"Add {PIECES} pieces")
    def restock(self, request, queryset):
        for product in queryset:
            try:
                restock(product.pk, PIECES)
            except (LockTimeout, LockNotAwaitable) as error:
                self.message_user(request, str(error), messages.WARNING)


@admin.register(Sale)
class SaleAdmin(admin.ModelAdmin):
    list_display = ("product", "buyer", "created")
    list_filter = ("product",)
    list_select_related = ("product",)
    search_fields = ("buyer",)
    date_hierarchy = "created"
