"""The URLs of the example project: the shop at the root, and the admin."""

from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("example_project.shop.urls")),
]
