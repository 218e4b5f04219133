from django.contrib import admin
from django.urls import path

from tests import views

urlpatterns = [path("admin/", admin.site.urls), path("increment/", views.increment)]
