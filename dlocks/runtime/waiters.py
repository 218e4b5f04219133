"""Waiting for a key, in the backend's queue or by jittered retries."""

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

from dlocks.backends.base import HANDOVER_LEASE, HEARTBEAT_TIMEOUT, Backend
from dlocks.backends.notifiers import Notifier
from dlocks.exceptions import LockBackendError
from dlocks.runtime import clock
from dlocks.runtime.pools import leave_pools
from dlocks.runtime.process import in_child
from dlocks.values import Claim, Grant, Message, Ticket

logger = logging.getLogger("dlocks")

FIRST_DELAY = 0.01
LONGEST_DELAY = 0.25

# Seconds between two heartbeats of a process.
HEARTBEAT_EVERY = HEARTBEAT_TIMEOUT / 4
# Seconds for which waiters get no error if the database is unreachable. A restart is
# quicker.
CONNECT_TIMEOUT = 10.0
# Bounds in seconds for the first waiter's polls. It polls after a tenth of the time for
# which it has been first.
SHORTEST_POLL_DELAY = 0.001
LONGEST_POLL_DELAY = 0.05
# Age in seconds from which a grant found by polling counts as not notified.
NOTIFIED_WITHIN = 0.1
# Seconds of polling after that, as without notifications. It covers holders that do not
# notify.
SPIN_SECONDS = 10.0
# Seconds to wait until a caller's thread stops listening.
LISTENER_TIMEOUT = 1.5
# Seconds after its timeout from which a waiter gets no more heartbeats, and is skipped.
OVERDUE = 1.0
# Seconds for which the connection stays open without waiters. DROP DATABASE waits
# longer than that for it to close.
IDLE_CLOSE_AFTER = 0.5


def delays(deadline: float | None) -> Iterator[float]:
    """Yield the seconds to sleep before each further try.

    The last delay ends at ``deadline``, a time of ``clock.now()``.
    """
    longest = FIRST_DELAY
    while True:
        # Half of it is random, so that callers that failed together do not retry
        # together.
        delay = random.uniform(longest / 2, longest)  # noqa: S311 (jitter)
        longest = min(longest * 2, LONGEST_DELAY)
        if deadline is not None:
            left = deadline - clock.now()
            if left <= 0:
                return
            delay = min(delay, left)
        yield delay


class Waiter:
    """One caller whose claim is in the queue.

    ``wake`` is called in another thread when the caller has something to do.

    ``asked`` is when a request was sent, and the backend's clock at the reply. The pair
    converts a time on that clock into one on this process's, never a later one. It is
    one value because one thread may receive while another polls. ``given`` is a grant,
    and when the request was sent from which its lease counts.
    """

    def __init__(
        self,
        claim: Claim,
        wake: Callable[[], object],
        caller: object = None,
        until: float = math.inf,
    ) -> None:
        self.claim = claim
        self.wake = wake
        self.caller = caller
        # When its timeout ends. Other waiters do not wait for it much beyond that.
        self.until = until
        self.asked = clock.now(), 0.0
        self.given: tuple[Grant, float] | None = None
        self.error: LockBackendError | None = None
        self.number: int | None = None
        # Held while the claim rejoins the queue, and while the waiter leaves for good.
        self.mutex = threading.Lock()
        self.seated = False
        # When to poll for it next, at the latest.
        self.look_at = 0.0
        self.left = False
        # When it was woken, unless it waits again.
        self.woken = 0.0
        # Whether the key may become free without a notification.
        self.silent = False
        # With it, its own thread waits instead of the background thread.
        self.notifier: Notifier | None = None
        # Whether its own thread listens if no other thread does.
        self.listens = False
        # Whether its coroutine was closed, so that no caller waits any more.
        self.closed = False

    @property
    def is_gone(self) -> bool:
        """Return whether the coroutine or its event loop was closed."""
        return self.closed or (
            isinstance(self.caller, asyncio.Task) and self.caller.get_loop().is_closed()
        )

    @property
    def is_overdue(self) -> bool:
        return clock.now() > self.until + OVERDUE

    def apply(self, place: Ticket, sent: float) -> bool:
        """Record the reply to a request that was sent at ``sent``.

        Return whether the caller has to be woken.
        """
        self.number = place.position or self.number
        self.silent = place.unnotified
        if place.grant is not None:
            self.given = place.grant, sent
        elif place.clock:
            self.asked = sent, place.clock
        asks = place.grant is not None or place.must_retry
        if asks:
            self.woken = clock.now()
        return asks

    def apply_message(self, message: Message) -> None:
        """Record a message, for which the caller has to be woken."""
        self.woken = clock.now()
        sent, told = self.asked
        if message.token is not None and told:
            self.given = Grant(message.token, message.ends - told), sent


