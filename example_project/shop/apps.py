"""The Django app of the shop."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "example_project.shop"
