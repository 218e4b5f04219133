"""The configuration of the shop's app."""

from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "example_project.shop"
