from django.contrib import admin
from django.urls import include, path

from tests import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("increment/", views.increment),
    path("gathered/", views.gathered),
    path("article/<int:pk>/", views.edit_article),
    path("shop/", include("example_project.shop.urls")),
]