class Waiters:
    """The callers of this process that are queued for keys of one backend.

    One daemon thread serves all of them, so thousands of waiting tasks cost one
    connection and an occasional request. Some listeners use a second thread to receive
    messages.

    The thread listens where the backend notifies. Elsewhere, and for a while after a
    grant without a notification, it polls all claims at once. It polls most often for
    the first one in the queue.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._reset()
        _rooms.add(self)

    def _reset(self) -> None:
        # Entered in place of the condition. It is written in C, so a signal in the
        # middle leaves nothing locked.
        self._mutex = threading.RLock()
        self._changed = threading.Condition(self._mutex)
        self._waiters: dict[str, Waiter] = {}
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._looks_at = 0.0
        self._left_at = 0.0
        # Claims ahead of the first one of this process, since when, and the seconds per
        # turn.
        self._nearest = 0
        self._moved_at = 0.0
        self._turn: float | None = None
        # Whether a waiter was queued since the last poll.
        self._seated = False
        # Whether the listener queries the server, until when to poll all the same, and
        # when it last received all messages.
        self._asks = False
        self._looks_until = 0.0
        self._listened_at = 0.0
        # Set if a caller's own thread can listen. Its turn then wakes no other thread
        # first.
        self._listener: Notifier | None = None
        # The listener of the second thread.
        self._beside: Notifier | None = None
        # Whether a caller listens, and which keys were reported as free.
        self._overheard = False
        self._news: deque[str] = deque()
        self._name = f"dlocks_{secrets.token_hex(8)}"
        # Where the claims of this process are notified. Empty if they have to be
        # polled.
        self.channel = ""

    def enter(self, waiter: Waiter) -> None:
        """Add a waiter, and return once it can be notified of a grant."""
        with self._mutex:
            self._waiters[waiter.claim.owner] = waiter
            if self._thread is None or not self._thread.is_alive():
                self._ready = threading.Event()
                self._thread = threading.Thread(
                    target=self._loop, name="dlocks-waiting", daemon=True
                )
                self._thread.start()
        self._ready.wait(max(0.0, min(1.0, waiter.until - clock.now())))

    def mark_queued(self, waiter: Waiter) -> None:
        """Poll for a waiter's claim in time, now that it is queued."""
        with self._mutex:
            waiter.seated = True
            # Most turns come before a poll is needed.
            waiter.look_at = clock.now() + HEARTBEAT_EVERY / 2
            # With notifications, a heartbeat in time is enough.
            if not self.channel or self._looks or waiter.silent:
                self._seated = True
                self._looks_at = min(self._looks_at, clock.now() + SHORTEST_POLL_DELAY)
                self._changed.notify()
            elif self._asks or not (waiter.listens or self._overheard):
                self._changed.notify()

    def listen(self, wakeup: threading.Event, until: float | None) -> bool:
        """Listen for a caller's turn, in its own thread.

        Return True when ``wakeup`` is set or ``until`` has come. Return False if
        another thread listens or should listen. The background thread should if a poll
        is due.
        """
        listener, mine = self._listener, False
        if listener is None or listener.receive_lock is None:
            return False
        try:
            if not listener.receive_lock.acquire(blocking=False):
                return False
            self._overheard = mine = True
            while not wakeup.is_set():
                now = clock.now()
                if until is not None and now >= until:
                    return True
                if (
                    self._listener is not listener
                    or self._news
                    or self._looks
                    or now >= self._looks_at
                ):
                    return False
                self._take(
                    self._heard(
                        listener,
                        self._looks_at if until is None else min(until, self._looks_at),
                    )
                )
            return True
        except LockBackendError:
            # The background thread notices this with its next request.
            return False
        finally:
            if mine:
                self._overheard = False
            try:  # noqa: SIM105 (a signal within suppress() would leave the mutex locked)
                listener.receive_lock.release()
            except RuntimeError:
                # An RLock knows its owner, whatever was interrupted.
                pass
            if mine and (self._news or not wakeup.is_set() or len(self._waiters) > 1):
                with self._mutex:
                    self._changed.notify()

    def remove(self, waiter: Waiter) -> None:
        """Remove a waiter. From now on nothing returns its claim to the queue."""
        with waiter.mutex:
            waiter.left = True
        with self._mutex:
            self._waiters.pop(waiter.claim.owner, None)
            self._left_at = clock.now()

    # The background thread.

    def _loop(self) -> None:
        this = threading.current_thread()
        listener: Notifier | None = None
        try:
            leave_pools()
            listener = self._listen()
            listens = listener is not None
            failing_since: float | None = None
            last_seen_at = clock.now()
            while True:
                with self._mutex:
                    if self._thread is not this:
                        # The start of this thread was interrupted, and another one has
                        # started since.
                        return
                    now = clock.now()
                    if not self._waiters:
                        if now >= self._left_at + IDLE_CLOSE_AFTER:
                            self._thread = None
                            return
                        self._looks_at = self._left_at + IDLE_CLOSE_AFTER
                    if self._looks_at > now and not self._listens(listener):
                        self._changed.wait(min(self._looks_at - now, IDLE_CLOSE_AFTER))
                try:
                    if listener is not None and listener.beside is not listener:
                        self._listen_with(listener)
                    now = clock.now()
                    if now < self._looks_at:
                        continue
                    told = self.channel and not self._looks
                    heard = told or now >= last_seen_at + HEARTBEAT_EVERY * 0.9
                    last_seen_at = now if heard else last_seen_at
                    pause = HEARTBEAT_EVERY
                    with self._alone(listener):
                        self._cancel_abandoned()
                        soon = self._heartbeat(listener)
                        if soon is None and listener is not None and listener.asks:
                            # This connection is for nothing else.
                            self._listener = None
                            listener.close()
                            listener = None
                        if soon is None:
                            soon, nearest = self._look(heard=heard)
                            pause = (
                                HEARTBEAT_EVERY / 2
                                if self.channel and not self._looks
                                else self._pause(nearest)
                            )
                    with self._mutex:
                        pause = (
                            SHORTEST_POLL_DELAY
                            if self._seated
                            else min(
                                HEARTBEAT_EVERY, max(soon, SHORTEST_POLL_DELAY), pause
                            )
                        )
                        self._looks_at = clock.now() + pause
                    failing_since = None
                    if listens and listener is None and not self._looks:
                        listener = self._listen()
                        if listener is not None and not listener.asks:
                            with self._mutex:
                                # A turn that came since the last poll was not notified.
                                self._looks_at, self._seated = 0.0, True
                except LockBackendError as error:
                    if failing_since is None:
                        failing_since = clock.now()
                        logger.warning(
                            "The waiting callers could not be served. Retrying: %s",
                            error,
                        )
                    if clock.now() - failing_since >= CONNECT_TIMEOUT:
                        self._fail(error)
                    self._disconnect(listener, broken=True)
                    listener, self.channel = None, ""
                    time.sleep(LONGEST_POLL_DELAY)
                    with self._mutex:
                        # A poll has to come before any thread listens.
                        self._looks_at, self._seated = 0.0, True
        except BaseException as error:
            logger.exception("The thread that serves waiting callers failed")
            self._fail(
                LockBackendError(f"Waiting callers could not be served: {error}"), this
            )
        finally:
            self._disconnect(listener, broken=False)
            with self._mutex:
                if self._thread is this:
                    self._thread = None

    def _listen(self) -> Notifier | None:
        try:
            listener = self.backend.notifier(self._name)
        except LockBackendError as error:
            # Polling finds out whether the backend is reachable again.
            logger.warning("%s", error)
            listener = None
        beside = None if listener is None else listener.beside
        with self._mutex:
            self.channel = "" if listener is None else listener.channel or self._name
            self._listener, self._beside = listener, beside
            self._asks = listener is not None and listener.asks
        if beside is not None:
            try:
                threading.Thread(
                    target=self._handle_messages,
                    args=(beside,),
                    name="dlocks-hearing",
                    daemon=True,
                ).start()
            except RuntimeError as error:
                logger.warning(
                    "Waiting callers poll, as no thread could be started: %s", error
                )
                self._disconnect(listener, broken=False)
                self.channel, listener = "", None
        self._ready.set()
        return listener

    def _handle_messages(self, beside: Notifier) -> None:
        """Receive messages while the background thread does something else."""
        while self._beside is beside:
            self._take(beside.wait(IDLE_CLOSE_AFTER, ()))

    def _disconnect(self, listener: Notifier | None, *, broken: bool) -> None:
        with self._mutex:
            if self._listener is listener:
                # Otherwise it belongs to a later thread.
                self._listener = self._beside = None
        with suppress(LockBackendError), self._alone(listener):
            if listener is not None and not broken:
                listener.close()
        self.backend.close()

    @property
    def _looks(self) -> bool:
        """Return whether to poll in spite of a listener."""
        listener = self._listener
        return clock.now() < self._looks_until or (
            listener is not None and not listener.hears_all
        )

    @contextmanager
    def _alone(self, listener: Notifier | None) -> Iterator[None]:
        """Use the connection on which another thread may listen."""
        if listener is None or listener.receive_lock is None:
            yield
            return
        # A listening thread stops in time for a poll.
        if not listener.receive_lock.acquire(timeout=LISTENER_TIMEOUT):
            raise LockBackendError(
                "A listening thread was interrupted and did not stop."
            )
        self._overheard = False
        try:
            yield
        finally:
            listener.receive_lock.release()

    def _listens(self, listener: Notifier | None) -> bool:
        """Return whether to wait for messages now, instead of for new waiters."""
        if listener is None or listener.beside is listener:
            return False
        if listener.receive_lock is None and not listener.asks:
            return True
        if self._news:
            return True
        if self._overheard or (listener.asks and self._looks):
            return False
        return any(
            waiter.seated and not waiter.woken for waiter in self._waiters.values()
        )

    def _listen_with(self, listener: Notifier) -> None:
        if listener.receive_lock is None:
            self._take(self._heard(listener, self._looks_at))
        elif listener.receive_lock.acquire(blocking=False):
            try:
                self._take(self._heard(listener, 0.0 if self._news else self._looks_at))
            finally:
                listener.receive_lock.release()
        elif not self._overheard:
            # A caller's thread has just begun to listen, or is about to stop.
            time.sleep(SHORTEST_POLL_DELAY)
        while self._news:
            with self._alone(listener):
                listener.advance(self._news.popleft())
            with self._mutex:
                self._looks_at, self._seated = 0.0, True

    def _take(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if message.free:
                # The transaction that held the key has ended. The background thread
                # sends the request for it.
                self._news.append(message.free)
            elif (waiter := self._waiters.get(message.owner)) is not None:
                waiter.apply_message(message)
                waiter.wake()

    def _heard(self, listener: Notifier, until: float) -> Sequence[Message]:
        """Return the messages that arrive until ``until``."""
        pause = max(0.0, min(until - clock.now(), IDLE_CLOSE_AFTER))
        claims: list[Claim] = []
        if listener.asks:
            with self._mutex:
                if pause == 0 or not self._listens(listener):
                    return ()
                # Also claims that are about to be queued, because their turn may come
                # by then.
                claims = [
                    waiter.claim
                    for waiter in self._waiters.values()
                    if not waiter.woken
                ]
        messages = listener.wait(pause, claims)
        self._listened_at = clock.now()
        return messages

    def _heartbeat(self, listener: Notifier | None) -> float | None:
        """Send heartbeats, and return the seconds until the next poll.

        Return None if a poll is due now.
        """
        if listener is None or not listener.asks or self._looks:
            return None
        sent = clock.now()
        with self._mutex:
            # A waiter that was woken just now is about to leave.
            waiters = [
                one
                for one in self._waiters.values()
                if one.seated
                and one.woken <= sent - HEARTBEAT_EVERY
                and not one.is_overdue
            ]
        if not waiters:
            return float("inf")
        place = listener.heartbeat([waiter.claim for waiter in waiters])
        if place is None:
            return None
        if place.clock:
            for waiter in waiters:
                waiter.apply(place, sent)
        return place.next_check

    def _cancel_abandoned(self) -> None:
        """Cancel the claims of waiters that will never continue."""
        with self._mutex:
            gone = [waiter for waiter in self._waiters.values() if waiter.is_gone]
        for waiter in gone:
            self.remove(waiter)
            self.backend.release(waiter.claim, failed=True)

    def _pause(self, nearest: int) -> float:
        """Return the seconds until the next poll. A nearer turn means fewer."""
        now = clock.now()
        if nearest != self._nearest:
            if nearest < self._nearest:
                # The duration of one turn follows from how far the queue has moved.
                turn = (now - self._moved_at) / (self._nearest - nearest)
                self._turn = turn if self._turn is None else (3 * self._turn + turn) / 4
            self._nearest, self._moved_at = nearest, now
        if nearest == 0:
            return min(
                LONGEST_POLL_DELAY,
                max(SHORTEST_POLL_DELAY, (now - self._moved_at) / 10),
            )
        return min(
            LONGEST_POLL_DELAY * nearest,
            max(
                SHORTEST_POLL_DELAY,
                nearest * (self._turn or LONGEST_POLL_DELAY / 10) / 2,
            ),
        )

    def _look(self, *, heard: bool) -> tuple[float, int]:
        """Poll the claims.

        Return the seconds until the next poll, and how many claims are ahead.
        """
        sent = clock.now()
        with self._mutex:
            # With notifications, poll only claims that are due: for a heartbeat, or to
            # find an expired lease. Include those that are due soon. They came one by
            # one, and would always be polled one by one.
            all_of_them = self._seated or self._looks or not self.channel
            self._seated = False
            seated = {
                owner: one
                for owner, one in self._waiters.items()
                if one.seated and not one.is_overdue
            }
            due = any(waiter.look_at <= sent for waiter in seated.values())
            waiters = {
                owner: waiter
                for owner, waiter in seated.items()
                if all_of_them or (due and waiter.look_at <= sent + HEARTBEAT_EVERY / 2)
            }
            for waiter in waiters.values():
                waiter.look_at = sent + HEARTBEAT_EVERY * 0.9
        if not waiters:
            return self._soonest(), 0
        places = self.backend.poll(
            [waiter.claim for waiter in waiters.values()], heartbeat=heard
        )
        answered = clock.now()
        nearest = sys.maxsize
        for owner, waiter in waiters.items():
            place = places.get(owner)
            if place is not None and self._missed_notification(waiter, place, answered):
                self._looks_until = clock.now() + SPIN_SECONDS
            if place is None:
                # It was skipped and removed for missing heartbeats. Return it to its
                # position.
                with waiter.mutex:
                    if waiter.left or waiter.woken:
                        # A woken waiter has had its turn, and returns only when it goes
                        # on.
                        continue
                    sent_again = clock.now()
                    place = self.backend.enqueue(
                        waiter.claim, self.channel, waiter.number
                    ) or Ticket(next_check=0.0)
                    if waiter.apply(place, sent_again):
                        waiter.wake()
                    continue
            if waiter.apply(place, sent):
                waiter.wake()
            else:
                waiter.look_at = min(waiter.look_at, sent + place.next_check)
                nearest = min(nearest, place.ahead)
        return self._soonest(), 0 if nearest == sys.maxsize else nearest

    def _soonest(self) -> float:
        """Return the seconds until the first waiter has to be polled."""
        with self._mutex:
            look_at = [
                one.look_at
                for one in self._waiters.values()
                if one.seated and not one.is_overdue
            ]
        return min(look_at, default=float("inf")) - clock.now()

    def _missed_notification(
        self, waiter: Waiter, place: Ticket, answered: float
    ) -> bool:
        """Return whether a claim's turn came, or will come, without a message."""
        if place.grant is None or place.grant.lease is None or waiter.woken:
            return place.unnotified
        # The latest possible time of the grant.
        granted_at = (
            answered + place.grant.lease - min(waiter.claim.ttl, HANDOVER_LEASE)
        )
        # A second thread that does nothing else has received all messages.
        hears = self._listener is not None and self._listener.beside is self._listener
        return granted_at + NOTIFIED_WITHIN < (answered if hears else self._listened_at)

    def _fail(
        self, error: LockBackendError, ends: threading.Thread | None = None
    ) -> None:
        with self._mutex:
            if self._thread is ends:
                # The next waiter needs a new thread.
                self._thread = None
            waiters = list(self._waiters.values())
            self._waiters.clear()
        for waiter in waiters:
            waiter.error = error
            waiter.wake()


_rooms: weakref.WeakSet[Waiters] = weakref.WeakSet()


def _forked() -> None:
    global _making
    _making = threading.Lock()
    for room in list(_rooms):
        room._reset()


in_child(_forked)


_making = threading.Lock()


def waiters_of(backend: Backend) -> Waiters:
    """Return the waiters of a backend in this process."""
    room: Waiters | None
    with _making:
        # They have the same lifetime.
        if (room := backend.room) is None:
            room = backend.room = Waiters(backend)
        return room
