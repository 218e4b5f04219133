"""Helpers for users' own tests, as in docs/how-to/testing.md."""

import dataclasses
import subprocess
import sys
import threading
import time
import tomllib
import unittest

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.test import SimpleTestCase, TestCase, override_settings

from dlocks import (
    LockError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    lock_lost,
)
from dlocks.testing import (
    abandoned,
    expire,
    frozen_clock,
    held_elsewhere,
    lose,
    override_locks,
)
from tests import pages
from tests.for_each import for_each
from tests.promises.received import received
from tests.scripts import ROOT
from tests.sync_and_async import sync_and_async
from tests.timing import in_time

pytestmark = pytest.mark.front

database = pytest.mark.django_db(transaction=True)

EVERY = for_each("using", ["default", "optimistic", "insert", "memory", "prefixed"])


# Keys held by another holder.


@pytest.mark.driver
@database
@EVERY
def test_held_elsewhere_makes_a_key_busy_during_the_block(using):
    """A key that is already held is refused."""
    with held_elsewhere("stock:7", using=using, holder="web-2:77:x", ttl=200):
        with pytest.raises(
            LockTimeout, match=r"held by web-2:77:x \(192\.0\.2\.1\)"
        ) as caught:
            db_lock("stock:7", using=using, timeout=0).acquire()
        assert 190 < caught.value.holder.remaining < 200.001
    with (
        db_lock("stock:7", using=using, timeout=0),
        pytest.raises(RuntimeError, match="already held by"),
        held_elsewhere("stock:7", using=using),
    ):
        raise AssertionError


@pytest.mark.storage
@database
@EVERY
def test_an_abandoned_key_is_stale_and_taken_over(using):
    abandoned("stock:7", using=using, holder="web-2:77:x")
    holder = db_lock("stock:7", using=using).holder()
    assert (holder.stale, holder.holder) == (True, "web-2:77:x")
    with db_lock("stock:7", using=using, timeout=0) as hold:
        assert hold.takeover
    with db_lock("stock:7", using=using, timeout=0) as hold:
        assert not hold.takeover


def test_a_key_that_cannot_be_abandoned_stays_free(settings):
    memory, quorum = "memory.MemoryBackend", "quorum.QuorumBackend"
    settings.DLOCKS = {
        "member": {"BACKEND": f"dlocks.backends.{memory}"},
        "quorum": {
            "BACKEND": f"dlocks.backends.{quorum}",
            "OPTIONS": {"of": ["member"]},
        },
    }
    with pytest.raises(NotImplementedError, match="A lease of QuorumBackend cannot"):
        abandoned("stock:7", using="quorum")
    assert db_lock("stock:7", using="quorum").holder() is None


# The end of a lease.


@pytest.mark.storage
@database
@for_each(
    "lock",
    [
        db_semaphore("a", 2),
        db_rwlock("a").read(),
        db_rwlock("a").write(),
        db_lock("a", "b"),
    ],
)
def test_a_lease_of_every_kind_can_be_lost(lock):
    told = []
    hold = dataclasses.replace(lock, on_lost=told.append).acquire()
    lose(hold)
    assert told == [hold]
    for use in (hold.check, hold.release):
        with pytest.raises(LockLost):
            use()
    assert told == [hold]
    with db_lock("a", timeout=0):
        pass


@database
@EVERY
def test_a_lost_lease_is_reported_at_once_as_a_takeover(using):
    told = []
    lock = db_lock("stock:7", using=using, on_lost=told.append)
    with received(lock_lost, lambda hold, **_: told.append(hold)):
        with pytest.raises(LockLost, match="took it over"), lock as hold:
            lose(hold)
            assert told == [hold, hold]
            assert not hold.held
            with db_lock("other", using=using):
                pass
    with db_lock("stock:7", using=using, timeout=0) as after:
        assert after.token > hold.token + 1


@database
@EVERY
def test_a_lease_for_which_callers_wait_can_be_lost(using, threads, until):
    """One of them may take over the key before the simulated caller."""
    lock = db_lock("stock:7", using=using)
    with pytest.raises(LockLost, match="took it over"), lock as hold:
        waiter = threads(lambda: db_lock("stock:7", using=using).acquire().token)
        until(hold.queue_length)
        lose(hold)
        assert not hold.held
        waiter.join()
    assert waiter.results[0] > hold.token


