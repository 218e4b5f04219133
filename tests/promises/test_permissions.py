"""What each permission of the admin shows."""

from datetime import timedelta

import pytest
from django.apps import apps
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse
from django.utils import timezone

pytestmark = [pytest.mark.front, pytest.mark.django_db]

HoldRecord = apps.get_model("dlocks", "HoldRecord")


def person(*permissions):
    """Return the client of a user with these permissions."""
    user = User.objects.create_user(f"user {User.objects.count()}", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def test_the_control_room_shows_the_history_only_with_its_permission(settings):
    """``view_resourcelock`` shows the locks, and ``view_holdrecord`` ended holds.

    This applies to the page, to the page of one key, and to each part that its script
    requests.
    """
    settings.DLOCKS = {"default": {"OPTIONS": {"history": True}}}
    now = timezone.now()
    HoldRecord.objects.create(
        key_resource="stock:7",
        token=1,
        holder="web-1:1412:MainThread",
        scope=HoldRecord.Scope.LEASE,
        shared=False,
        waited=0.5,
        begin_time=now - timedelta(seconds=9),
        end_time=now - timedelta(seconds=1),
        ending=HoldRecord.Ending.RELEASED,
    )
    addresses = [
        reverse("admin:dlocks_resourcelock_changelist"),
        reverse("admin:dlocks_resourcelock_change", args=[quote("stock:7")]),
    ]
    queries = [
        (address, part)
        for address in addresses
        for part in ({}, {"part": "now"}, {"part": "hour"}, {"part": "past"})
    ]
    viewer = person("view_resourcelock")
    historian = person("view_resourcelock", "view_holdrecord")

    def texts(client):
        found = [client.get(address, part) for address, part in queries]
        assert {response.status_code for response in found} == {200}
        return [response.content.decode() for response in found]

    assert sum("MainThread" in text for text in texts(historian)) >= 3
    for (_, query), text in zip(queries, texts(viewer), strict=True):
        assert "MainThread" not in text, query
        assert "Locks released" not in text, query
        assert "part=past" not in text, query
        assert "part=hour" not in text, query
        assert "part" in query or "part=now" in text
