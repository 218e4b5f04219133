"""Every backend keeps the rules of the waist, on every engine."""

import pytest
from django.db import connection, connections
from django.test import TransactionTestCase, override_settings

from dlocks.backends.base import Claim
from dlocks.backends.database import InsertBackend, OptimisticBackend, PessimisticBackend
from dlocks.backends.dummy import DummyBackend
from dlocks.backends.memory import MemoryBackend
from dlocks.models import ResourceLock
from dlocks.testing import BackendContract

ADMIN = connection.settings_dict["USER"]


class TestPessimistic(BackendContract, TransactionTestCase):
    available_apps = ["dlocks"]

    def make_backend(self, **options):
        return PessimisticBackend("default", **options)


class TestOptimistic(BackendContract, TransactionTestCase):
    available_apps = ["dlocks"]

    def make_backend(self, **options):
        return OptimisticBackend("default", **options)


class TestInsert(BackendContract, TransactionTestCase):
    available_apps = ["dlocks"]

    def make_backend(self, **options):
        return InsertBackend("default", **options)

    def test_the_row_exists_only_while_held(self):
        claim = self.claim()
        self.granted(claim)
        assert ResourceLock.objects.filter(pk=claim.key).exists()
        assert self.backend.release(claim)
        assert not ResourceLock.objects.filter(pk=claim.key, version__lt=self.clock() - 10_000).exists()

    def clock(self):
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT {self.backend.dialect.ticks}")
            return cursor.fetchone()[0]

    def test_the_row_of_a_transaction_goes_after_its_commit(self):
        claim = self.claim(scope="transaction")
        self.in_transaction(lambda: (self.granted(claim), self.backend.release(claim)))
        assert not ResourceLock.objects.filter(pk=claim.key, version__lt=self.clock() - 10_000).exists()


class TestMemory(BackendContract, TransactionTestCase):
    available_apps = ["dlocks"]

    def make_backend(self, **options):
        return MemoryBackend("memory", **options)


class TestDummy(BackendContract, TransactionTestCase):
    available_apps = ["dlocks"]

    def make_backend(self, **options):
        return DummyBackend("dummy", **options)


class TestEachOther(TransactionTestCase):
    """The backends of the database family exclude each other on the same row."""

    available_apps = ["dlocks"]

    def test_who_has_a_key_has_it_for_all_of_them(self):
        family = [kind("default", grace=0) for kind in (PessimisticBackend, OptimisticBackend, InsertBackend)]
        tokens = []
        for mine in family * 2:
            claim = Claim(key="shared", ttl=30)
            tokens.append(mine.acquire(claim).token)
            for other in family:
                assert other.acquire(Claim(key="shared", ttl=30)) is None
            assert mine.release(claim)
        assert tokens == sorted(set(tokens))


@pytest.mark.engine("postgresql", "mariadb")
class LeastPrivilege(BackendContract, TransactionTestCase):
    """A role that may SELECT, INSERT and UPDATE is enough for all but deleting."""

    available_apps = ["dlocks"]

    role = "dlocks_app"

    def setUp(self):
        super().setUp()
        self.be_admin()
        name = connection.ops.quote_name(connection.settings_dict["NAME"])
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [self.role])
                if not cursor.fetchone():
                    cursor.execute(f"CREATE ROLE {self.role} LOGIN")
                cursor.execute(f"GRANT SELECT, INSERT, UPDATE ON dlocks_resourcelock TO {self.role}")
            else:
                cursor.execute(f"CREATE USER IF NOT EXISTS {self.role}@'127.0.0.1'")
                cursor.execute(f"GRANT SELECT, INSERT, UPDATE ON {name}.dlocks_resourcelock TO {self.role}@'127.0.0.1'")
        self.become(self.role)
        self.addCleanup(self.be_admin)

    def become(self, user):
        connections.close_all()
        connection.settings_dict["USER"] = user

    def be_admin(self):
        self.become(ADMIN)

    def test_it_is_the_role_that_is_tested(self):
        from django.db.utils import DatabaseError

        with connection.cursor() as cursor, pytest.raises(DatabaseError):
            cursor.execute("DELETE FROM dlocks_resourcelock")


class TestLeastPrivilegePessimistic(LeastPrivilege):
    def make_backend(self, **options):
        return PessimisticBackend("default", **options)


class TestLeastPrivilegeOptimistic(LeastPrivilege):
    def make_backend(self, **options):
        return OptimisticBackend("default", **options)


@override_settings(DLOCKS={"default": {"BACKEND": "dlocks.backends.memory.MemoryBackend"}})
def test_the_settings_choose_the_backend():
    from dlocks.conf import backends

    assert isinstance(backends["default"], MemoryBackend)
