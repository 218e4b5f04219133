"""Callers that execute the steps of a plan, and record what they believe.

The steps are written once, as coroutines. In a thread they use the sync methods and
never suspend. In a task they use the async ones.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync

from dlocks import LockError, LockLost, LockTimeout, db_lock, db_rwlock, db_semaphore
from tests.campaign.backends import pauses, tick
from tests.campaign.plans import Caller, Step
from tests.sync_and_async import Async, Sync

PERMITS = 2
# What a request returns whose error was recorded.
FAILED = object()
# Seconds for which a caller waits for a hold that another one passes to it, and for
# which the other one waits until it was taken.
BOX_TIMEOUT = 0.5


@dataclass(eq=False)
class Entry:
    """A caller's use of a hold, from its grant until the caller begins to leave it.

    ``parts`` are the index of the key, the owner and the token of each hold.
    """

    caller: Any
    what: str
    hold: Any
    # Whether it is a block, which keeps its hold although its callers may have ended.
    block: bool = False
    # Whether another caller may leave it.
    given: bool = False
    # Whether the same caller enters its hold again by the lock.
    own: bool = True
    began: int = field(default_factory=tick)
    leaving: int | None = None
    outcome: str | None = None
    # Why its loss is no fault, if it is none.
    excuse: str = ""
    # Whether it ends with its caller, since it could not be left before.
    stays: bool = False

    def __post_init__(self):
        holds = getattr(self.hold, "holds", (self.hold,))
        keys = self.caller.round.names
        self.parts = [(keys.index(one.key), one.owner, one.token) for one in holds]

    def __str__(self):
        return f"{self.caller.name} ({self.what})"

    def leave(self):
        """Record that its caller begins to leave it."""
        if self.leaving is None:
            self.leaving = tick()

    def end(self, error: BaseException | None = None):
        """Record how it ended. A note on another error is as loud as an error."""
        self.leave()
        notes = getattr(error, "__notes__", ())
        if isinstance(error, LockLost) or any("LockLost" in note for note in notes):
            self.outcome = "lost"
        elif self.outcome is None:
            self.outcome = "left"

    @property
    def keys(self):
        return {key for key, _, _ in self.parts}

    @property
    def owners(self):
        return {owner for _, owner, _ in self.parts}


class Gift:
    """What one caller passes to another. Only one of the two may claim it."""

    def __init__(self, content: Any, entry: Entry):
        self.content, self.entry = content, entry
        self.entered = threading.Event()
        self._turn = threading.Lock()

    def claim(self) -> bool:
        return self._turn.acquire(blocking=False)

    @property
    def is_claimed(self):
        return self._turn.locked()


class InThread(Sync):
    """The sync methods."""

    async def sleep(self, ms):
        time.sleep(ms / 1000)  # noqa: ASYNC251 (no event loop runs)

    async def atomic(self, hold, body, ms):
        with hold.atomic():
            await body()

    @staticmethod
    def generator(lock, entries, enter):
        try:
            with lock as hold:
                entries.append(enter(hold))
                try:
                    yield
                finally:
                    entries[0].leave()
        except GeneratorExit as error:
            # A loss is a note on it, which close() does not pass on.
            entries[0].end(error)
            raise

    async def next(self, generator):
        return next(generator)

    async def close(self, generator):
        generator.close()


class InTask(Async):
    """The async methods."""

    async def sleep(self, ms):
        await asyncio.sleep(ms / 1000)

    async def atomic(self, hold, body, ms):
        await hold.aatomic(time.sleep, ms / 1000)
        await body()

    @staticmethod
    async def generator(lock, entries, enter):
        try:
            async with lock as hold:
                entries.append(enter(hold))
                try:
                    yield
                finally:
                    entries[0].leave()
        except GeneratorExit as error:
            # A loss is a note on it, which aclose() does not pass on.
            entries[0].end(error)
            raise

    async def next(self, generator):
        return await anext(generator)

    async def close(self, generator):
        await generator.aclose()


class Actor:
    """A caller at work on its steps."""

    def __init__(self, round_, caller: Caller):
        self.round, self.caller, self.name = round_, caller, caller.name
        self.do = InThread() if caller.loop is None else InTask()
        self.entries: list[Entry] = []
        self.holds: list[Entry] = []
        self.gifts: list[Gift] = []
        self.generators: dict[str, tuple[Any, Entry]] = {}
        self.children = 0
        # When its thread or event loop ended.
        self.ended_at: int | None = None
        # Which of the keys of a lock that can be read and written it writes.
        self.writes = random.Random(caller.name).random() < 0.4
        self.doing: list[str] = []

    async def run(self, work=None):
        """Do some work, which is by default to take the caller's steps."""
        pauses.set(random.Random(f"{self.round.plan.seed}/{self.name}"))
        try:
            await (self.steps(self.caller.steps) if work is None else work(self))
        finally:
            await self.finish()

    async def steps(self, steps):
        for step in steps:
            self.doing.append(step.op)
            try:
                await getattr(self, f"do_{step.op}")(step)
            finally:
                self.doing.pop()

    async def finish(self):
        """End what no other caller ends: gifts that were not taken, and generators."""
        for gift in self.gifts:
            try:
                await self.until(lambda gift=gift: gift.is_claimed)
            except asyncio.CancelledError:
                # No process resumes the texts of this caller, so their keys stay taken
                # until the leases end.
                for one in self.gifts:
                    if one.entry.outcome == "detached" and one.claim():
                        self.round.unchecked |= set(one.entry.keys)
                raise
            if not gift.claim():
                continue
            if gift.entry.outcome == "detached":
                await self.resume(gift.content, (), gift.entry)
            else:
                await self.release(gift.entry, gift.content)
        for name in list(self.generators):
            await self.do_close(Step("close", how="close", name=name))

    async def until(self, condition, seconds=BOX_TIMEOUT):
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            await self.do.sleep(1)

    # What the caller asks for, and what it learns.

    def lock(self, step: Step):
        round_ = self.round
        mode = round_.plan.modes[step.keys[0]]
        options = {"using": round_.alias, "timeout": step.timeout}
        which = (step.keys, step.timeout, self.writes if mode == "rw" else None)
        if step.shared and which in round_.locks:
            return round_.locks[which]
        names = [round_.names[key] for key in step.keys]
        if mode == "permits":
            lock = db_semaphore(names[0], PERMITS, **options)
        elif mode == "rw":
            both = db_rwlock(names[0], **options)
            lock = both.write() if self.writes else both.read()
        else:
            lock = db_lock(*names, **options)
        return round_.locks.setdefault(which, lock) if step.shared else lock

    def enter(self, hold, what, **values) -> Entry:
        entry = Entry(self, what, hold, **values)
        self.round.entries.append(entry)
        self.entries.append(entry)
        return entry

    def own(self, keys) -> list[Entry]:
        """Return entries that make the caller a holder of all keys, or nothing."""
        mine = [
            entry
            for entry in self.entries
            if entry.leaving is None and not entry.given and entry.own
        ]
        held = set().union(*(entry.keys for entry in mine))
        return mine if held >= set(keys) else []

    def failed(self, step: Step, error: BaseException, mine: list[Entry], what: str):
        """Record that an acquisition failed."""
        text = f"{what}: {type(error).__name__}: {error}"
        if isinstance(error, asyncio.CancelledError):
            return
        if isinstance(error, LockLost):
            if not any(entry.excuse for entry in mine):
                self.round.note("lost", f"entry: {what}", f"{self.name}: {text}")
            return
        if "cannot be upgraded" in text:
            # It uses the read lock that another caller has acquired.
            return
        if mine:
            self.suspect(mine, text, f"{what}: {type(error).__name__}")
        elif not isinstance(error, LockError):
            self.round.note("error", self.round.plain(text), f"{self.name}: {text}")

    def suspect(self, mine: list[Entry], text: str, label: str):
        """Record that a caller with these entries was refused their key."""
        passed = any("with hold (" in entry.what for entry in mine)
        label = f"in a passed hold, {label}" if passed else label
        self.round.suspects.append((tick(), mine, label, f"{self.name}: {text}"))

    @contextmanager
    def entering(self, step: Step, what: str):
        """Handle the errors of an acquisition and of the end of its block.

        The block appends the entry to the list that it gets.
        """
        mine, entered = self.own(step.keys), []
        try:
            yield entered
        except BaseException as error:
            if not entered:
                self.failed(step, error, mine, what)
            else:
                self.left(entered[0], error)
            if not isinstance(error, Exception):
                raise
        else:
            if entered:
                entered[0].end()

    async def asked(self, step: Step, what: str, request):
        """Return the answer to a request for a hold, or FAILED after an error."""
        mine = self.own(step.keys)
        try:
            return await request
        except BaseException as error:
            self.failed(step, error, mine, what)
            if not isinstance(error, Exception):
                raise
            return FAILED

    def left(self, entry: Entry, error: BaseException):
        """Record that an entry ended with an error. A loss is checked later."""
        entry.end(error)
        if "is held by a transaction of another thread" in str(error):
            # A lock inside of ``hold.atomic()`` is a part of its transaction. Another
            # thread cannot close a generator that holds it.
            return
        if not isinstance(error, (LockLost, asyncio.CancelledError)):
            text = f"end of {entry.what}: {type(error).__name__}: {error}"
            kind = "refused" if isinstance(error, RuntimeError) else "error"
            self.round.note(kind, self.round.plain(text), f"{self.name}: {text}")

    @contextmanager
    def ending(self, entry: Entry):
        """End an entry with the block, which has left it."""
        try:
            yield
        except BaseException as error:
            self.left(entry, error)
            if not isinstance(error, Exception):
                raise
        else:
            entry.end()

    async def release(self, entry: Entry, subject):
        """Leave an entry by the release of its hold or lock."""
        entry.leave()
        with self.ending(entry):
            await self.do.ask(subject, "release")

    async def acquire(self, step: Step, what: str, **values) -> Entry | None:
        hold = await self.asked(step, what, self.do.ask(self.lock(step), "acquire"))
        return None if hold is FAILED else self.enter(hold, what, **values)

    async def inside(self, entry: Entry, steps):
        self.holds.append(entry)
        try:
            await self.steps(steps)
        finally:
            self.holds.remove(entry)

    # Steps.

    async def do_pause(self, step):
        await self.do.sleep(step.ms)

    async def do_with(self, step, what="with", hold=None):
        subject = self.lock(step) if hold is None else hold
        with self.entering(step, what) as entered:
            async with self.do.block(subject) as hold:
                entered.append(self.enter(hold, what, block=True))
                try:
                    await self.inside(entered[0], step.body)
                finally:
                    entered[0].leave()

    async def do_try(self, step):
        mine, request = self.own(step.keys), self.do.ask(self.lock(step), "try_acquire")
        hold = await self.asked(step, "try", request)
        if hold is FAILED:
            return
        if hold is None:
            if mine:
                self.suspect(mine, "try_acquire() returned None", "try: None")
            return
        entry = self.enter(hold, "try")
        try:
            await self.inside(entry, step.body)
        finally:
            await self.release(entry, hold)

    async def do_keep(self, step):
        how = step.how
        entry = await self.acquire(step, f"acquire, {how}")
        if step.box is not None and entry is None:
            self.round.boxes[step.box] = None
            return
        if entry is None:
            return
        hold = entry.hold
        if how == "nothing":
            entry.excuse = "its caller may end"
            await self.inside(entry, step.body)
        elif how in {"transfer", "orphan"}:
            entry.given = True
            if how == "orphan" or self.caller.ends:
                entry.excuse = "its caller may end"
            self.pass_to(step, hold, entry, ends=how == "transfer")
            await self.steps(step.body)
        elif how == "detach for":
            if (text := await self.detach(entry)) is not None:
                self.pass_to(step, text, entry, ends=True)
                await self.steps(step.body)
            else:
                self.round.boxes[step.box] = None
        elif how == "detach":
            try:
                await self.inside(entry, step.body)
            finally:
                await self.detach_and_resume(entry)
        elif how in {"lend", "lend early", "lend and detach"}:
            gift = self.pass_to(step, hold, entry)
            try:
                await self.inside(entry, step.body)
                if how == "lend":
                    await self.until(gift.entered.is_set)
            finally:
                if how == "lend and detach":
                    await self.detach_and_resume(entry)
                else:
                    await self.release(entry, hold)
        elif how == "with":
            # The block takes the entry over.
            entry.end()
            again = Step("with", keys=step.keys, body=step.body)
            await self.do_with(again, "acquire, with hold", hold)
        else:
            try:
                await self.inside(entry, step.body)
            finally:
                await self.release(entry, hold if how == "hold" else self.lock(step))

    def pass_to(self, step, content, entry, *, ends=False) -> Gift:
        """Pass a hold to another caller. With ``ends``, only that caller ends it."""
        gift = Gift(content, entry)
        self.round.boxes[step.box] = gift
        if ends:
            self.gifts.append(gift)
        return gift

    async def detach(self, entry: Entry) -> str | None:
        """Detach a hold, or leave it if that is refused."""
        alone = all(
            other is entry or other.outcome is not None
            for other in list(self.round.entries)
            if other.owners & entry.owners
        )
        # Blocks of other callers may end with LockLost from here on.
        for other in list(self.round.entries):
            if other is not entry and other.owners & entry.owners:
                other.excuse = "its hold may be detached"
        self.round.detached |= entry.owners
        entry.leave()
        try:
            text = await self.do.ask(entry.hold, "detach")
        except RuntimeError as error:
            # The caller to which the hold was lent is perhaps in its block.
            is_lent = any(
                gift is not None and gift.entry is entry and gift.is_claimed
                for gift in list(self.round.boxes.values())
            )
            if alone and not is_lent and not isinstance(error, LockError):
                text = f"detach: {error}"
                self.round.note("refused", self.round.plain(text), text)
            await self.release(entry, entry.hold)
        except BaseException as error:
            self.left(entry, error)
            # The hold goes on if the server did not answer, or if the detach was
            # refused and its caller learns of a cancellation alone.
            with suppress(LockError, RuntimeError):
                await self.do.ask(entry.hold, "release")
            if not isinstance(error, Exception):
                raise
        else:
            entry.outcome = "detached"
            return text
        return None

    async def detach_and_resume(self, entry: Entry, body=()):
        if (text := await self.detach(entry)) is not None:
            await self.resume(text, body, entry)

    async def resume(self, text, body, before: Entry):
        key = min(before.keys)
        try:
            hold = await self.do.resume(text)
        except asyncio.CancelledError:
            # No process may ever resume the text, and nothing else frees the key.
            self.round.unchecked.add(key)
            raise
        except BaseException as error:
            told = f"resume: {type(error).__name__}: {error}"
            self.round.note("lost", "resume", f"{self.name}: {told}")
            return
        step = Step("with", keys=(key,), body=tuple(body))
        await self.do_with(step, "resumed", hold)

    async def do_take(self, step):
        boxes = self.round.boxes
        await self.until(lambda: step.box in boxes)
        gift = boxes.get(step.box)
        if gift is None or not gift.claim():
            return
        entry = gift.entry
        if step.how == "resume":
            gift.entered.set()
            await self.resume(gift.content, step.body, entry)
        elif step.how == "with":
            await self.with_given(step, gift)
        else:
            gift.entered.set()
            if step.how == "atomic":
                await self.atomic(entry, step.body)
            else:
                await self.steps(step.body)
            await self.release(entry, gift.content)

    async def with_given(self, step, gift: Gift):
        giver, hold = gift.entry, gift.content
        block = Step("with", keys=tuple(giver.keys), body=step.body)
        entered = None
        try:
            async with self.do.block(hold):
                entered = self.enter(hold, f"with hold ({giver.what})", block=True)
                entered.own = self.round.is_exclusive(entered)
                if giver.what == "acquire, orphan":
                    # The block takes the entry over.
                    giver.end()
                gift.entered.set()
                try:
                    await self.inside(entered, block.body)
                finally:
                    entered.leave()
        except BaseException as error:
            gift.entered.set()
            if entered is not None:
                self.left(entered, error)
            elif (
                giver.leaving is None
                and not giver.excuse
                and not giver.owners & self.round.detached
            ):
                text = f"with hold ({giver.what}): {type(error).__name__}: {error}"
                self.round.note("refused", self.round.plain(text), text)
            if not isinstance(error, Exception):
                raise
        else:
            entered.end()

    async def atomic(self, entry, body, ms=3):
        try:
            await self.do.atomic(entry.hold, lambda: self.steps(body), ms)
        except LockLost:
            entry.outcome = "lost"
        except Exception as error:
            text = f"atomic: {type(error).__name__}: {error}"
            self.round.note("error", self.round.plain(text), f"{self.name}: {text}")

    async def do_atomic(self, step):
        if self.holds:
            await self.atomic(self.holds[-1], step.body)

    async def do_generator(self, step):
        entries: list[Entry] = []
        enter = partial(self.enter, what="generator", block=True)
        generator = self.do.generator(self.lock(step), entries, enter)
        if await self.asked(step, "generator", self.do.next(generator)) is FAILED:
            return
        self.generators[step.name] = generator, entries[0]
        entries[0].what += " of a shared lock" if step.shared else ""

    async def do_close(self, step):
        if step.name not in self.generators:
            return
        generator, entry = self.generators.pop(step.name)
        if step.how == "leave":
            # It ends with its caller, and is closed after that.
            entry.excuse = "its caller may end"
            self.round.left_open.append((generator, entry, self.caller.loop))
            return
        entry.own = False
        shared = "shared" in entry.what
        if step.how == "drop":
            # The event loop closes it in another task.
            entry.stays = shared and self.caller.loop is not None
            del generator
            if self.caller.loop is not None:
                # The event loop closes it soon.
                await self.until(lambda: entry.leaving is not None, 1.0)
            entry.end()
        elif step.how == "other":
            entry.what = entry.what.replace("generator", "generator closed elsewhere")
            await self.in_child(lambda child: child.close(generator, entry))
        else:
            await self.close(generator, entry)

    async def close(self, generator, entry):
        with self.ending(entry):
            try:
                await self.do.close(generator)
            except RuntimeError as error:
                if "shared" not in entry.what:
                    raise
                # It cannot be told apart from another block of the lock.
                entry.end(error)
                entry.stays = True

    async def in_child(self, work, cancel_after: int | None = None, name="c"):
        """Let a new thread or task work, and wait for its end."""
        self.children += 1
        caller = Caller(
            f"{self.name}{name}{self.children}", self.caller.loop, ends=True
        )
        child = Actor(self.round, caller)
        self.round.actors.append(child)
        if self.caller.loop is None:
            thread = threading.Thread(
                target=self.round.guarded(lambda: InThread.run(child.run(work)), child),
                name=f"{self.round.name}-{child.name}",
                daemon=True,
            )
            thread.start()
            thread.join()
            return
        task = asyncio.create_task(child.run(work), name=child.name)
        try:
            if cancel_after is not None:
                await asyncio.sleep(cancel_after / 1000)
                task.cancel()
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        if not task.cancelled() and task.exception() is not None:
            error = task.exception()
            self.round.note("error", self.round.plain(repr(error)), repr(error))

    async def do_spawn(self, step):
        await self.in_child(
            lambda child: child.steps(step.body),
            step.ms if step.how == "cancel" else None,
            name="x" if step.how == "cancel" else "c",
        )

    async def do_waitfor(self, step):
        """The idiom of asyncio.Lock with a timeout."""
        lock = self.lock(step)

        async def acquired():
            with suppress(TimeoutError):
                return await asyncio.wait_for(lock.aacquire(), step.ms / 1000)
            return FAILED

        hold = await self.asked(step, "wait_for", acquired())
        if hold is FAILED:
            return
        entry = self.enter(hold, "wait_for")
        # Up to Python 3.11, another task acquired it.
        entry.own = sys.version_info >= (3, 12)
        try:
            await self.inside(entry, step.body)
        finally:
            await self.release(entry, lock)

    async def do_stray(self, step):
        lock, mine, timeouts = self.lock(step), self.own(step.keys), []

        async def acquired():
            try:
                return await self.do.ask(lock, "acquire")
            except LockTimeout as error:
                timeouts.append(error)
                raise

        hold = await self.asked(step, "acquire before a stray release", acquired())
        if hold is not FAILED:
            entry = self.enter(hold, "acquire, lock")
            try:
                await self.inside(entry, step.body)
            finally:
                await self.release(entry, lock)
        if mine or not timeouts:
            return
        if lock.held():
            self.round.note("stray", "held() after a timeout", f"{self.name}: held()")
        try:
            await self.do.ask(lock, "release")
        except (RuntimeError, LockLost):
            return
        text = f"{self.name}: release() after a timeout was not refused"
        self.round.note("stray", "release() after a timeout", text)

    async def do_stop(self, step):
        """Close an event loop in which a task waits for a lock, or has acquired it."""
        lock = self.lock(step)
        loop = asyncio.new_event_loop()
        task = loop.create_task(lock.aacquire())
        try:
            loop.run_until_complete(asyncio.wait([task], timeout=step.ms / 1000))
            if task.done() and task.exception() is not None:
                self.failed(step, task.exception(), [], "stopped loop")
        finally:
            loop.close()
            del task
            gc.collect()

    async def do_borrow(self, step):
        """Acquire in an event loop that ends at once."""
        lock, mine = self.lock(step), self.own(step.keys)
        try:
            hold = async_to_sync(lock.aacquire)()
        except Exception as error:
            self.failed(step, error, mine, "async_to_sync")
            return
        block = Step("with", keys=step.keys, body=step.body)
        await self.do_with(block, "with hold (async_to_sync)", hold)