@database
def test_only_a_lease_of_this_process_can_be_ended():
    with pytest.raises(RuntimeError, match="no lease on 'stock:7'"):
        lose("stock:7")
    with (
        transaction.atomic(),
        db_lock("stock:7") as hold,
        pytest.raises(RuntimeError, match="override_locks"),
    ):
        expire(hold)


class TestInsideOfATestCase(TestCase):
    """A TestCase, whose keys held elsewhere are released with the test."""

    @pytest.mark.driver
    def test_a_key_is_busy_or_abandoned(self):
        with held_elsewhere("stock:7"):
            with self.assertRaises(LockError):
                db_lock("stock:7", timeout=0).acquire()
        with db_lock("stock:7", timeout=0):
            pass
        abandoned("stock:7")
        self.assertTrue(db_lock("stock:7").holder().stale)
        with db_lock("stock:7", timeout=0.3) as hold:
            self.assertTrue(hold.takeover)


# Other backends.


def test_override_locks_gives_every_alias_a_new_memory_backend(in_other_thread):
    options = {"ttl": 7, "prefix": "p:", "database": "d"}
    lock = db_lock("stock:7", using="other", timeout=0)
    with override_settings(DLOCKS={"other": {"BACKEND": "x.Y", "OPTIONS": options}}):
        with override_locks(timeout=3):
            hold = lock.acquire()
            assert 6 < hold.remaining <= 7
            assert lock.holder().key == "p:stock:7"
            with db_lock("stock:7") as default:
                assert default.held
                with pytest.raises(LockTimeout, match="within 3 s"), frozen_clock():
                    in_other_thread(db_lock("stock:7").acquire)
            hold.release()
        with pytest.raises(ImproperlyConfigured):
            lock.acquire()


def test_dummy_locks_exclude_no_caller(in_other_thread):
    """No key is held, so none can be abandoned."""

    @override_locks("dummy")
    def work():
        with db_lock("stock:7"):
            in_other_thread(db_lock("stock:7", timeout=0).acquire).release()
        with pytest.raises(RuntimeError, match="DummyBackend"):
            abandoned("stock:7")

    work()


def test_override_locks_refuses_unknown_arguments():
    with pytest.raises(ValueError, match=r"override_locks\(\) takes"):
        override_locks(backend="redis")
    with pytest.raises(TypeError, match=r"override_locks\(\) takes"):
        override_locks(database="x")


# Time.


@pytest.mark.usefixtures("memory_locks")
@sync_and_async
async def test_waiting_advances_a_frozen_clock_at_once(do):
    began = time.monotonic()
    with frozen_clock() as frozen:
        held = held_elsewhere("stock:7")
        await do.sync(held.__enter__)
        before = frozen()
        with pytest.raises(LockTimeout, match=r"within 59\.97 s"):
            await do.ask(db_lock("stock:7", timeout=59.97), "acquire")
        assert frozen() - before == pytest.approx(59.97)
        await do.sync(held.__exit__, None, None, None)
    in_time(time.monotonic() - began, 30)


@pytest.mark.usefixtures("memory_locks")
def test_a_tick_renews_due_leases_and_detects_losses(frozen_lock_clock):
    kept = db_lock("kept", ttl=30).acquire()
    left = db_lock("left", ttl=30, renew=False).acquire()
    for _ in range(10):
        frozen_lock_clock.tick(11)
        assert kept.remaining == 30
    assert not left.held
    kept.release()
    with pytest.raises(LockLost):
        left.release()


@database
def test_a_frozen_clock_does_not_stop_the_databases_clock(frozen_lock_clock):
    with db_lock("stock:7", ttl=30) as hold:
        frozen_lock_clock.tick(29)
        assert hold.remaining == 30
        hold.check()


