"""The lock API over the memory backend and a virtual clock.

A schedule of bytes decides which actor takes the next step, and which call fails.
Nothing waits and there are no threads. The actors are callers, their keepers and their
``Waiters`` objects. Another actor may run before and after each call to the
database acts, so schedules reach every point between two steps of the protocol. Each
caller is a process of its own, with its own backend, keeper and ``Waiters``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from dlocks import Hold, LockBackendError, LockError, LockLost, LockTimeout, db_lock
from tests.internals import (
    HANDOVER_LEASE,
    HEARTBEAT_TIMEOUT,
    Acquisition,
    Claim,
    Keeper,
    KeyState,
    MemoryBackend,
    ThreadWakeup,
    Waiters,
    backends,
    callers,
    clock,
    keeper,
    requests,
)

CALLERS = 3
TTL = 3.0
GRACE = 0.5
KEY = "stock:7"


def request(act: Callable[..., Any]) -> Any:
    """Make a method a request, which may be lost, or whose reply may be lost."""

    @functools.wraps(act)
    def call(backend: SimulatedBackend, *args: Any, **options: Any) -> Any:
        sim = backend.sim
        fault = sim.fault()
        sim.meanwhile()
        if fault == "request":
            raise LockBackendError("the request was lost")
        queued = {waiting.claim.owner for waiting in sim.state.queue}
        answer = act(backend, *args, **options)
        held = sim.state.held
        if held is not None and held.claim.owner in queued:
            sim.notified.append(held.claim.owner)
        sim.meanwhile()
        if fault == "reply":
            raise LockBackendError("the reply was lost")
        return answer

    return call


class NoThreads:
    """An empty set of threads."""

    def add(self, thread: int) -> None:
        pass

    discard = add

    def __contains__(self, thread: int) -> bool:
        return False


class SimulatedBackend(MemoryBackend):
    """The database of all callers, with a clock of its own, as one of them sees it."""

    def __init__(self, number: int, sim: Simulation) -> None:
        super().__init__(f"simulated {number}", ttl=TTL, timeout=20.0, grace=GRACE)
        self.sim = sim
        self.time = lambda: sim.time + sim.ahead
        self._states, self._positions = sim.states, sim.positions

    @property
    def identity(self) -> str:
        # Each caller is a process of its own.
        return self.alias

    acquire = request(MemoryBackend.acquire)
    renew = request(MemoryBackend.renew)
    verify = request(MemoryBackend.verify)
    release = request(MemoryBackend.release)
    enqueue = request(MemoryBackend.enqueue)
    poll = request(MemoryBackend.poll)


class Room(Waiters):
    """A ``Waiters`` without its thread.

    The schedule decides when it polls and when it receives notifications.
    """

    def enter(self, waiter: Any) -> None:
        self._waiters[waiter.claim.owner] = waiter


class Person:
    """A caller. The lock API takes it for a task."""

    alive = True

    def get_name(self) -> str:
        return "a caller"

    def get_loop(self) -> Person:
        return self

    def is_closed(self) -> bool:
        return not self.alive


class Simulation:
    """A simulation that runs step by step, as the bytes of the schedule say.

    It raises AssertionError when a promise is broken.
    """

    def __init__(self, schedule: bytes) -> None:
        self.schedule = iter(schedule)
        self.time = 1000.0
        # The owners of granted claims whose process has not read the notification yet.
        self.notified: list[str] = []
        # The database has one key, and its clock is ahead by some seconds.
        self.states: dict[str, KeyState] = {}
        self.positions = itertools.count(1)
        self.ahead = 0.0
        self.backends = [SimulatedBackend(number, self) for number in range(CALLERS)]
        self.rooms = [Room(backend) for backend in self.backends]
        self.people = [Person() for _ in range(CALLERS)]
        # The acquisition of each caller, and the generator of its steps.
        self.attempts: list[Any] = [None] * CALLERS
        self.holds: list[Hold | None] = [None] * CALLERS
        # The actors that are in the middle of a step. A step may go on after its caller
        # has released the hold.
        self.busy: set[tuple[str, int]] = set()
        self.still = 0
        self.armed = ""
        self.tokens: list[int] = []
        self.log: list[str] = []

    @property
    def state(self) -> KeyState:
        return self.states.get(KEY, KeyState())

    def run(self) -> None:
        with self._installed():
            while (byte := next(self.schedule, None)) is not None:
                self.step(byte)
                self.check()
            self.end()

    def step(self, byte: int) -> None:
        what, number = byte >> 2, byte & 3
        if number == CALLERS:
            self.world(what)
            return
        actor, act = (
            ("caller", self.go_on),
            ("caller", self.go_on),
            ("caller", self.go_on),
            ("keeper", self.keep),
            ("keeper", self.keep),
            ("room", self.look),
            ("room", self.hear),
            ("caller", self.die),
        )[what % 8]
        if (actor, number) in self.busy:
            return
        self.busy.add((actor, number))
        self.log.append(f"{self.time:.2f} {actor} {number}: {act.__name__}")
        try:
            act(number)
        finally:
            self.busy.discard((actor, number))

    def world(self, what: int) -> None:
        kind = what % 8
        if kind < 5:
            self.time += (0.05, 0.3, TTL / 3, HANDOVER_LEASE + 0.1, TTL + GRACE + 0.1)[
                kind
            ]
        elif kind == 5:
            # The database's clock steps forward by less than the grace, and back again.
            self.ahead = 0.0 if self.ahead else 0.4
        else:
            self.armed = "reply" if kind == 6 else "request"

    def fault(self) -> str:
        fault, self.armed = self.armed, ""
        return fault

    def meanwhile(self) -> None:
        """Let another actor run, in the middle of a call."""
        if self.still:
            return
        if (
            next(self.schedule, 0) >= 160
            and (other := next(self.schedule, None)) is not None
        ):
            self.step(other)
            self.check()

    # Actors.

    def go_on(self, number: int) -> None:
        if self.holds[number] is not None:
            self.release(number)
            return
        acquisition = self.attempts[number]
        if acquisition is None:
            lock = db_lock(KEY, using=f"simulated {number}", renew=number != 2)
            acquisition = Acquisition(lock, self.people[number], ThreadWakeup())
            self.attempts[number] = acquisition
        floor = max(self.tokens, default=0)
        began = self.state.version
        try:
            acquisition.advance()
            hold = acquisition.result
            if hold is None:
                return
        except LockError as error:
            assert isinstance(error, (LockTimeout, LockBackendError)), error
            self.attempts[number] = None
            acquisition.cancel()
            return
        self.attempts[number] = None
        self.holds[number] = hold
        # The token is larger than all tokens that were granted before the request. A
        # token that is held was never granted before.
        if hold.held:
            assert hold.token > floor or began != self.state.version, (
                f"token {hold.token} after {floor}"
            )
            assert hold.token not in self.tokens, f"token {hold.token} twice"
        self.tokens.append(hold.token)

    def release(self, number: int) -> None:
        hold, self.holds[number] = self.holds[number], None
        assert hold is not None
        held = hold.held
        try:
            hold.release()
        except LockLost:
            return
        except LockBackendError:
            return
        assert held
        state = self.state
        assert not (state.is_held and state.held.claim.owner == hold.owner), (
            "released, but not free"
        )

    def keep(self, number: int) -> None:
        """Run the keeper of this caller's process once."""
        hold = self.holds[number]
        if hold is None:
            return
        (holding,) = hold._parts
        if holding.renewable and holding.lease.renew_at <= self.time:
            guards = {holding: holding.life.state.guards}
            keeper._workers._renew(holding.backend, guards)
        holding.watch.check_expiry(holding)

    def look(self, number: int) -> None:
        for waiter in self.rooms[number]._waiters.values():
            # A heartbeat is due.
            waiter.poll_at = 0.0
        self.poll(number, notified=False)

    def hear(self, number: int) -> None:
        for owner in list(self.notified):
            if owner in self.rooms[number]._waiters:
                self.notified.remove(owner)
                self.poll(number, notified=True)

    def poll(self, number: int, *, notified: bool) -> None:
        # The poll holds the waiter's mutex while it queues a claim again.
        self.still += 1
        try:
            with contextlib.suppress(LockBackendError):
                self.rooms[number]._poll(notified=notified)
        finally:
            self.still -= 1

    def die(self, number: int) -> None:
        """End the process and all that it holds. A new process replaces it."""
        if any(actor in self.busy for actor in (("keeper", number), ("room", number))):
            return
        if (hold := self.holds[number]) is not None:
            keeper.remove(hold._parts[0])
        self.rooms[number]._waiters.clear()
        self.holds[number] = self.attempts[number] = None
        self.people[number].alive = False
        self.people[number] = Person()

    # Invariants.

    def check(self) -> None:
        believing = [hold for hold in self.holds if hold is not None and hold.held]
        assert len(believing) <= 1, f"two valid holds: {believing}"
        for hold in believing:
            assert hold.remaining <= TTL + 1e-6

    def end(self) -> None:
        """Check that a new caller acquires the key after ttl and grace."""
        for number in range(CALLERS):
            self.die(number)
        self.armed = ""
        self.still = 1
        self.time += TTL + HEARTBEAT_TIMEOUT + GRACE + 1.0
        grant = self.backends[0].acquire(Claim(key=KEY, ttl=TTL))
        if grant is None:
            # A waiter that died may have shown a heartbeat until just now.
            self.time += HANDOVER_LEASE + GRACE
            grant = self.backends[0].acquire(Claim(key=KEY, ttl=TTL))
        assert grant is not None, "the key is free, but no caller acquires it"
        assert grant.token > max(self.tokens, default=0)

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        with keeper._mutex:
            # An earlier test may have left the thread of the real keeper asleep.
            thread = keeper._thread.thread
            keeper._thread.end()
            keeper._wakeup.set()
        if thread is not None and thread.is_alive():
            thread.join()
        originals = clock.now, Keeper._wake
        # The callers are processes, although their requests are in each other here.
        threads, requests._threads = requests._threads, NoThreads()
        clock.now = lambda: self.time
        Keeper._wake = lambda keeper: None
        for backend, room in zip(self.backends, self.rooms, strict=True):
            backends._backends[backend.alias] = backend
            backend.waiters = room
        try:
            yield
        finally:
            clock.now, Keeper._wake = originals
            requests._threads = threads
            for backend in self.backends:
                backends._backends.pop(backend.alias, None)
            keeper._holds.clear()
            callers.reset()
