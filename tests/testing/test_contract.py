"""Every backend passes the backend contract.

``PessimisticBackend`` passes the whole contract on every engine. The other strategies
share most of its code, and pass the rules of their own statements on PostgreSQL and
SQLite. tests/units/database/test_table.py runs these statements on every engine.
"""

import time

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.test import SimpleTestCase

from tests.contract import BackendContract
from tests.internals import (
    TICKS,
    Claim,
    DummyBackend,
    InsertBackend,
    LockClaim,
    MemoryBackend,
    OptimisticBackend,
    PessimisticBackend,
    ResourceLock,
    SessionBackend,
    disconnect,
)
from tests.timing import eventually, in_time


@pytest.mark.django_db
class Contract(BackendContract, SimpleTestCase):
    """The contract for a backend on the database of the tests.

    The rows are deleted by two statements. The flush of a TransactionTestCase also
    closes the connection, and takes longer than most rules.
    """

    databases = {"default"}

    def tearDown(self):
        super().tearDown()
        self.delete_rows()

    def delete_rows(self):
        LockClaim.objects.all().delete()
        ResourceLock.objects.all().delete()


# TestLeastPrivilege runs the same backend on MariaDB and MySQL.
@pytest.mark.engine("sqlite", "postgresql")
class TestPessimistic(Contract):
    def make_backend(self, **options):
        return PessimisticBackend("default", **options)


# The rules whose statements differ between the strategies.
STRATEGY_RULES = {
    "test_a_claim_in_a_transaction_is_free_after_its_end",
    "test_a_held_key_is_refused_without_waiting",
    "test_a_lease_without_renewal_ends_after_its_ttl",
    "test_a_release_hands_over_in_the_order_of_arrival",
    "test_a_released_key_can_stay_taken_for_a_while",
    "test_a_taken_over_claim_changes_nothing_more",
    "test_a_transaction_excludes_others_without_waiting",
    "test_no_newcomer_overtakes_the_queue",
    "test_of_many_successors_one_is_granted",
    "test_one_of_many_is_granted_a_new_key",
    "test_one_of_many_takes_over_a_stale_key",
    "test_readers_and_writers_exclude_each_other",
    "test_several_keys_are_acquired_and_released_together",
    "test_the_holder_is_reported",
    "test_the_same_claim_is_granted_again",
    "test_tokens_strictly_increase",
}


def strategy(case):
    """Let a class have only those rules of the contract, beside its own tests."""
    for name in dir(case):
        if name.startswith("test_") and name not in {*STRATEGY_RULES, *vars(case)}:
            setattr(case, name, None)
    return pytest.mark.whole("postgresql", "sqlite")(case)


@strategy
class TestOptimistic(Contract):
    def make_backend(self, **options):
        return OptimisticBackend("default", **options)


# tests/promises/database/test_observed.py runs these statements on every engine.
@pytest.mark.engine("postgresql")
class TestObserved(Contract):
    """The contract with ``expiry="observed"``, where expiry takes longer.

    Waiters observe the row for a whole ttl before they take it over.
    """

    TTL = 4.0

    def make_backend(self, **options):
        return PessimisticBackend(
            "default", expiry="observed", **{"ttl": self.TTL, **options}
        )

    def claim(self, key="contract:1", **options):
        # The ttl of a claim must not exceed the ttl of the backend.
        return super().claim(key, **{"ttl": self.TTL, **options})

    def granted_in_time(self, claim):
        """Retry as in the contract, but less often, since it takes ten times longer."""
        eventually(lambda: self.backend.acquire(claim), 10.0, pause=0.1)
        return time.monotonic()

    def test_one_of_many_takes_over_a_stale_key(self):
        self.granted(self.claim("contract:stale", ttl=0.05))
        assert self.backend.acquire(self.claim("contract:stale")) is None
        time.sleep(self.TTL)
        assert (
            len(self.race(lambda: self.backend.acquire(self.claim("contract:stale"))))
            == 1
        )

    def test_a_lease_without_renewal_ends_after_its_ttl(self):
        """The ttl of the backend applies, because observers do not know the claim's."""
        self.granted(self.claim(ttl=self.ttl))
        after = time.monotonic()
        took = self.granted_in_time(self.claim()) - after
        assert took >= self.TTL
        in_time(took, self.TTL + 2.0)

    def test_no_key_is_granted_if_one_of_several_is_busy(self):
        self.granted(self.claim("contract:1"))
        assert self.backend.acquire_all(self.several()) is None
        for number in (0, 2):
            self.granted(self.claim(f"contract:{number}"))

    def test_the_holder_is_reported(self):
        claim = self.claim()
        began = time.monotonic()
        self.granted(claim)
        assert self.backend.holder(claim.key).remaining > self.TTL - 1 - (
            time.monotonic() - began
        )


