"""A round: the callers of a plan work, and all keys have to be free after it."""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import tempfile
import threading
import time
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.db import connections

from dlocks import LockError, db_lock
from tests.campaign.backends import freed, lost, tick
from tests.campaign.callers import Actor, InThread
from tests.campaign.checker import Finding, check, end_of, leak_label, plain
from tests.campaign.plans import Plan, letter
from tests.internals import LOOK_EVERY, keeper
from tests.timing import witness

ALIAS = "campaign"
# Seconds after which a key is free again, if the machine has let the keeper work.
FREE_AFTER = 1.0
# Seconds after which callers count as hanging. Their waits take a few seconds.
LIMIT = 25.0

_numbers = itertools.count(1)


class Round:
    """The state that the callers of one execution of a plan share."""

    def __init__(self, plan: Plan, *, alias: str = ALIAS):
        self.plan, self.alias = plan, alias
        self.name = f"c{plan.seed}.{next(_numbers)}"
        self.names = [f"{self.name}:{letter(key)}" for key in range(len(plan.modes))]
        self.locks: dict[Any, Any] = {}
        self.boxes: dict[int, Any] = {}
        self.entries: list[Any] = []
        # The owners of holds that a caller has tried to detach.
        self.detached: set[str] = set()
        # Keys of which a text may be left that no caller resumes.
        self.unchecked: set[int] = set()
        self.suspects: list[Any] = []
        # Generators that are closed after their caller has ended.
        self.left_open: list[Any] = []
        self.noted: list[tuple[str, str, str]] = []
        self.actors = [Actor(self, caller) for caller in plan.callers]
        self.over = threading.Event()
        self.threads: list[tuple[threading.Thread, threading.Event]] = []

    def note(self, kind: str, label: str, text: str):
        self.noted.append((kind, label, text))

    plain = staticmethod(plain)

    def is_exclusive(self, entry):
        return all(self.plan.modes[key] == "lock" for key in entry.keys)

    def guarded(self, function, *actors, done: threading.Event | None = None):
        """Return the function of a thread, which records its errors and its end."""

        def run():
            try:
                function()
            except BaseException as error:
                self.note("error", plain(repr(error)), repr(error))
            finally:
                connections.close_all()
                for actor in actors:
                    actor.ended_at = tick()
                if done is not None:
                    done.set()

        return run

    def run(self) -> list[Finding]:
        """Execute the plan, and return the findings."""
        self.began = time.monotonic()
        self._start()
        if not self._await([done for _, done in self.threads]):
            return self._findings()
        ended = time.monotonic()
        # Entries that end only with their caller.
        open_keys = set().union(
            *(
                entry.keys
                for entry in self.entries
                if end_of(entry) is None or entry.stays
            )
        )
        leaked = set()
        open_keys -= self.unchecked
        for key in set(range(len(self.names))) - open_keys - self.unchecked:
            if not self._becomes_free(key, ended):
                leaked.add(key)
        self.over.set()
        for thread, _ in self.threads:
            thread.join(LIMIT)
            if thread.is_alive():
                self._hang()
                return self._findings()
        self._close_left_open()
        ended = time.monotonic()
        for key in sorted(open_keys | leaked):
            if not self._becomes_free(key, ended, after=key in leaked):
                leaked.add(key)
        return self._findings()

    def _start(self):
        for actor in self.actors:
            if actor.caller.loop is None:
                done = threading.Event()
                work = partial(self._thread, actor, done)
                self._add(self.guarded(work, actor, done=done), actor.name, done)
        for number, style in enumerate(self.plan.loops):
            actors = [one for one in self.actors if one.caller.loop == number]
            if not actors:
                continue
            done = threading.Event()
            main = self._loop(actors, done)
            run = asyncio.run if style == "run" else async_to_sync(_awaited)
            work = partial(run, main)
            self._add(self.guarded(work, *actors, done=done), f"l{number}", done)
        for thread, _ in self.threads:
            thread.start()

    def _add(self, work, name, done):
        thread = threading.Thread(target=work, name=f"{self.name}-{name}", daemon=True)
        self.threads.append((thread, done))

    def _thread(self, actor, done):
        try:
            InThread.run(actor.run())
        finally:
            if not actor.caller.ends:
                done.set()
                self.over.wait()

    async def _loop(self, actors, done):
        tasks = [asyncio.create_task(one.run(), name=one.name) for one in actors]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, BaseException):
                self.note("error", plain(repr(outcome)), repr(outcome))
        done.set()
        while not self.over.is_set():
            await asyncio.sleep(0.005)

    def _await(self, events) -> bool:
        deadline = time.monotonic() + LIMIT
        for event in events:
            if not event.wait(max(0.0, deadline - time.monotonic())):
                self._hang()
                return False
        # A caller that ends early has ended before its keys are checked.
        for thread, _ in self.threads:
            actors = [
                actor for actor in self.actors if thread.name.endswith(f"-{actor.name}")
            ]
            if any(actor.caller.ends for actor in actors):
                thread.join(LIMIT)
        return True

    def _hang(self):
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        at_work = [
            f"{actor.name} in {' > '.join(actor.doing)}"
            for actor in self.actors
            if actor.doing
        ]
        label = ", ".join(sorted({text.partition(" ")[2] for text in at_work}))
        self.note("hang", label, f"{'; '.join(at_work)}\n{stacks}")
        self.over.set()

    def _close_left_open(self):
        for generator, entry, loop in self.left_open:
            if loop is not None:
                # The end of its event loop has closed it.
                entry.end()
                continue
            try:
                generator.close()
            except Exception as error:
                entry.end(error)
            else:
                entry.end()

    def _becomes_free(self, key: int, since: float, *, after: bool = False) -> bool:
        """Return whether a key is free in time, and record a leak.

        ``after`` means that the leak was noted and the callers have ended since.
        """
        lock, has_settled = db_lock(self.names[key], using=self.alias, timeout=0), False
        while True:
            hold, trouble = None, ""
            try:
                hold = lock.try_acquire()
            except (LockError, RuntimeError) as error:
                trouble = f"{type(error).__name__}: {error}"
            if hold is not None:
                hold.release()
                return True
            if has_settled:
                break
            if time.monotonic() - since > FREE_AFTER:
                # The machine may be slow. Let the keeper look at the callers twice. The
                # pause is the time that it lets pass between two looks.
                keeper.catch_up()
                time.sleep(LOOK_EVERY)
                keeper.catch_up()
                has_settled = True
            time.sleep(0.01)
        holder = lock.holder()
        label = leak_label(self, key, 0 if holder is None else holder.token)
        when = "although all callers have ended" if after else "after its last entry"
        if after:
            label = f"until its ttl: {label}"
        self.note("leak", label, f"{letter(key)!r} {when}: {holder} {trouble}".rstrip())
        return False

    def _findings(self) -> list[Finding]:
        found = dict.fromkeys([*self.noted, *check(self)])
        if witness.longest(time.monotonic() - self.began):
            # A lease from the queue lasts for 1.5 s. It is lost if nothing can renew
            # it, and that is no fault.
            found = {one: None for one in found if one[0] != "lost"}
        for entry in self.entries:
            for owner in entry.owners:
                freed.pop(owner, None)
                lost.discard(owner)
        texts = {}
        for kind, label, text in found:
            texts.setdefault((kind, label), text)
        return [Finding(*what, text, self.plan) for what, text in texts.items()]


async def _awaited(coroutine):
    return await coroutine
