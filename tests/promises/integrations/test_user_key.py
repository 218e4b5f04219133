"""``user_key()``: keys from the input of users."""

from __future__ import annotations

from uuid import UUID

import pytest
from django.contrib.auth.models import AnonymousUser

from dlocks import user_key

pytestmark = pytest.mark.front


def test_a_user_key_is_readable():
    """An id has one key, as a number in the row and as a string in the address."""
    assert user_key("export", 7, "monthly report") == "export:7:monthly%20report"
    uuid = "00000000-0000-0000-0000-000000000007"
    assert user_key("export", UUID(int=7)) == f"export:{uuid}"
    assert user_key("n", 7) == user_key("n", "7")


def test_user_input_cannot_leave_the_namespace():
    """It adds no colon, and cannot be the short form of a long key."""
    key = user_key("export", "x:../../admin:7\r\n\0")
    assert key.startswith("export:x%3A..%2F..%2Fadmin%3A7%0D%0A%00")
    long = user_key("n", "x" * 1000)
    assert user_key("n", long.partition(":")[2]) != long
    assert len(long) == 200


def test_an_invalid_namespace_or_part_is_refused():
    """The pk of an anonymous user is not a part either."""
    for namespace in ("", "a b", "a:b", "7a", "é", "x" * 101, "a\n", "{pk}"):
        with pytest.raises(ValueError, match="identifier"):
            user_key(namespace, 7)
    for part in (None, True, 1.5, b"a", ["a"], AnonymousUser()):
        with pytest.raises(TypeError, match="part 2 of a key"):
            user_key("n", 1, part)
    for arguments, message in ((["n"], "at least one part"), ([7, 7], "namespace")):
        with pytest.raises(TypeError, match=message):
            user_key(*arguments)
    for part in ("x" * 1025, "é" * 513, "\ud800", 10**1025, 10**5000):
        with pytest.raises(ValueError):
            user_key("n", part)
    assert user_key("n", "é" * 512)