@strategy
class TestInsert(Contract):
    def make_backend(self, **options):
        return InsertBackend("default", **options)

    def test_the_row_exists_only_while_held(self):
        claim = self.claim()
        self.granted(claim)
        self.wait_for_the_clock(claim)
        assert self.backend.release(claim)
        assert not ResourceLock.objects.filter(pk=claim.key).exists()

    def wait_for_the_clock(self, claim):
        """Wait until the database clock has passed the token of the claim.

        Until then the next row could get the same token, so the row is not deleted.
        """
        version = ResourceLock.objects.get(pk=claim.key).version
        with connection.cursor() as cursor:
            ticks = 0
            while ticks <= version:
                cursor.execute(f"SELECT {TICKS[connection.vendor]}")
                (ticks,) = cursor.fetchone()

    def test_the_row_of_a_transaction_is_deleted_after_its_commit(self):
        claim = self.claim(scope="transaction")
        with transaction.atomic():
            self.granted(claim)
            self.wait_for_the_clock(claim)
            self.backend.release(claim)
        assert not ResourceLock.objects.filter(pk=claim.key).exists()


@pytest.mark.engine("postgresql", "mariadb")
class TestSession(Contract):
    engine_queue = True

    def make_backend(self, **options):
        backend = SessionBackend("default", **options)
        self.addCleanup(self.disconnect, backend)
        return backend

    def disconnect(self, backend):
        disconnect(backend)
        # The server notices the end of a session only after a moment.
        other = SessionBackend("default")
        keys = ("contract:1", "contract:2", "contract:new", "contract:stale", "k")
        eventually(lambda: not any(other.holder(key) for key in keys))
        disconnect(other)


@pytest.mark.engine("sqlite")
class TestMemory(Contract):
    def make_backend(self, **options):
        return MemoryBackend("memory", **options)


@pytest.mark.engine("sqlite")
class TestDummy(Contract):
    def make_backend(self, **options):
        return DummyBackend("dummy", **options)


@pytest.mark.django_db(transaction=True)
def test_backends_of_the_family_exclude_each_other():
    family = [
        kind("default", grace=0)
        for kind in (PessimisticBackend, OptimisticBackend, InsertBackend)
    ]
    tokens = []
    for mine in family * 2:
        claim = Claim(key="shared", ttl=30)
        tokens.append(mine.acquire(claim).token)
        for other in family:
            assert other.acquire(Claim(key="shared", ttl=30)) is None
        assert mine.release(claim)
    assert tokens == sorted(set(tokens))


@pytest.mark.engine("mariadb", "mysql")
class TestLeastPrivilege(Contract):
    """A role with SELECT, INSERT and UPDATE can do everything but delete.

    The rights on PostgreSQL are tested one by one in
    tests/promises/database/test_least_privilege.py.
    """

    role = "dlocks_app"

    def make_backend(self, **options):
        return PessimisticBackend("default", **options)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        name = connection.ops.quote_name(connection.settings_dict["NAME"])
        # It deletes the rows of each test, which the role cannot do.
        cls.admin = connection.copy()
        with cls.admin.cursor() as cursor:
            cursor.execute(
                f"CREATE USER IF NOT EXISTS {cls.role}@'127.0.0.1' IDENTIFIED BY %s",
                [connection.settings_dict["PASSWORD"]],
            )
            for table, rights in (
                ("dlocks_resourcelock", "SELECT, INSERT, UPDATE"),
                ("dlocks_lockclaim", "SELECT, INSERT, UPDATE, DELETE"),
            ):
                cursor.execute(
                    f"GRANT {rights} ON {name}.{table} TO {cls.role}@'127.0.0.1'"
                )
        cls.become(cls.role)

    @classmethod
    def tearDownClass(cls):
        cls.become(cls.admin.settings_dict["USER"])
        cls.admin.close()
        super().tearDownClass()

    @staticmethod
    def become(user):
        connections.close_all()
        connection.settings_dict["USER"] = user

    def delete_rows(self):
        with self.admin.cursor() as cursor:
            cursor.execute("DELETE FROM dlocks_lockclaim")
            cursor.execute("DELETE FROM dlocks_resourcelock")

    def test_the_role_cannot_delete_locks(self):
        with pytest.raises(DatabaseError), connection.cursor() as cursor:
            cursor.execute("DELETE FROM dlocks_resourcelock")
