"""The successor of the database backends passes the contract on every engine.

Nothing else uses it yet. It replaces ``dlocks.backends.database``.
"""

import pytest
from django.db import connection

from tests.internals import Claim, relational
from tests.testing import test_contract as contract

# Until the switch, all four engines are for those who work on it.
pytestmark = pytest.mark.whole("sqlite", "postgresql")


class TestPessimistic(contract.Contract):
    def make_backend(self, **options):
        return relational.PessimisticBackend("default", **options)


@contract.strategy
class TestOptimistic(contract.Contract):
    def make_backend(self, **options):
        return relational.OptimisticBackend("default", **options)


@contract.strategy
class TestInsert(contract.Contract):
    def make_backend(self, **options):
        return relational.InsertBackend("default", **options)


@pytest.mark.engine("postgresql", "mariadb")
class TestObserved(contract.TestObserved):
    def make_backend(self, **options):
        options = {"ttl": self.TTL, **options}
        return relational.PessimisticBackend("default", expiry="observed", **options)


class TestLeastPrivilege(contract.TestLeastPrivilege):
    """On MariaDB and MySQL, the backend needs no DELETE on the table of locks."""

    def make_backend(self, **options):
        return relational.PessimisticBackend("default", **options)


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
        for name in relational.__all__[1:]:
            backend, tokens = getattr(relational, name)("default"), []
            for _ in range(3):
                claim = Claim(key=f"stock:7 {name}", ttl=30)
                tokens.append(backend.acquire(claim).token)
                assert backend.release(claim)
            assert tokens == sorted({*tokens} - {0}), name
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP TRIGGER of_a_test")
