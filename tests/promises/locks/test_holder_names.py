"""The names of holders: which process, which thread or task, and what it does."""

import asyncio
import contextvars
import io
import os
import re
import threading

import pytest
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.urls import reverse
from pytest_django.asserts import assertContains

from dlocks import (
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
    resume_hold,
    run_once,
)
from dlocks.models import HoldRecord
from tests.for_each import LEASES

pytestmark = [pytest.mark.holds, pytest.mark.django_db(transaction=True)]


@LEASES
async def test_the_holder_of_a_coroutine_is_its_task(using):
    """All tasks make their requests in one thread, whose name says nothing of them."""
    lock = db_lock("stock:7", using=using, timeout=0)
    held, seen = asyncio.Event(), asyncio.Event()

    async def work():
        async with lock:
            held.set()
            await seen.wait()

    task = asyncio.create_task(work(), name="recount north")
    await held.wait()
    name = f"{os.uname().nodename}:{os.getpid()}:recount north"
    holder = await lock.aholder()
    assert holder.holder == name
    with pytest.raises(LockTimeout, match="recount north"):
        await lock.aacquire()
    seen.set()
    await task


@pytest.mark.front
def test_the_holder_in_a_thread_is_the_thread(threads):
    lock = db_lock("stock:7", timeout=0)

    def work():
        threading.current_thread().name = "recount south"
        with lock:
            return lock.holder().holder

    other = threads(work)
    other.join(30)
    assert other.results == [f"{os.uname().nodename}:{os.getpid()}:recount south"]


def who():
    """The function of the setting HOLDER in these tests."""
    return WHO[0]()


WHO = [str]


def holders_are(settings, function, *aliases):
    """Let the setting HOLDER of the aliases call a function."""
    WHO[0] = function
    path = f"{__name__}.who"
    settings.DLOCKS = settings.DLOCKS | {
        alias: settings.DLOCKS[alias] | {"HOLDER": path} for alias in aliases
    }


def note_of(text):
    return text.partition(" [")[2].partition("]")[0]


@LEASES
def test_a_note_is_the_last_part_of_the_holder(using, in_other_thread, settings):
    """So people see what the work is. HOLDER says who does it."""
    holders_are(settings, lambda: "anna", using)
    for options, note in (
        ({}, "anna"),
        ({"note": "recount north"}, "anna; recount north"),
    ):
        lock = db_lock("stock:7", using=using, timeout=0, **options)
        with lock as hold:
            holder = lock.holder().holder
            assert holder.partition(" [")[0].count(":") == 2
            assert note_of(holder) == note
            with pytest.raises(LockTimeout, match=rf"held by \S+ \[{note}\] \("):
                in_other_thread(lock.acquire)
            assert note_of(hold.claim.holder) == note
    settings.DLOCKS = settings.DLOCKS | {"default": {"HOLDER": None}}
    with db_lock("stock:7", note="", using="default") as hold:
        assert "[" not in hold.claim.holder


@LEASES
def test_a_holder_has_at_most_255_characters(using):
    """The note is cut. It has no line breaks, as the rest of the name."""
    lock = db_lock("stock:7", using=using, note="ü\n" * 200)
    with lock:
        holder = lock.holder().holder
        assert len(holder) == 255
        assert holder.endswith("]")
        assert "\n" not in holder


@LEASES
async def test_the_function_of_holder_sees_the_context_of_a_task(using, settings):
    """It is called for each task, in Django's sync thread."""
    user = contextvars.ContextVar("user")
    holders_are(settings, user.get, using)

    async def work(name):
        user.set(name)
        async with db_lock(f"stock:{name}", using=using) as hold:
            return note_of(hold.claim.holder)

    tasks = [asyncio.create_task(work(name)) for name in ("anna", "ben")]
    assert await asyncio.gather(*tasks) == ["anna", "ben"]


