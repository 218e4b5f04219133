"""The models of the shop: products, sales and flash sales."""

from django.db import models

from dlocks.optimistic import VersionedModel

# The products of the flash sales, which the shop does not show.
FLASH_SALE = "Flash sale, "


class Product(VersionedModel):
    """A product.

    Its version grows with each write. Sales can compare it instead of using a lock, and
    the admin does so while a person edits.
    """

    name = models.CharField(max_length=100, unique=True)
    stock = models.PositiveIntegerField()

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class Sale(models.Model):
    product = models.ForeignKey(Product, models.CASCADE, related_name="sales")
    buyer = models.CharField(max_length=100)
    created = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-created", "-pk")

    def __str__(self) -> str:
        return f"{self.product} to {self.buyer}"


class FlashSale(models.Model):
    """A flash sale that the page has started: its options and its progress.

    ``rounds`` are those of ``shop.sale``, as dictionaries. The last one may still be
    running.
    """

    PROCESSES = 4

    locks = models.JSONField()
    stock = models.PositiveIntegerField()
    buyers = models.PositiveIntegerField()
    rounds = models.JSONField(default=list)
    trouble = models.TextField(blank=True)
    begun = models.DateTimeField(auto_now_add=True)
    ended = models.DateTimeField(null=True)

    class Meta:
        ordering = ("-pk",)

    def __str__(self) -> str:
        return f"Flash sale {self.pk}: {self.stock} pieces, {self.buyers} buyers"
