"""A worker that acquires keys, changes protected data and records it all.

It uses the public API. The history has one JSON array per line. Each line is written by
one ``write()``, so a killed process loses none. Times are from ``CLOCK_MONOTONIC``,
which the processes of one machine share. The first two items are the kind of the record
and the number of the hold within its process:

    ask   time, key, mode, scope, permits, ttl, alias, timeout
                                             before the lock is requested
    got   time, token, remaining             the lock was acquired
    held  time, remaining                    ``hold.held`` was true then
    lost  time                               it was false, or LockLost was raised
    end   time                               before the release or the commit
    gone  time, error                        it was answered, "" on success
    no    time, error                        the lock was not acquired
    put   time, register, value read, error  a read-modify-write was done or failed
    max   seconds                            the ``max_hold`` of the hold
    struck  time                             an asynchronous exception ended it
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import (
    DatabaseError,
    InterfaceError,
    connection,
    connections,
    transaction,
)

from dlocks import (
    Hold,
    LockError,
    LockLost,
    LockTimeout,
    db_lock,
    db_rwlock,
    db_semaphore,
)
from tests.models import Machine
from tests.nemesis.status_page import ASKING, HOLDING, IDLE, LEAVING, StatusPage
from tests.nemesis.task import PERMITS, Task, kind_of, now
from tests.processes import go_far_away
from tests.strikes import STRUCK, Strike

# This includes the driver's own errors. Django does not wrap errors from closing a
# cursor.
TROUBLES = (LockError, DatabaseError, InterfaceError, connection.Database.Error)
# Options that limit the wait for a silent server, and that of the server for a silent
# client. A transaction that was cut off would keep the rows of the application locked.
GIVING_UP = {
    "postgresql": {
        "connect_timeout": 3,
        "tcp_user_timeout": 5000,
        "options": "-c tcp_keepalives_idle=5 -c tcp_keepalives_interval=1"
        " -c tcp_keepalives_count=5",
    },
    "mysql": {
        "connect_timeout": 3,
        "read_timeout": 5,
        "write_timeout": 5,
        "init_command": "SET SESSION wait_timeout = 20",
    },
}

# Seconds of each minute in which asynchronous exceptions strike.
STRIKING_SECONDS = 10


class Recorder:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, kind: str, number: int, *rest: Any) -> None:
        os.write(self._file, (json.dumps([kind, number, *rest]) + "\n").encode())


class Worker:
    def __init__(self, task: Task) -> None:
        directory = Path(task.directory)
        self.task, self.plan = task, task.plan
        self.random = random.Random(task.seed)
        self.status_page = StatusPage(directory / "status-page")
        self.write = Recorder(directory / f"worker-{task.slot}-{os.getpid()}.history")
        # The number of the current hold, and the last one that was used.
        self.number = self.last_number = 0
        self.forgotten: list[Hold] = []

    def run(self) -> None:
        while not self.status_page.finished:
            self.draw_number()
            key = self.random.choice(self.plan.keys)
            try:
                if self.random.random() < self.plan.nested:
                    self.nest()
                else:
                    self.turn(key)
            finally:
                self.status_page.say(self.task.slot, IDLE, 0)
            if self.random.random() < 0.2:
                time.sleep(self.random.uniform(0, self.plan.think))

    # One attempt.

    def turn(self, key: str) -> None:
        kind = kind_of(key)
        timeout = self.random.choice([0, 0.3, 15.0, 15.0, 15.0])
        in_transaction = self.plan.transactions and (
            not self.plan.leases or self.random.random() < 0.4
        )
        policy: dict[str, Any] = {
            "using": self.random.choice(self.plan.aliases),
            "timeout": timeout,
        }
        shared = kind != "x" and self.random.random() < 0.7
        if in_transaction and not shared:
            self.transact(key, policy)
        elif self.plan.leases:
            self.lease(key, policy, shared=shared)

    def draw_number(self) -> None:
        self.last_number += 1
        self.number = self.last_number

    # Several keys, in random order.

    def nest(self) -> None:
        keys = self.random.sample(self.plan.keys, self.random.choice([2, 2, 3]))
        policy = {"using": self.random.choice(self.plan.aliases), "timeout": 15.0}
        if self.plan.transactions and self.random.random() < 0.4:
            self.nest_in_transaction(keys, policy)
        else:
            self.nest_leases(keys, {**policy, "ttl": self.plan.ttl})

    def nest_leases(self, keys: list[str], policy: dict[str, Any]) -> None:
        hold = self.acquire(keys[0], policy, shared=False)
        if hold is None:
            return
        number = self.number
        self.think(hold, at_most=self.plan.think)
        if len(keys) > 1:
            self.draw_number()
            self.nest_leases(keys[1:], policy)
        self.number = number
        self.release(hold)

    def nest_in_transaction(self, keys: list[str], policy: dict[str, Any]) -> None:
        numbers, answer = [], ""
        try:
            with transaction.atomic():
                for key in keys:
                    self.ask(key, "x", "transaction", policy)
                    try:
                        hold = self.lock(key, policy, shared=False).acquire()
                    except TROUBLES as error:
                        answer = type(error).__name__
                        self.refused_in_transaction(error)
                        break
                    self.got(hold)
                    numbers.append(self.number)
                    self.think(hold, at_most=self.plan.think)
                    self.draw_number()
                for number in numbers:
                    self.write("end", number, now())
        except TROUBLES as error:
            answer = type(error).__name__
            with contextlib.suppress(Exception):
                connection.close()
        for number in numbers:
            self.write("gone", number, now(), answer)

    def lock(self, key: str, policy: dict[str, Any], *, shared: bool) -> Any:
        if self.plan.peer:
            from tests.nemesis.peers import PEERS

            return PEERS[self.plan.peer](self.plan, key, policy["timeout"])
        if not self.plan.locked:
            return db_lock(key, **{**policy, "using": "dummy"})
        if shared and kind_of(key) == "rw":
            return db_rwlock(key, **policy).read()
        if shared:
            return db_semaphore(key, PERMITS, **policy)
        return db_lock(key, **policy)

    def ask(self, key: str, mode: str, scope: str, policy: dict[str, Any]) -> None:
        self.status_page.say(self.task.slot, ASKING, self.plan.keys.index(key))
        ttl = policy.get("ttl", self.plan.ttl)
        permits = PERMITS if kind_of(key) == "semaphore" else 0
        self.write(
            "ask",
            self.number,
            now(),
            key,
            mode,
            scope,
            permits,
            ttl,
            policy["using"],
            policy["timeout"],
        )

    def refused(self, error: BaseException) -> None:
        self.write("no", self.number, now(), type(error).__name__)
        if not isinstance(error, LockTimeout):
            # This also discards an error state of Django's connection.
            with contextlib.suppress(Exception):
                connection.close()
            time.sleep(self.random.uniform(0.01, 0.1))

    def got(self, hold: Hold) -> None:
        # The time is read first, here and below. The record therefore never claims a
        # longer hold than the hold itself.
        moment = now()
        self.write("got", self.number, moment, hold.token, finite(hold.remaining))
        self.status_page.say(self.task.slot, HOLDING)

    def look(self, hold: Hold) -> bool:
        moment = now()
        remaining = finite(hold.remaining)
        held = hold.held
        self.write(
            *(
                ("held", self.number, moment, remaining)
                if held
                else ("lost", self.number, moment)
            )
        )
        return held

    def transact(self, key: str, policy: dict[str, Any]) -> None:
        """Read, modify and write under a lock that belongs to the transaction."""
        register = f"transaction {key}"
        value, answer = None, ""
        try:
            with transaction.atomic():
                if self.random.random() < 0.3:
                    read_register("nothing")
                    time.sleep(self.random.uniform(0, self.plan.think))
                self.ask(key, "x", "transaction", policy)
                try:
                    hold = self.lock(key, policy, shared=False).acquire()
                except TROUBLES as error:
                    self.refused_in_transaction(error)
                    return
                self.got(hold)
                value = read_register(register)
                self.think(hold, at_most=self.plan.think)
                write_register(register, value + 1)
                hold.release()
                self.status_page.say(self.task.slot, LEAVING)
                self.write("end", self.number, now())
        except TROUBLES as error:
            answer = type(error).__name__
            with contextlib.suppress(Exception):
                connection.close()
        if value is not None:
            self.write("put", self.number, now(), register, value, answer)
        self.write("gone", self.number, now(), answer)

    def refused_in_transaction(self, error: BaseException) -> None:
        self.write("no", self.number, now(), type(error).__name__)
        transaction.set_rollback(True)

    def lease(self, key: str, policy: dict[str, Any], *, shared: bool) -> None:
        odd = self.oddity()
        policy["ttl"] = self.plan.ttl
        if odd == "unrenewed":
            policy["renew"] = False
        elif odd == "hung":
            policy["max_hold"] = self.plan.ttl * 0.8
            self.write("max", self.number, policy["max_hold"])
        if odd == "abandoned":
            self.in_thread(key, policy, shared=shared)
            return
        if odd == "struck":
            self.be_struck(key, policy, shared=shared)
            return
        hold = self.acquire(key, policy, shared=shared)
        if hold is None:
            return
        if odd == "passed on":
            self.pass_on(hold)
            return
        try:
            if odd == "nested":
                self.enter_again(hold, key, policy, shared=shared)
            elif odd == "visited":
                self.be_visited(hold)
            self.body(hold, key, odd, shared=shared)
        except TROUBLES:
            with contextlib.suppress(Exception):
                connection.close()
        self.release(hold)

    def enter_again(
        self, hold: Hold, key: str, policy: dict[str, Any], *, shared: bool
    ) -> None:
        again = self.lock(key, policy, shared=shared).acquire()
        try:
            if self.look(hold) and again.token != hold.token:
                raise AssertionError(
                    f"Entered again, {key!r} has the token {again.token} instead of"
                    f" {hold.token}"
                )
            self.think(again, at_most=self.plan.think)
        finally:
            again.release()

    def oddity(self) -> str:
        if self.plan.oddity:
            return self.plan.oddity if self.random.random() < 0.5 else ""
        if not self.plan.oddities or self.random.random() > self.plan.odd:
            return ""
        odd = self.random.choice(
            [
                "unrenewed", "unrenewed", "hung", "forked", "greedy", "abandoned",
                "long", "long", "nested", "visited", "passed on", "struck",
            ]
        )  # fmt: skip
        # A strike excuses a key that stays for its ttl, so for most of the time there
        # are none.
        return odd if odd != "struck" or now() % 60 < STRIKING_SECONDS else ""

    def acquire(self, key: str, policy: dict[str, Any], *, shared: bool) -> Hold | None:
        self.ask(key, "s" if shared else "x", "lease", policy)
        try:
            hold: Hold = self.lock(key, policy, shared=shared).acquire()
        except TROUBLES as error:
            self.refused(error)
            return None
        self.got(hold)
        return hold

    def body(self, hold: Hold, key: str, odd: str, *, shared: bool) -> None:
        if odd in {"unrenewed", "hung"}:
            # Hold for as long as possible, to the last moment.
            end = now() + 3 * self.plan.ttl
            while self.look(hold) and now() < end:
                time.sleep(0.02)
            return
        if odd == "forked":
            self.fork(hold)
        elif odd == "greedy":
            keep_the_gil(self.plan.ttl * 0.5)
        elif odd == "long":
            self.think(hold, at_most=1.5 * self.plan.ttl)
        if shared:
            self.think(hold, at_most=self.plan.think)
            return
        name = f"unfenced {key}"
        unfenced = read_register(name)
        if not isinstance(hold, Hold):
            self.think(hold, at_most=self.plan.think)
            self.put(name, unfenced, lambda: write_register(name, unfenced + 1))
            return
        # The row is claimed before it is read. The value is then the last holder's, and
        # no older token can write.
        machine = Machine.objects.claim(self.plan.keys.index(key) + 1, hold)
        fenced = machine.steps
        self.think(hold, at_most=self.plan.think)
        self.put(name, unfenced, lambda: write_register(name, unfenced + 1))
        machine.steps = fenced + 1
        self.put(f"fenced {key}", fenced, machine.save)
        self.guarded(hold, key)

    def guarded(self, hold: Hold, key: str) -> None:
        """Read, modify and write in a transaction guarded by the lease.

        It commits under the lease or not at all. Peers without ``atomic()`` skip it.
        """
        if not hasattr(hold, "atomic"):
            return
        register, value, answer = f"guarded {key}", None, ""
        try:
            with hold.atomic() if self.plan.locked else transaction.atomic():
                value = read_register(register)
                self.think(hold, at_most=self.plan.think / 3)
                write_register(register, value + 1)
        except TROUBLES as error:
            answer = type(error).__name__
        if value is not None:
            self.write("put", self.number, now(), register, value, answer)

    def put(self, register: str, value: int, write: Callable[[], object]) -> None:
        answer = ""
        try:
            write()
        except TROUBLES as error:
            answer = type(error).__name__
        self.write("put", self.number, now(), register, value, answer)

    def think(self, hold: Hold, *, at_most: float) -> None:
        end = now() + self.random.uniform(0, at_most)
        while True:
            self.look(hold)
            left = end - now()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))

    def leave(self, hold: Hold) -> None:
        """Record that the hold is about to be released."""
        self.look(hold)
        self.status_page.say(self.task.slot, LEAVING)
        self.write("end", self.number, now())

    def release(self, hold: Hold) -> None:
        self.leave(hold)
        answer = ""
        try:
            hold.release()
        except TROUBLES as error:
            answer = type(error).__name__
            if not isinstance(error, LockLost):
                with contextlib.suppress(Exception):
                    connection.close()
        self.write("gone", self.number, now(), answer)

    # Oddities.

    def fork(self, hold: Hold) -> None:
        """Fork a child that releases its parent's hold."""
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                # The child must never use the parent's connection.
                for inherited in connections.all(initialized_only=True):
                    inherited.connection = None
                with contextlib.suppress(LockLost):
                    hold.release()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)

    def in_thread(self, key: str, policy: dict[str, Any], *, shared: bool) -> None:
        """Start a thread that ends without releasing its hold.

        A reference to the hold remains.
        """

        def run() -> None:
            hold = self.acquire(key, policy, shared=shared)
            if hold is not None:
                self.forgotten.append(hold)
                self.write("end", self.number, now())

        in_a_thread(run)
        del self.forgotten[:-20]

    def be_visited(self, hold: Hold) -> None:
        """Let a thread enter the hold and leave it again.

        The key belongs to this thread all the time.
        """
        in_a_thread(lambda: self.enter(hold))
        self.look(hold)

    def pass_on(self, hold: Hold) -> None:
        """Leave the hold while a thread is in its block. The thread leaves it last."""
        entered, left = threading.Event(), threading.Event()

        def stay() -> None:
            try:
                self.enter(hold, lambda: (entered.set(), left.wait()), is_last=True)
            finally:
                entered.set()

        def leave() -> None:
            entered.wait()
            try:
                with contextlib.suppress(*TROUBLES):
                    hold.release()
            finally:
                left.set()

        in_a_thread(stay, meanwhile=leave)

    def enter(
        self,
        hold: Hold,
        ready: Callable[[], object] = lambda: None,
        *,
        is_last: bool = False,
    ) -> None:
        """Hold the key in a block of this thread, which may be the last to leave it."""
        answer = ""
        try:
            with hold:
                ready()
                self.think(hold, at_most=self.plan.think)
                if is_last:
                    self.leave(hold)
        except LockLost:
            answer = "LockLost"
            self.write("lost", self.number, now())
        except TROUBLES as error:
            answer = type(error).__name__
        if is_last:
            self.write("gone", self.number, now(), answer)

    def be_struck(self, key: str, policy: dict[str, Any], *, shared: bool) -> None:
        """Hold the key in a block, while an asynchronous exception strikes anywhere.

        A key that was granted and not recorded is free within its ttl and the grace.
        """
        self.ask(key, "s" if shared else "x", "lease", policy)
        error = self.random.choice(STRUCK)
        strike = Strike(self.random.uniform(0, 2 * self.plan.think), error)
        try:
            with strike, self.lock(key, policy, shared=shared) as hold:
                try:
                    self.got(hold)
                    self.think(hold, at_most=self.plan.think)
                    self.leave(hold)
                except error:
                    # The first record may be missing.
                    self.leave(hold)
                    raise
            self.write("gone", self.number, now(), "")
        except (error, *TROUBLES) as trouble:
            # The clean-up of a driver may hide the strike behind an error of its own.
            if strike.is_over:
                self.write("struck", self.number, now())
            self.refused(trouble)