@pytest.mark.front
def test_an_error_of_the_function_of_holder_is_only_logged(settings, caplog):
    """A lock does not depend on a text for people."""

    def fail():
        raise LookupError("no user")

    holders_are(settings, fail, "memory")
    with db_lock("stock:7", using="memory", note="recount") as hold:
        assert note_of(hold.claim.holder) == "recount"
    assert "HOLDER failed" in caplog.text
    assert "no user" in caplog.text
    for nothing in ("", None):
        holders_are(settings, lambda nothing=nothing: nothing, "memory")
        with db_lock("stock:7", using="memory") as hold:
            assert "[" not in hold.claim.holder


@pytest.mark.front
@pytest.mark.parametrize(
    ("path", "why"),
    [
        (7, "must be a dotted path"),
        ("shop.nowhere", "cannot be imported"),
        (f"{__name__}.WHO", "is not a function"),
    ],
)
def test_a_wrong_holder_setting_is_refused(settings, path, why):
    settings.DLOCKS = {"memory": settings.DLOCKS["memory"] | {"HOLDER": path}}
    with pytest.raises(ImproperlyConfigured, match=rf"'memory'\]\['HOLDER'\].*{why}"):
        db_lock("stock:7", using="memory").acquire()
    (error,) = checks.run_checks(tags=["dlocks"])
    assert (error.id, "HOLDER" in error.msg) == ("dlocks.E002", True)


@pytest.mark.front
def test_a_wrong_note_is_refused():
    with pytest.raises(TypeError, match="note must be a string, not int"):
        db_lock("stock:7", note=7)


@pytest.mark.front
def test_a_note_is_shown_in_lists_the_admin_and_the_history(admin_client, until):
    """Each of them shows the holder, whose last part it is."""
    note = "recount north"
    with db_lock("stock:7", using="recorded", note=note):
        out = io.StringIO()
        call_command("list_locks", stdout=out)
        assert note in out.getvalue()
        page = admin_client.get(reverse("admin:dlocks_resourcelock_changelist"))
        assertContains(page, note)
    until(HoldRecord.objects.exists)
    assert note_of(HoldRecord.objects.get().holder) == note
    page = admin_client.get(reverse("admin:dlocks_holdrecord_changelist"))
    assertContains(page, note)


@pytest.mark.front
def test_a_hidden_holder_hides_its_note(settings):
    settings.DLOCKS_SHOW_HOLDER = False
    with db_lock("stock:7", note="recount north") as hold:
        assert "recount" not in str(hold.lock.holder())
    assert "recount" in hold.claim.holder


@pytest.mark.front
def test_each_kind_of_lock_has_a_note():
    """A hold keeps its note when another process resumes it."""
    note = "recount north"
    for lock in (
        db_lock("a", "b", note=note),
        db_rwlock("c", note=note).read(),
        db_semaphore("d", 2, note=note),
    ):
        with lock:
            assert note_of(lock.holder().holder) == note
    lock = db_lock("stock:7", note=note)

    @run_once("job", min_hold=1, note=note)
    def job():
        return note_of(db_lock("job").holder().holder)

    assert job() == note
    with resume_hold(lock.acquire().detach()) as hold:
        assert note_of(hold.claim.holder) == note


@pytest.mark.front
def test_a_timeout_knows_a_holder_that_waits_with_another_note(
    threads, in_queue, until
):
    last = db_lock("b").acquire()

    def work():
        with db_lock("a", note="north"), db_lock("b", note="south", timeout=30):
            pass

    holder = threads(work)
    in_queue(1, "b")

    def refusal():
        with pytest.raises(LockTimeout) as caught:
            db_lock("a", timeout=0.5).acquire()
        return str(caught.value)

    # A busy machine may delay the heartbeat of the waiter, which then waits unseen.
    said = r"\[north\] .*, and has waited for 'b' for"
    until(lambda: re.search(said, refusal()))
    last.release()
    holder.join(30)
