"""How a caller waits for a key: in line, where the backend has one; or by coming back after a jittered while."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from dlocks import clock
from dlocks.backends.base import HEARD_FOR, KEPT_FOR, BaseBackend, Claim, Grant, Listener, Message, Place
from dlocks.exceptions import LockBackendError
from dlocks.forks import in_child
from dlocks.keeper import leave_pools

logger = logging.getLogger("dlocks")

FIRST_DELAY = 0.01
LONGEST_DELAY = 0.25

# How often a process says that its claims are still there.
HEARD_EVERY = HEARD_FOR / 4
# How long those who wait are kept from the news that the database cannot be asked: a restart is quicker.
PATIENCE = 10.0
# The next in line looks after a tenth of the time that it has been the next, in these bounds.
SOONEST_LOOK = 0.001
LATEST_LOOK = 0.05
# A grant that is older than this when the room finds it by itself was not told of, ...
TOLD_WITHIN = 0.1
# ... and for so long the room looks then, as where nobody tells. So it does behind those who give back in silence.
LOOKS_FOR = 10.0
# For how long the room waits for a caller's thread that listens to stop.
EARS_PATIENCE = 1.5
# Who has not left so long after its time is over is heard of no more, and passed over.
OVERDUE = 1.0
# How long a room without anybody keeps its connection: less than a DROP DATABASE waits for it to go.
LINGER = 0.5


def delays(deadline: float | None) -> Iterator[float]:
    """Yield the seconds to sleep before each further try; the last of them ends at the deadline of this clock."""
    longest = FIRST_DELAY
    while True:
        # Half of it by chance, so that those who failed together do not come back together.
        delay = random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_DELAY)
        if deadline is not None:
            left = deadline - clock.now()
            if left <= 0:
                return
            delay = min(delay, left)
        yield delay


class Waiter:
    """
    One caller whose claim stands in line. ``wake`` is called, in another thread, when there is something to do.

    ``asked`` is when a question was sent, and what the backend's clock was when it answered: with the two a moment on
    that clock becomes one on this process's, and never a later one. They are one value, since one thread may hear while
    another one looks. ``given`` is a grant, and when the question was sent that its lease is counted from.
    """

    def __init__(
        self, claim: Claim, wake: Callable[[], object], caller: object = None, until: float = math.inf
    ) -> None:
        self.claim = claim
        self.wake = wake
        self.caller = caller
        # When its time is over. If its thread or loop is too busy to notice, others must not wait for it.
        self.until = until
        self.asked = clock.now(), 0.0
        self.given: tuple[Grant, float] | None = None
        self.error: LockBackendError | None = None
        self.number: int | None = None
        # Held to bring the claim back into line, and to leave for good.
        self.mutex = threading.Lock()
        self.seated = False
        # When it has to be looked at next, at the latest.
        self.look_at = 0.0
        self.left = False
        # When it was woken, if it has not gone on to wait since.
        self.woken = 0.0
        # Whether the key may become free without anybody being told.
        self.silent = False
        # Whether its own thread waits, and not the room; or listens, if no other one does.
        self.here = False
        self.listens = False
        # Whether its coroutine was closed in the middle, which leaves nobody to wait for anything.
        self.closed = False

    @property
    def is_gone(self) -> bool:
        """Whether it will never go on: a task whose loop was closed, as by one who does not wait for it."""
        return self.closed or (isinstance(self.caller, asyncio.Task) and self.caller.get_loop().is_closed())

    @property
    def is_overdue(self) -> bool:
        return clock.now() > self.until + OVERDUE

    def told(self, place: Place, sent: float) -> bool:
        """Note how the claim stands, as answered to what was sent then; return whether the caller has to be woken."""
        self.number = place.number or self.number
        self.silent = place.silent
        if place.grant is not None:
            self.given = place.grant, sent
        elif place.clock:
            self.asked = sent, place.clock
        asks = place.grant is not None or place.ask
        if asks:
            self.woken = clock.now()
        return asks

    def heard(self, message: Message) -> None:
        """Note a message; the caller has to be woken."""
        self.woken = clock.now()
        sent, told = self.asked
        if message.token is not None and told:
            self.given = Grant(message.token, message.ends - told), sent


class WaitingRoom:
    """
    Where the callers of this process wait for the keys of one backend, looked after by one thread; or two, where some
    of what there is to hear comes while that one does something else.

    It listens where the backend tells of a grant, and looks otherwise: all claims at once, so that thousands of
    waiting tasks cost one connection and one question now and then. Whoever is next in line looks most often. A room
    whose turn came unheard looks for a while, too.
    """

    def __init__(self, backend: BaseBackend) -> None:
        self.backend = backend
        self._reset()
        _rooms.add(self)

    def _reset(self) -> None:
        # Entered in the condition's place: in C, so that a signal in the middle of it leaves nothing taken.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiters: dict[str, Waiter] = {}
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._looks_at = 0.0
        self._left_at = 0.0
        # How many were before the first of this process's claims, since when, and what a turn takes.
        self._nearest = 0
        self._moved_at = 0.0
        self._turn: float | None = None
        # Whether somebody sat down since the last look.
        self._seated = False
        # Whether its listener asks the server; until when it looks all the same; when it last heard what there was.
        self._asks = False
        self._looks_until = 0.0
        self._listened_at = 0.0
        # Where a caller's own thread can listen: then its turn wakes no other one first.
        self._listener: Listener | None = None
        # With what another thread of the room's hears.
        self._beside: Listener | None = None
        # Whether a caller listens, and which keys were heard to be free.
        self._overheard = False
        self._news: deque[str] = deque()
        self._name = f"dlocks_{secrets.token_hex(8)}"
        # Where the claims of this room are told of their turn; empty where one has to look.
        self.channel = ""

    def enter(self, waiter: Waiter) -> None:
        """Look after a waiter from now on; return once it could be told of a grant."""
        with self._mutex:
            self._waiters[waiter.claim.owner] = waiter
            if self._thread is None or not self._thread.is_alive():
                self._ready = threading.Event()
                self._thread = threading.Thread(target=self._loop, name="dlocks-waiting", daemon=True)
                self._thread.start()
        self._ready.wait(max(0.0, min(1.0, waiter.until - clock.now())))

    def seat(self, waiter: Waiter) -> None:
        """Look at the waiter's claim in time, now that it stands in line."""
        with self._mutex:
            waiter.seated = True
            # Most turns come before there is a need to look.
            waiter.look_at = clock.now() + HEARD_EVERY / 2
            # Where one is told, it is enough to be heard of in time.
            if not self.channel or self._looks or waiter.silent:
                self._seated = True
                self._looks_at = min(self._looks_at, clock.now() + SOONEST_LOOK)
                self._changed.notify()
            elif self._asks or not (waiter.listens or self._overheard):
                self._changed.notify()

    def listen(self, bell: threading.Event, until: float | None) -> bool:
        """
        Have a caller's thread listen for its turn; return True when its bell has rung, or the time is over.

        False says that another thread listens, or is to: the room's own, from when there is something to look at.
        """
        listener, mine = self._listener, False
        if listener is None or listener.ears is None:
            return False
        try:
            if not listener.ears.acquire(blocking=False):
                return False
            self._overheard = mine = True
            while not bell.is_set():
                now = clock.now()
                if until is not None and now >= until:
                    return True
                if self._listener is not listener or self._news or self._looks or now >= self._looks_at:
                    return False
                self._take(self._heard(listener, self._looks_at if until is None else min(until, self._looks_at)))
            return True
        except LockBackendError:
            # The room finds out as soon as it asks.
            return False
        finally:
            if mine:
                self._overheard = False
            try:  # noqa: SIM105 (suppress() is Python: a signal in the middle of it would leave it taken)
                listener.ears.release()
            except RuntimeError:
                # They know themselves whose they are, whatever came in between.
                pass
            if mine and (self._news or not bell.is_set() or len(self._waiters) > 1):
                with self._mutex:
                    self._changed.notify()

    def leave(self, waiter: Waiter) -> None:
        """Look after a waiter no longer; from here on nothing brings its claim back into line."""
        with waiter.mutex:
            waiter.left = True
        with self._mutex:
            self._waiters.pop(waiter.claim.owner, None)
            self._left_at = clock.now()

    # The thread.

    def _loop(self) -> None:
        this = threading.current_thread()
        listener: Listener | None = None
        try:
            leave_pools()
            listener = self._listen()
            listens = listener is not None
            failing_since: float | None = None
            heard_at = clock.now()
            while True:
                with self._mutex:
                    if self._thread is not this:
                        # Whoever started this one was interrupted, and another has been started since.
                        return
                    now = clock.now()
                    if not self._waiters:
                        if now >= self._left_at + LINGER:
                            self._thread = None
                            return
                        self._looks_at = self._left_at + LINGER
                    if self._looks_at > now and not self._listens(listener):
                        self._changed.wait(min(self._looks_at - now, LINGER))
                try:
                    if listener is not None and listener.beside is not listener:
                        self._listen_with(listener)
                    now = clock.now()
                    if now < self._looks_at:
                        continue
                    told = self.channel and not self._looks
                    heard = told or now >= heard_at + HEARD_EVERY * 0.9
                    heard_at = now if heard else heard_at
                    pause = HEARD_EVERY
                    with self._alone(listener):
                        self._dismiss()
                        soon = self._calm(listener)
                        if soon is None and listener is not None and listener.asks:
                            # Its connection is for nothing else.
                            self._listener = None
                            listener.close()
                            listener = None
                        if soon is None:
                            soon, nearest = self._look(heard=heard)
                            pause = HEARD_EVERY / 2 if self.channel and not self._looks else self._pause(nearest)
                    with self._mutex:
                        pause = SOONEST_LOOK if self._seated else min(HEARD_EVERY, max(soon, SOONEST_LOOK), pause)
                        self._looks_at = clock.now() + pause
                    failing_since = None
                    if listens and listener is None and not self._looks:
                        listener = self._listen()
                        if listener is not None and not listener.asks:
                            with self._mutex:
                                # A turn that came since the last look was told to nobody.
                                self._looks_at, self._seated = 0.0, True
                except LockBackendError as error:
                    if failing_since is None:
                        failing_since = clock.now()
                        logger.warning("Those who wait for a lock could not be looked after: %s", error)
                    if clock.now() - failing_since >= PATIENCE:
                        self._fail(error)
                    self._disconnect(listener, broken=True)
                    listener, self.channel = None, ""
                    time.sleep(LATEST_LOOK)
                    with self._mutex:
                        # Nobody listens before one has looked.
                        self._looks_at, self._seated = 0.0, True
        except BaseException as error:
            logger.exception("The waiting room of dlocks failed")
            self._fail(LockBackendError(f"The line could not be looked after: {error}"), this)
        finally:
            self._disconnect(listener, broken=False)
            with self._mutex:
                if self._thread is this:
                    self._thread = None

    def _listen(self) -> Listener | None:
        try:
            listener = self.backend.listen(self._name)
        except LockBackendError as error:
            # Looking finds out whether it can be asked again.
            logger.warning("%s", error)
            listener = None
        beside = None if listener is None else listener.beside
        with self._mutex:
            self.channel = "" if listener is None else listener.channel or self._name
            self._listener, self._beside = listener, beside
            self._asks = listener is not None and listener.asks
        if beside is not None:
            try:
                threading.Thread(target=self._hear, args=(beside,), name="dlocks-hearing", daemon=True).start()
            except RuntimeError as error:
                logger.warning("Those who wait for a lock have to look for their turn: %s", error)
                self._disconnect(listener, broken=False)
                self.channel, listener = "", None
        self._ready.set()
        return listener

    def _hear(self, beside: Listener) -> None:
        """Hear what one may be told of while the room's own thread does something else."""
        while self._beside is beside:
            self._take(beside.wait(LINGER, ()))

    def _disconnect(self, listener: Listener | None, *, broken: bool) -> None:
        with self._mutex:
            if self._listener is listener:
                # Or else it is that of another thread, which has come after this one.
                self._listener = self._beside = None
        with suppress(LockBackendError), self._alone(listener):
            if listener is not None and not broken:
                listener.close()
        self.backend.close()

    @property
    def _looks(self) -> bool:
        """Whether to look though there is a listener."""
        listener = self._listener
        return clock.now() < self._looks_until or (listener is not None and not listener.hears_all)

    @contextmanager
    def _alone(self, listener: Listener | None) -> Iterator[None]:
        """Ask on the connection on which another thread may listen."""
        if listener is None or listener.ears is None:
            yield
            return
        # Whoever listens stops in time for what there is to look at.
        if not listener.ears.acquire(timeout=EARS_PATIENCE):
            raise LockBackendError("A thread that listened was interrupted, and never stopped.")
        self._overheard = False
        try:
            yield
        finally:
            listener.ears.release()

    def _listens(self, listener: Listener | None) -> bool:
        """Whether to wait for messages now, rather than for somebody who sits down."""
        if listener is None or listener.beside is listener:
            return False
        if listener.ears is None and not listener.asks:
            return True
        if self._news:
            return True
        if self._overheard or (listener.asks and self._looks):
            return False
        return any(waiter.seated and not waiter.woken for waiter in self._waiters.values())

    def _listen_with(self, listener: Listener) -> None:
        if listener.ears is None:
            self._take(self._heard(listener, self._looks_at))
        elif listener.ears.acquire(blocking=False):
            try:
                self._take(self._heard(listener, 0.0 if self._news else self._looks_at))
            finally:
                listener.ears.release()
        elif not self._overheard:
            # A caller has just begun to listen, or is about to have done.
            time.sleep(SOONEST_LOOK)
        while self._news:
            with self._alone(listener):
                self.backend.move_on(self._news.popleft())
            with self._mutex:
                self._looks_at, self._seated = 0.0, True

    def _take(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.free:
                # The transaction that had the key has ended: what there is to ask is for the room's thread.
                self._news.append(message.free)
            elif (waiter := self._waiters.get(message.owner)) is not None:
                waiter.heard(message)
                waiter.wake()

    def _heard(self, listener: Listener, until: float) -> Sequence[Message]:
        """Wait until then at most for what there is to hear."""
        pause = max(0.0, min(until - clock.now(), LINGER))
        claims: list[Claim] = []
        if listener.asks:
            with self._mutex:
                if pause == 0 or not self._listens(listener):
                    return ()
                # Also those who are about to sit down: they may have had their turn by then.
                claims = [waiter.claim for waiter in self._waiters.values() if not waiter.woken]
        messages = listener.wait(pause, claims)
        self._listened_at = clock.now()
        return messages

    def _calm(self, listener: Listener | None) -> float | None:
        """Let the claims be heard of, and return in how many seconds to look; None where one has to look now."""
        if listener is None or not listener.asks or self._looks:
            return None
        sent = clock.now()
        with self._mutex:
            # Who was woken just now is about to leave.
            waiters = [
                one
                for one in self._waiters.values()
                if one.seated and one.woken <= sent - HEARD_EVERY and not one.is_overdue
            ]
        if not waiters:
            return float("inf")
        place = listener.calm([waiter.claim for waiter in waiters])
        if place is None:
            return None
        if place.clock:
            for waiter in waiters:
                waiter.told(place, sent)
        return place.soon

    def _dismiss(self) -> None:
        """Give up for those who will never come for their keys."""
        with self._mutex:
            gone = [waiter for waiter in self._waiters.values() if waiter.is_gone]
        for waiter in gone:
            self.leave(waiter)
            self.backend.release(waiter.claim, failed=True)

    def _pause(self, nearest: int) -> float:
        """Return how long nothing is expected, where one has to look: the nearer to the turn, the shorter."""
        now = clock.now()
        if nearest != self._nearest:
            if nearest < self._nearest:
                # What one turn takes, from how far the line has moved on.
                turn = (now - self._moved_at) / (self._nearest - nearest)
                self._turn = turn if self._turn is None else (3 * self._turn + turn) / 4
            self._nearest, self._moved_at = nearest, now
        if nearest == 0:
            return min(LATEST_LOOK, max(SOONEST_LOOK, (now - self._moved_at) / 10))
        return min(LATEST_LOOK * nearest, max(SOONEST_LOOK, nearest * (self._turn or LATEST_LOOK / 10) / 2))

    def _look(self, *, heard: bool) -> tuple[float, int]:
        """Look at all claims; return in how many seconds to look again, and how many are before the first of them."""
        sent = clock.now()
        with self._mutex:
            # Where one is told, only at those whose time it is: to be heard of, or to find the holder's lease over. Who
            # is due soon is looked at along: they came one by one, and would be looked at so for ever.
            all_of_them = self._seated or self._looks or not self.channel
            self._seated = False
            seated = {owner: one for owner, one in self._waiters.items() if one.seated and not one.is_overdue}
            due = any(waiter.look_at <= sent for waiter in seated.values())
            waiters = {
                owner: waiter
                for owner, waiter in seated.items()
                if all_of_them or (due and waiter.look_at <= sent + HEARD_EVERY / 2)
            }
            for waiter in waiters.values():
                waiter.look_at = sent + HEARD_EVERY * 0.9
        if not waiters:
            return self._soonest(), 0
        places = self.backend.look([waiter.claim for waiter in waiters.values()], heard=heard)
        answered = clock.now()
        nearest = sys.maxsize
        for owner, waiter in waiters.items():
            place = places.get(owner)
            if place is not None and self._came_unheard(waiter, place, answered):
                self._looks_until = clock.now() + LOOKS_FOR
            if place is None:
                # Passed over and forgotten, since nothing was heard of it: back to its place.
                with waiter.mutex:
                    if waiter.left or waiter.woken:
                        # Nor back to its place before it goes on: its turn has come, and it has not taken it.
                        continue
                    sent_again = clock.now()
                    place = self.backend.queue(waiter.claim, self.channel, waiter.number) or Place(soon=0.0)
                    if waiter.told(place, sent_again):
                        waiter.wake()
                    continue
            if waiter.told(place, sent):
                waiter.wake()
            else:
                waiter.look_at = min(waiter.look_at, sent + place.soon)
                nearest = min(nearest, place.ahead)
        return self._soonest(), 0 if nearest == sys.maxsize else nearest

    def _soonest(self) -> float:
        """Return in how many seconds the first of the waiters has to be looked at."""
        with self._mutex:
            look_at = [one.look_at for one in self._waiters.values() if one.seated and not one.is_overdue]
        return min(look_at, default=float("inf")) - clock.now()

    def _came_unheard(self, waiter: Waiter, place: Place, answered: float) -> bool:
        """Whether a claim's turn came, or will come, without a message."""
        if place.grant is None or place.grant.lease is None or waiter.woken:
            return place.silent
        # At the latest.
        granted_at = answered + place.grant.lease - min(waiter.claim.ttl, KEPT_FOR)
        # Another thread that does nothing else has heard all there was.
        hears = self._listener is not None and self._listener.beside is self._listener
        return granted_at + TOLD_WITHIN < (answered if hears else self._listened_at)

    def _fail(self, error: LockBackendError, ends: threading.Thread | None = None) -> None:
        with self._mutex:
            if self._thread is ends:
                # Whoever enters from here on needs another one.
                self._thread = None
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.error = error
            waiter.wake()


_rooms: weakref.WeakSet[WaitingRoom] = weakref.WeakSet()


def _forked() -> None:
    global _making
    _making = threading.Lock()
    for room in list(_rooms):
        room._reset()


in_child(_forked)


_making = threading.Lock()


def room_of(backend: BaseBackend) -> WaitingRoom:
    """Return the one waiting room of a backend in this process."""
    room: WaitingRoom | None
    with _making:
        # Kept by the backend, with which it goes.
        if (room := backend.room) is None:
            room = backend.room = WaitingRoom(backend)
        return room