def in_a_thread(
    function: Callable[[], object], meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Run a function in a thread of its own, and wait for its end."""

    def run() -> None:
        try:
            function()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run)
    thread.start()
    meanwhile()
    thread.join()


# Plain SQL takes a third of the processor time of the ORM.


def read_register(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT value FROM tests_counter WHERE name = %s", [name])
        found = cursor.fetchone()
    return int(found[0]) if found else 0


def write_register(name: str, value: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE tests_counter SET value = %s WHERE name = %s", [value, name]
        )


def finite(seconds: float) -> float:
    return min(seconds, 1e6)


def keep_the_gil(seconds: float) -> None:
    """Make one call into C that keeps the GIL for about this time."""
    length, took = 16, 0.0
    while took < seconds / 3:
        started = now()
        re.match(r"(a+)+b", "a" * length)
        took = now() - started
        length += 1


def tolerant(sleep: Callable[[float], None]) -> Callable[[float], None]:
    """Return a sleep that ignores the errors of libfaketime.

    libfaketime raises an error when a SIGSTOP interrupts the sleep.
    """

    def rest(seconds: float) -> None:
        with contextlib.suppress(OSError):
            sleep(seconds)

    return rest


def main(task: Task) -> None:
    default = connections.settings["default"]
    if task.host:
        # The documentation recommends these options over a network. Without them,
        # dlocks waits for as long as the driver does.
        default["HOST"] = task.host
        default["OPTIONS"] = default.get("OPTIONS", {}) | GIVING_UP[connection.vendor]
    if task.port:
        default["PORT"] = str(task.port)
    if "FAKETIME" in os.environ:
        time.sleep = tolerant(time.sleep)
    if task.far:
        go_far_away()
    gc.freeze()
    Worker(task).run()
