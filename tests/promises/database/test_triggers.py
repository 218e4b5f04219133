"""What a trigger on the tables of dlocks changes."""

import pytest
from django.db import connection

from tests.internals import Claim, database


@pytest.mark.engine("mariadb", "mysql")
@pytest.mark.django_db(transaction=True)
def test_tokens_grow_in_spite_of_a_trigger():
    """The insert id of a reply is 0 as soon as a trigger runs."""
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TRIGGER of_a_test BEFORE UPDATE ON dlocks_resourcelock FOR EACH ROW"
            " SET @x = 1"
        )
    try:
        for name in database.__all__[1:]:
            backend, tokens = getattr(database, name)("default"), []
            for _ in range(3):
                claim = Claim(key=f"stock:7 {name}", ttl=30)
                tokens.append(backend.acquire(claim).token)
                assert backend.release(claim)
            assert tokens == sorted({*tokens} - {0}), name
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER of_a_test")
