"""Queues and shared holds in commands and the admin: display and actions."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from dlocks import LockLost, db_lock, db_rwlock, db_semaphore
from tests import jobs, rows
from tests.admin.test_admin import (
    CLEAR,
    FORCE,
    LIST,
    act,
    boss,
    clearer,
    confirm,
    detail,
    fields,
    log,
    page,
    releaser,
    told,
    viewer,
)
from tests.internals import LockClaim, ResourceLock, Ticket, backends, operations
from tests.management.test_commands import answer, nobody_there, refused, run
from tests.volume import volume

__all__ = ["answer", "boss", "clearer", "nobody_there", "releaser", "viewer"]


def counters(key):
    lock = ResourceLock.objects.get(pk=key)
    return lock.waiters, lock.shares


def listed(*flags):
    return {
        lock["key"]: lock for lock in json.loads(run("list_locks", "--json", *flags))
    }


def take_and_give_back(key, **policy):
    try:
        with db_lock(key, **policy) as hold:
            return hold
    finally:
        connections.close_all()


@pytest.mark.django_db
class TestListLocks:
    def test_the_list_shows_shared_holds_and_waiters(self):
        """A shared key has the number of its shared holds, and no exclusive holder.

        It is stale if none of its holders is alive. A claim without a heartbeat does
        not count as a waiter. ``--waiting`` also shows the queue of a free key.
        """
        rows.free("catalogue", holder="writer:1:t")
        rows.shares("catalogue", 1001)
        rows.shares("catalogue", 1002)
        rows.stale_share("catalogue", 900)
        rows.free("left")
        rows.stale_share("left", 901)
        rows.held("busy")
        rows.waits("busy")
        rows.waits("busy")
        rows.dead("busy")
        rows.free("stuck")
        rows.waits("stuck")
        rows.free("unused")
        header, *shown = run("list_locks").splitlines()
        line = next(line for line in shown if line.startswith("catalogue"))
        assert "shared (2)" in line
        assert "writer:1:t" not in line
        line = next(line for line in shown if line.startswith("busy"))
        assert line[: header.index("WAITING") + len("WAITING")].split()[-1] == "2"
        found = listed()
        assert sorted(found) == ["busy", "catalogue", "left"]
        assert found["busy"]["waiting"] == 2
        assert "queue" not in found["busy"]
        assert sorted(listed("--waiting")) == ["busy", "catalogue", "left", "stuck"]
        lock = listed("--held")["catalogue"]
        shown = [lock[name] for name in ("state", "sharing", "holder", "seconds_left")]
        assert shown == ["shared", 2, "", None]
        (left,) = listed("--stale").values()
        assert (left["key"], left["state"]) == ("left", "stale")

    @pytest.mark.driver
    def test_the_waiting_option_shows_queues_and_shared_holds(self):
        """``--waiting`` shows the position, holder, start and mode of each claim.

        A shared hold has its holder, start, remaining time and token. The names in the
        JSON are stable. The secret owner is in no output.
        """
        rows.free("catalogue")
        rows.shares("catalogue", 1001, permits=3)
        rows.held("stock:7")
        rows.waits("stock:7", holder="web-2:1:t", owner_ip=None)
        rows.dead("stock:7", holder="web-3:1:t")
        rows.waits("stock:7", holder="web-4:1:\x1b[31m", shared=True, permits=5)
        rows.held("zoo")
        output = run("list_locks", "--waiting").splitlines()
        starts = [
            r"KEY ",
            r"catalogue +shared \(1\)",
            (
                r"    held by worker-1:815:MainThread \(198\.51\.100\.8\) for \d+ days,"
                r" \d+ days left, shared by up to 3 \(token 1001\)$"
            ),
            r"stock:7",
            r"    1\. web-2:1:t, waiting for \d+ days, exclusive$",
            (
                r"    -\. web-3:1:t \(198\.51\.100\.8\), waiting for \d+ days, no"
                r" heartbeat for \d+ days, exclusive$"
            ),
            (
                r"    2\. web-4:1:\\x1b\[31m \(198\.51\.100\.8\), waiting for \d+ days,"
                r" shared by up to 5$"
            ),
            r"zoo",
        ]
        for line, start in zip(output, starts, strict=True):
            assert re.match(start, line), (start, line)
        for flags in ((), ("--json",)):
            assert rows.OWNER[:8] not in run("list_locks", "--waiting", *flags)
        found = listed("--waiting")
        (share,) = found["catalogue"]["shared_by"]
        assert share.pop("seconds_held") > 0
        assert share.pop("seconds_left") > 0
        common = {
            "holder": "worker-1:815:MainThread",
            "owner_ip": "198.51.100.8",
            "begin_time": "2020-01-02T03:04:05+00:00",
        }
        assert share == {
            **common,
            "state": "held",
            "mode": "shared",
            "permits": 3,
            "end_time": "2190-01-02T03:04:05+00:00",
            "hold_count": 1,
            "token": 1001,
        }
        first, dead, second = found["stock:7"]["queue"]
        assert first.pop("seconds_waited") > 0
        assert first == {
            **common,
            "holder": "web-2:1:t",
            "owner_ip": None,
            "position": 1,
            "state": "waiting",
            "mode": "exclusive",
            "permits": None,
            "holds": [],
        }
        assert (dead["position"], dead["state"]) == (None, "dead")
        shown = [second[name] for name in ("position", "state", "mode", "permits")]
        assert shown == [2, "waiting", "shared", 5]

    @pytest.mark.driver
    def test_many_locks_and_long_queues_are_read_in_pages(
        self, monkeypatch, django_assert_max_num_queries
    ):
        """Ten thousand rows are read in pages, with any keys.

        A page of locks is followed by the claims for them.
        """
        monkeypatch.setattr(operations, "PAGE", 4)
        keys = ["B", "a", "a b", "b", "b:1", "ä", "🔒"]
        for number, key in enumerate(keys):
            rows.held(key)
            for _ in range(number * 2):
                rows.waits(key)
        with django_assert_max_num_queries(2 + 2 * 14):
            found = listed("--waiting")
        for number, key in enumerate(keys):
            positions = [claim["position"] for claim in found[key]["queue"]]
            assert positions == list(range(1, 2 * number + 1))


@pytest.mark.django_db
class TestClearLock:
    def test_one_shared_hold_is_ended_by_its_token(self):
        """``--share`` ends one shared hold and names its holder.

        The other shared holds are unchanged. ``--stale-only`` never ends the shared
        hold of a live holder.
        """
        rows.free("catalogue")
        rows.shares("catalogue", 1001, holder="web-1:1:t")
        rows.shares("catalogue", 1002, holder="web-2:1:t")
        rows.stale_share("catalogue", 1003)
        confirmed = ("--yes", "--reason", "tests")
        one = ("clear_lock", "catalogue", "--share", "1001")
        assert "stale share" in refused(*one, "--stale-only", *confirmed)
        every = ("clear_lock", "catalogue", "--all-shares", "--stale-only")
        assert "1 shared hold was ended." in run(*every, *confirmed)
        left = LockClaim.objects.order_by("version").values_list("version", flat=True)
        assert list(left) == [1001, 1002]
        out = run(*one, *confirmed)
        assert re.search(r"held by web-1:1:t \(198\.51\.100\.8\) for \d+ days, ", out)
        assert "1 shared hold was ended." in out
        assert "fenced off" in out
        assert list(LockClaim.objects.values_list("version", flat=True)) == [1002]
        assert counters("catalogue") == (0, 1)
        assert "with token 1001" in refused(*one, *confirmed)
        assert "with token" in refused(*one[:3], str(10**30), "--yes")

    @pytest.mark.front
    def test_all_shared_holds_are_ended(self, answer):
        """``--all-shares`` needs a confirmation and ends the holds that it showed.

        Without it, ``clear_lock`` shows how to end one or all. A shared hold that has
        ended meanwhile is reported, as an error.
        """
        rows.free("catalogue")
        for token in (1001, 1002):
            rows.shares("catalogue", token)
        message = refused("clear_lock", "catalogue", "--yes")
        assert "--share TOKEN" in message
        assert "--all-shares" in message
        one = ("clear_lock", "catalogue", "--share", "1001")
        assert "not allowed with" in refused(*one, "--all-shares")
        assert LockClaim.objects.count() == 2
        asked = answer("y", before=lambda: rows.shares("catalogue", 1003))
        assert "2 shared holds were ended." in run(
            "clear_lock", "catalogue", "--all-shares", "--reason", "tests"
        )
        assert asked == [
            "A holder may still be working. End 2 shared holds of 'catalogue'? [y/N] "
        ]
        assert list(LockClaim.objects.values_list("version", flat=True)) == [1003]
        answer("n")
        assert "Nothing was changed" in refused(
            "clear_lock", "catalogue", "--all-shares", "--reason", "tests"
        )
        assert counters("catalogue") == (0, 1)
        answer("y", before=LockClaim.objects.all().delete)
        ended = refused(*one[:3], "1003", "--reason", "tests")
        assert "the shared hold with this token has ended" in ended

    @pytest.mark.driver
    def test_a_cleared_key_names_its_next_holder(self):
        """A cleared key with waiters goes to the first of them.

        The output names this holder.
        """
        rows.held("stock:7")
        rows.dead("stock:7", holder="gone:1:t")
        rows.waits("stock:7", holder="web-2:1:t")
        out = run("clear_lock", "stock:7", "--yes", "--reason", "tests")
        assert "'stock:7' was cleared. It is now held by web-2:1:t" in out
        # The dead waiter does not count.
        lock = rows.now("stock:7")
        assert (lock.state, lock.holder, lock.waiters) == ("held", "web-2:1:t", 0)
        assert lock.version > 1001


@pytest.mark.django_db
class TestReap:
    def test_stale_holds_and_dead_claims_are_reaped_and_counted(self):
        """``reap_locks`` ends stale shared holds and reports their number.

        Live ones are unchanged. Claims of dead processes leave the queue, and the row
        is as if they never existed. A reaped lock goes to its first waiter. A claim
        whose lock row is gone is reaped too.
        """
        rows.free("catalogue")
        rows.shares("catalogue", 1001)
        rows.stale_share("catalogue", 1002)
        rows.stale("left")
        rows.waits("left", holder="web-2:1:t")
        rows.held("stock:7")
        for _ in range(3):
            rows.dead("stock:7")
        rows.waits("stock:7", counted=False)
        ResourceLock.objects.filter(pk="stock:7").update(waiters=17, shares=4)
        before = LockClaim.objects.count()
        assert run("reap_locks", "--dry-run") == "2 stale locks would be cleared.\n"
        assert counters("catalogue") == (0, 2)
        assert LockClaim.objects.count() == before
        assert run("reap_locks") == "2 stale locks cleared.\n"
        assert counters("catalogue") == (0, 1)
        lock = rows.now("left")
        assert (lock.state, lock.holder) == ("held", "web-2:1:t")
        assert counters("left") == (0, 0)
        (claim,) = LockClaim.objects.filter(key_resource="stock:7")
        assert claim.counted
        assert counters("stock:7") == (1, 0)
        rows.dead("gone")
        rows.stale_share("gone", 1003)
        rows.shares("alive", 1004)
        rows.dead("alive", counted=False)
        assert run("reap_locks") == "1 stale lock cleared.\n"
        assert not LockClaim.objects.filter(key_resource="gone").exists()
        assert counters("alive") == (0, 1)
        assert run("reap_locks") == "0 stale locks cleared.\n"

    def test_rows_with_claims_are_not_purged(self):
        """``--idle-for`` deletes no row with shared holds or waiters.

        It makes no difference whether they are counted.
        """
        for key in ("shared", "waited", "uncounted", "unused"):
            rows.free(key)
        rows.shares("shared", 1001)
        # A shared claim that only a free permit would admit. The key itself has long
        # been free.
        rows.shares("waited", 1002, permits=1)
        rows.waits("waited", shared=True, permits=1)
        rows.waits("uncounted", counted=False)
        ResourceLock.objects.filter(pk="uncounted").update(waiters=0)
        dry = run("reap_locks", "--idle-for", "1d", "--dry-run")
        assert "1 unused row would be deleted" in dry
        assert "1 unused row deleted" in run("reap_locks", "--idle-for", "1d")
        left = set(ResourceLock.objects.values_list("pk", flat=True))
        assert left == {"shared", "uncounted", "waited"}


@pytest.mark.django_db
class TestAdmin:
    @pytest.mark.driver
    def test_the_list_shows_waiters_and_shared_holds(self, viewer, monkeypatch):
        """A shared key has a badge with a number, and the waiters are a column.

        The list has a filter for shared keys. The page of a lock shows shared holds and
        waiters in order with host, IP, start and mode, and never an owner.
        """
        rows.held("busy")
        rows.waits("busy")
        rows.free("catalogue", holder="writer:1:t")
        rows.shares("catalogue", 1001, holder="web-1:<b>:t", permits=3)
        rows.shares("catalogue", 1002)
        rows.stale_share("catalogue", 1003, holder="web-2:1:t")
        text = page(viewer.get(LIST, {"o": "-6"}))
        assert '<span class="dlocks-state dlocks-shared">shared (2)</span>' in text
        assert '<td class="field-waiting">1</td>' in text
        assert "writer:1:t" not in text
        for state, shown in (("shared", ["catalogue"]), ("free", [])):
            text = page(viewer.get(LIST, {"state": state}))
            assert re.findall(r">(busy|catalogue)</bdi>", text) == shown
        rows.waits("catalogue", holder="web-3:1:t")
        rows.dead("catalogue", holder="web-4:1:t", shared=True)
        text = page(viewer.get(detail("catalogue")))
        shared, line = text.split('id="dlocks-queue"')
        for told_of in (
            "web-1:&lt;b&gt;:t",
            "198.51.100.8",
            "shared by up to 3",
            "1001",
            "dlocks-stale",
            "expired",
        ):
            assert told_of in shared
        for told_of in (
            "web-3:1:t",
            "waiting",
            "exclusive",
            "web-4:1:t",
            "no heartbeat for",
            'title="2020-01-01 22:04:05"',
        ):
            assert told_of in line
        assert 'data-label="Position">1</td>' in line
        assert FORCE not in text
        assert CLEAR not in text
        # The page stays short with any number of waiters.
        monkeypatch.setattr("dlocks.admin.locks.SHOWN", 2)
        for _ in range(4):
            rows.waits("busy")
        text = page(viewer.get(detail("busy")))
        assert "And 3 more." in text
        assert text.count("worker-1:815:MainThread") == 2

    def buttons(self, text):
        return [
            fields(form)
            for form in re.findall(r"<form.*?</form>", text, re.DOTALL)
            if 'name="only"' in form
        ]

    @pytest.mark.driver
    def test_one_shared_hold_or_dead_claim_can_be_ended(self, releaser):
        """The button requires a confirmation and ends one shared hold.

        The log names the user. The button next to a claim without a heartbeat removes
        the claim. A live claim has no button and stays.
        """
        rows.free("cat\nalogue")
        rows.shares("cat\nalogue", 1001, holder="web-1:1:t")
        rows.shares("cat\nalogue", 1002)
        first, _ = self.buttons(page(releaser.get(detail("cat\nalogue"))))
        text = page(releaser.post(LIST, first))
        assert "web-1:1:t" in text
        assert "is not stopped" in text
        assert "Other shared holds of the key are not affected" in text
        assert LockClaim.objects.count() == 2
        form = fields(text)
        assert form["version"] == ["share:1001"]
        assert "The release of 1 lock was forced" in confirm(releaser, form)
        assert list(LockClaim.objects.values_list("version", flat=True)) == [1002]
        assert log()[0][2].startswith(
            "Forced the release of the shared lock held by web-1:1:t (198.51.100.8) for"
            " "
        )
        assert "the shared hold with this token has ended" in confirm(releaser, form)
        assert len(log()) == 1

        rows.held("busy")
        live = rows.waits("busy")
        dead = rows.dead("busy", holder="web-9:1:t")
        (button,) = [
            one
            for one in self.buttons(page(releaser.get(detail("busy"))))
            if one["only"][0] != "1000"
        ]
        form = fields(page(releaser.post(LIST, button)))
        assert form["version"] == [f"claim:{dead.pk}"]
        confirm(releaser, form)
        assert LockClaim.objects.get(key_resource="busy") == live
        assert counters("busy") == (1, 0)
        assert log()[1][2].startswith(
            "Removed a dead claim from the queue: web-9:1:t (198.51.100.8), waiting"
            " for "
        )
        assert "its heartbeat has resumed" in told(
            act(releaser, FORCE, "busy", version=f"claim:{live.pk}")
        )
        assert counters("busy") == (1, 0)

    @pytest.mark.front
    def test_a_selected_shared_key_is_force_released_completely(self, releaser):
        """Force release of a shared key ends the shared holds that it listed."""
        rows.free("catalogue")
        rows.shares("catalogue", 1001)
        rows.shares("catalogue", 1002)
        rows.held("stock:7")
        rows.free("unused")
        text = act(releaser, FORCE, "catalogue", "stock:7", "unused")
        assert "One selected lock is already free and is left out." in text
        form = fields(text)
        assert form["version"] == ["share:1001", "share:1002", "1000"]
        rows.shares("catalogue", 1003)
        confirm(releaser, form)
        assert list(LockClaim.objects.values_list("version", flat=True)) == [1003]
        assert rows.now("stock:7").state == "free"
        assert len(log()) == 3

    @pytest.mark.front
    def test_a_forged_confirmation_ends_no_hold(self, releaser, viewer, clearer):
        """Without the token or the permission there is no release.

        The version of a shared key does not release it as a whole.
        """
        rows.free("a")
        rows.shares("a", 1001)
        for version in ("share:x", "lock:1000", "share:", "x:1", "share:1:2"):
            told_of = told(act(releaser, FORCE, "a", version=version))
            assert "Nothing was changed" in told_of, version
        guesses = ["share:1000", "claim:1001", "share:" + "9" * 40, "claim:-1", "1000"]
        for version in guesses:
            rows.free(version)
            rows.shares(version, 1002)
        act(releaser, FORCE, *guesses, version=guesses)
        assert LockClaim.objects.count() == 1 + len(guesses)
        for client in (viewer, clearer):
            assert not self.buttons(page(client.get(detail("a"))))
            act(client, FORCE, "a", version="share:1001")
            act(client, FORCE, "a", only="share:1001")
        assert LockClaim.objects.filter(key_resource="a").exists()
        assert not log()

    @pytest.mark.driver
    def test_the_stale_action_ends_stale_holds_and_dead_claims(self, clearer):
        """'Clear stale locks' ends everything stale on the selected keys.

        Live holds and claims are unchanged.
        """
        rows.free("catalogue")
        rows.shares("catalogue", 1001)
        rows.stale_share("catalogue", 1002)
        rows.held("busy")
        rows.dead("busy")
        rows.stale("stale")
        rows.stale_share("other", 1003)
        text = told(act(clearer, CLEAR, "catalogue", "busy", "stale"))
        assert "2 stale locks were cleared: catalogue, stale" in text
        assert "1 dead claim was removed from the queue: busy" in text
        assert "left unchanged" not in text
        assert sorted(LockClaim.objects.values_list("version", flat=True)) == [
            1001,
            1003,
        ]
        assert (counters("catalogue"), counters("busy")) == ((0, 1), (0, 0))
        assert rows.now("busy").version == 1000
        assert {
            entry[1]: entry[2].split(" held by ")[0].split(": ")[0] for entry in log()
        } == {
            "catalogue": "Cleared the stale shared lock",
            "busy": "Removed a dead claim from the queue",
            "stale": "Cleared the stale lock",
        }

    @pytest.mark.front
    def test_the_page_of_a_stale_lock_has_a_clear_button(self, clearer):
        """The page of a stale lock has a button to clear it."""
        rows.free("a")
        assert CLEAR not in page(clearer.get(detail("a")))
        rows.stale_share("a", 1001)
        text = page(clearer.get(detail("a")))
        (form,) = [
            fields(form)
            for form in re.findall(r"<form.*?</form>", text, re.DOTALL)
            if CLEAR in form
        ]
        assert "1 stale lock was cleared: a" in confirm(clearer, form)
        assert rows.now("a").state == "free"


@pytest.mark.django_db(transaction=True)
class TestTheLineMovesOn:
    @pytest.mark.driver
    def test_a_forced_release_admits_the_first_waiter(self, releaser, workers, until):
        """A waiter acquires the key or permit as soon as a release is forced.

        It does not wait for the end of the lease. The previous holder gets an error.
        """
        (waiter,) = workers(1)
        for using in ("default", "optimistic", "insert"):
            policy = {"using": using, "renew": False, "ttl": 600}
            mine = db_lock("stock:7", **policy).acquire()
            waiter.start(jobs.hold, "stock:7", using=using, timeout=60)
            until(lambda mine=mine: mine.queue_length() == 1)
            form = fields(act(releaser, FORCE, "stock:7"))
            confirm(releaser, form)
            assert waiter.hear(10) > mine.token
            with pytest.raises(LockLost):
                mine.release()
            waiter.tell()
            assert waiter.hear() == "released"
            mine = db_semaphore("api", permits=1, **policy).acquire()
            waiter.start(jobs.hold, ("api", 1), using=using, timeout=60)
            until(lambda mine=mine: mine.queue_length() == 1)
            logged = len(log())
            act(releaser, FORCE, "api", version=f"share:{mine.token}")
            assert waiter.hear(10) > mine.token
            assert (counters("api"), len(log())) == ((0, 1), logged + 1)
            with pytest.raises(LockLost):
                mine.release()
            waiter.tell()
            assert waiter.hear() == "released"

    @pytest.mark.engine("postgresql", "mariadb")
    def test_a_waiter_is_notified_when_the_request_commits(self, workers, until):
        """With ATOMIC_REQUESTS, the first waiter acquires the key at the commit."""
        (waiter,) = workers(1)
        mine = db_lock("stock:7", renew=False, ttl=600).acquire()
        waiter.start(jobs.hold, "stock:7", timeout=60)
        until(lambda: mine.queue_length() == 1)
        with transaction.atomic():
            assert backends["default"].clear("stock:7", mine.token)
            assert not waiter.pipe.poll(0.5)
        assert waiter.hear(10) > mine.token
        with pytest.raises(LockLost):
            mine.release()
        waiter.tell()
        assert waiter.hear() == "released"

    @pytest.mark.engine("postgresql", "mariadb")
    def test_a_removed_claim_admits_the_next_waiter(self, doomed, workers, until):
        """The claim of a stopped process is removed.

        When the process continues, it queues again and waits for its turn.
        """
        (second,) = workers(1)
        first = doomed()
        with db_lock("stock:7") as mine:
            first.start(jobs.hold, "stock:7", timeout=60)
            until(lambda: mine.queue_length() == 1)
            second.start(jobs.hold, "stock:7", timeout=60)
            until(lambda: mine.queue_length() == 2)
            first.stop()
            until(lambda: mine.queue_length() == 1)
            (dead,) = LockClaim.objects.by_clock().filter(state="dead")
            operations.take_out(backends["default"], "stock:7", dead.pk)
            assert counters("stock:7") == (1, 0)
            first.resume()
            until(lambda: mine.queue_length() == 2)
            assert {claim.pk for claim in LockClaim.objects.all()} >= {dead.pk}
        token = first.hear()
        first.tell()
        assert second.hear() > token
        second.tell()
        assert (first.hear(), second.hear()) == ("released", "released")
        until(lambda: counters("stock:7") == (0, 0))


@pytest.mark.django_db(transaction=True)
class TestRaces:
    @pytest.mark.engine("postgresql", "mariadb")
    def test_the_reaper_ends_no_renewed_shared_hold(self, workers):
        """A shared hold that is renewed in time is never lost.

        It makes no difference how often the reaper runs.
        """
        holders = workers(2)
        for holder in holders:
            holder.start(jobs.hold, ("api", 2), using="brisk", ttl=4.0)
            holder.hear()
        # Each hold is renewed twice.
        end, reaped = time.monotonic() + 3.5, 0
        while time.monotonic() < end:
            reaped += sum(backends["brisk"].reap())
            time.sleep(0.03)
        assert reaped == 0
        assert counters("api") == (0, 2)
        for holder in holders:
            holder.tell()
            assert holder.hear() == "released"

    @pytest.mark.engine("postgresql", "mariadb")
    def test_the_reaper_removes_no_live_waiter(self, workers, tmp_path):
        """Reaping and purging lose no position, no counter and no lock.

        Other processes queue and share keys meanwhile.
        """
        path = tmp_path / "counter"
        path.write_text("0 0")
        counting = workers(3)
        for worker in counting:
            worker.start(
                jobs.count,
                str(path),
                "stock:7",
                times=volume(40),
                scope="lease",
                timeout=60,
            )
        while not all(worker.pipe.poll() for worker in counting):
            assert backends["default"].tidy("stock:7") == (0, 0)
            sum(backends["default"].reap())
            sum(backends["default"].purge(0.0))
        tokens = [token for worker in counting for token in worker.hear()]
        assert len(set(tokens)) == 3 * volume(40)
        assert path.read_text().split()[0] == str(len(tokens))
        assert not LockClaim.objects.exists()

    @pytest.mark.driver
    def test_a_refused_turn_does_not_end_the_wait(self, monkeypatch, workers, until):
        """A notified caller is refused, because the reaper has the row just then.

        It still waits for its turn in the queue.
        """
        (holder,) = workers(1)
        backend = backends["default"]
        queue = backend.enqueue
        monkeypatch.setattr(
            backend, "enqueue", lambda *args: queue(*args) and Ticket(must_retry=True)
        )
        holder.start(jobs.hold, "stock:7")
        token = holder.hear()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(take_and_give_back, "stock:7", timeout=50)
            until(lambda: counters("stock:7") == (1, 0))
            holder.tell()
            hold = waiting.result(60)
        assert hold.token > token
        assert hold.waited < 20
        assert holder.hear() == "released"

    @pytest.mark.engine("postgresql", "mariadb", "mysql")
    def test_maintenance_does_not_wait_for_a_transaction(
        self, in_other_thread, releaser
    ):
        """Commands and the admin do not wait for a transaction.

        They report it and change nothing.
        """
        rows.free("api")
        rows.stale_share("api", 1001)
        dead = rows.dead("api")
        with transaction.atomic():
            ResourceLock.objects.select_for_update().get(pk="api")
            assert in_other_thread(run, "reap_locks") == "0 stale locks cleared.\n"
            for version in ("share:1001", f"claim:{dead.pk}"):
                assert "held by an open transaction" in told(
                    in_other_thread(act, releaser, FORCE, "api", version=version)
                )
            message = in_other_thread(
                refused, "clear_lock", "api", "--all-shares", "--yes"
            )
            assert "held by an open transaction" in message
        assert LockClaim.objects.count() == 2
        assert run("reap_locks") == "1 stale lock cleared.\n"


@pytest.mark.front
@pytest.mark.django_db(transaction=True)
def test_a_shared_key_shows_a_live_holder():
    """The holder of a shared key is a live one rather than a dead one."""
    with db_rwlock("catalogue", timeout=0).read() as hold:
        rows.stale_share("catalogue", 900, holder="gone:1:t", id=-1)
        holder = db_lock("catalogue").holder()
        assert (holder.token, holder.stale) == (hold.token, False)
    LockClaim.objects.filter(version=900).delete()
    assert db_lock("catalogue").holder() is None