@pytest.mark.usefixtures("memory_locks")
def test_the_clock_runs_again_afterwards(until):
    with frozen_clock() as frozen:
        frozen.tick(1000)
    with db_lock("stock:7", ttl=30, renew=False) as hold:
        assert hold.remaining > 29
        until(lambda: hold.remaining < 29.9)


@database
def test_a_wait_on_a_frozen_clock_soon_needs_no_connection(until):
    """Otherwise the test database could not be dropped."""
    with held_elsewhere("stock:7"), frozen_clock(), pytest.raises(LockTimeout):
        db_lock("stock:7", timeout=60).acquire()
    until(lambda: "dlocks-waiting" not in {one.name for one in threading.enumerate()})


def pass_tests(*cases):
    """Run the tests of some classes, which pass. Return the number of tests."""
    load = unittest.defaultTestLoader.loadTestsFromTestCase
    result = unittest.TestSuite(map(load, cases)).run(unittest.TestResult())
    assert result.errors + result.failures == []
    return result.testsRun


def test_a_hold_left_by_a_class_does_not_affect_the_next():
    """Otherwise the next class would enter a hold that no longer excludes.

    ``override_locks()`` decorates both classes.
    """
    left = []

    @override_locks()
    class First(SimpleTestCase):
        def test_leave_a_hold(self):
            left.append(db_lock("left").acquire())

    @override_locks()
    class Second(SimpleTestCase):
        def test_acquire_the_same_key(self):
            with db_lock("left") as hold:
                self.assertEqual(hold.count, 1)
                self.assertIsNot(hold, left[0])
                self.assertTrue(db_lock("left").locked())

    pass_tests(First, Second)
    assert not left[0].held


# The examples of the page, and the pytest plugin.


def test_the_documented_test_cases_pass():
    page = pages.run("how-to/testing")
    assert page.SimpleTestCase is SimpleTestCase
    classes = [value for value in vars(page).values() if isinstance(value, type)]
    cases = [one for one in classes if issubclass(one, SimpleTestCase)]
    assert pass_tests(*(one for one in cases if one is not SimpleTestCase)) == 7


def test_the_order_of_the_fixtures_does_not_matter(lock_held_elsewhere, db):
    """The key is released before the test loses its access to the database."""
    lock_held_elsewhere("stock:7")
    with pytest.raises(LockTimeout):
        db_lock("stock:7", timeout=0).acquire()


def test_the_documented_fixtures_work(tmp_path):
    """In a project of its own, pytest finds them by the entry point alone.

    The plugin imports nothing before its use.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "dlocks-0.dist-info"
    installed.mkdir()
    metadata = "Metadata-Version: 2.1\nName: dlocks\nVersion: 0\n"
    (installed / "METADATA").write_text(metadata)
    ((name, module),) = project["entry-points"]["pytest11"].items()
    (installed / "entry_points.txt").write_text(f"[pytest11]\n{name} = {module}\n")
    (tmp_path / "settings.py").write_text(
        "SECRET_KEY = 'x'\nINSTALLED_APPS = ['dlocks']\n"
    )
    code = "\n".join(["from dlocks import db_lock", pages.blocks("how-to/testing")[-1]])
    (tmp_path / "test_it.py").write_text(
        code
        + "\ndef test_dummy(dummy_locks):\n    assert db_lock('x').acquire().held\n"
    )
    run = (
        "import sys, pytest, dlocks.pytest_plugin\n"
        "print(names := sorted(name for name in sys.modules if name.split('.')[0] in"
        " {'django', 'dlocks', 'asgiref', 'opentelemetry'}))\n"
        # pytest warns of plugins that were imported before.
        "for name in names: del sys.modules[name]\n"
        "sys.exit(pytest.main(['-q', '-pno:cacheprovider', '-Werror', '--ds=settings',"
        " '--rootdir=.', 'test_it.py']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", run],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("['dlocks', 'dlocks.pytest_plugin']\n")
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_every_public_name_can_be_imported():
    import dlocks

    assert all(getattr(dlocks, name) is not None for name in dlocks.__all__)
    assert set(dlocks.__all__) <= set(dir(dlocks))
    with pytest.raises(AttributeError, match="'nonsense'"):
        dlocks.nonsense  # noqa: B018
