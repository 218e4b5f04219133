"""The successor of the database backends passes the contract on every engine.

Nothing else uses it yet. It replaces ``dlocks.backends.database``.
"""

import pytest

from tests.internals import relational
from tests.testing import test_contract as contract


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
