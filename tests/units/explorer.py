"""All orders in which callers can use one hold, run with the real ``Life``.

A scenario is a few callers. Each is a generator: a step ends where others may run,
which is between two critical sections or requests. ``explore()`` runs every order of
the steps of all callers, and checks the promises in each. Two orders that have led to
the same world continue in the same way, so the rest is explored once. A caller learns
of the world only by ``World.saw()``, which makes that comparison possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from dlocks.core.entry import Entry
from dlocks.core.life import Effect, Life, Phase, Reason

# A generator that returns whether its caller was told of the loss.
Steps = Iterator[None]
Caller = Callable[["World"], Steps]


class Transaction:
    """A transaction of one caller."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stands = True


class World:
    """One key, one hold of this process, and what its callers have seen.

    The row of the key has an owner: this hold, another caller ("other"), a process that
    has resumed the hold ("resumed"), or none.
    """

    def __init__(self, *, block: bool) -> None:
        self.first = Entry("A")
        # The lease has run out, and a renewal may be on its way.
        self.life = Life(self.first, block=block, deadline=0.0)
        self.owner: str | None = "hold"
        # The transaction that has locked the row.
        self.guard: Transaction | None = None
        # Transactions whose work needs the key until they end.
        self.working: list[Transaction] = []
        # The callers in a block, and whether the key was always theirs.
        self.inside: dict[str, bool] = {}
        # How often the one release was sent, and the one report.
        self.releases = self.reports = 0
        self.logs: dict[str, list[Any]] = {}
        self.numbers: dict[Entry, str] = {self.first: "A0"}
        self.problems: list[str] = []
        self.detached = False

    def saw(self, name: str, what: Any) -> Any:
        """Note what a caller has learned, and return it."""
        self.logs.setdefault(name, []).append(
            self.numbers.setdefault(what, f"{name}{len(self.numbers)}")
            if isinstance(what, Entry)
            else what
        )
        return what

    def change_owner(self, owner: str | None) -> None:
        """Give the row to another owner, which ends every block's exclusion."""
        self.owner = owner
        for name in self.inside:
            self.inside[name] = False

    def send_release(self) -> bool:
        """Send a release to the backend, and return whether the key was held."""
        self.releases += 1
        if self.releases > 1:
            self.problems.append("two releases were sent")
        if self.guard is not None:
            self.problems.append("a release waits for a transaction of its process")
        if self.inside and self.life.state.reason in (
            Reason.RELEASED,
            Reason.ORPHANED,
        ):
            self.problems.append("the key was released under a block")
        if self.owner != "hold":
            return False
        if self.life.state.reason is not Reason.LOST and any(
            one.stands for one in self.working
        ):
            self.problems.append("the key is free before a commit")
        self.change_owner(None)
        return True

    @property
    def key(self) -> tuple[Any, ...]:
        """Return all that decides how this world continues."""
        state = self.life.state
        number = self.numbers.get
        return (
            state.phase,
            tuple([number(one, one.caller) for one in state.entries]),
            tuple([number(one, one.caller) for one in state.blocks]),
            tuple([number(one, one.caller) for one in state.arriving]),
            tuple([(one.name, one.stands) for one in state.pins]),
            frozenset([(one.name, one.stands) for one in state.marks]),
            state.offer,
            state.reason,
            state.deadline,
            self.owner,
            self.guard and self.guard.name,
            tuple([(one.name, one.stands) for one in self.working]),
            tuple(sorted(self.inside.items())),
            self.releases,
            self.reports,
            self.detached,
            tuple(sorted((name, tuple(log)) for name, log in self.logs.items())),
            tuple(self.problems),
        )


# What callers do. Each function returns a generator when it is called with a world.


def perform(w: World, name: str, effect: Effect) -> Iterator[None]:
    """Do what an event asks for, and return whether the caller gets LockLost."""
    told = Effect.LOST in w.saw(name, effect)
    if Effect.RELEASE in effect:
        yield
        if not w.saw(name, w.send_release()):
            yield
            told = (yield from perform(w, name, w.life.not_released("gone"))) or told
    if Effect.REPORT in effect:
        w.reports += 1
        if w.reports > 1:
            w.problems.append("the loss is reported twice")
    return told


def verify(w: World, name: str) -> Iterator[None]:
    """Ask the backend whether the key is held. If it is not, the hold is lost."""
    yield
    if w.saw(name, w.owner != "hold"):
        yield
        return (yield from perform(w, name, w.life.lose("gone")))
    return False


def leave(w: World, name: str, entry: Entry, *within: Transaction) -> Iterator[None]:
    """End the use of a caller, which learns of a loss if there was one."""
    return (yield from ended(w, name, partial(w.life.leave, entry, within)))


def ended(w: World, name: str, event: Callable[..., Effect]) -> Iterator[None]:
    exclusive = w.inside.pop(name, True)
    told = False
    effect = w.saw(name, event())
    if Effect.VERIFY in effect:
        told = yield from verify(w, name)
        yield
        effect = event(verified=True)
    told = (yield from perform(w, name, effect)) or told
    if not exclusive and not told:
        w.problems.append(f"the block of {name} has lost the key in silence")
    if told and w.life.state.reason is None:
        w.problems.append(f"{name} was told of a loss that was none")
    return told


def block(name: str = "B", *, cancelled: bool = False, **end: Any) -> Caller:
    """Enter the hold, check with the backend, work, and leave."""

    def steps(w: World) -> Steps:
        entry = Entry(name)
        if w.saw(name, w.life.enter(entry, block=True)):
            # The caller makes a claim of its own.
            return
        gone = yield from verify(w, name)
        if not gone and not cancelled:
            w.life.receive(entry)
            w.inside[name] = w.owner == "hold"
            yield
        yield from end_of(w, name, entry, **end)

    return steps


def abandoner(name: str = "B") -> Caller:
    """Enter the hold, and end without leaving it."""

    def steps(w: World) -> Steps:
        entry = Entry(name)
        if not w.saw(name, w.life.enter(entry)):
            yield
            w.life.receive(entry)
        yield
        yield from perform(w, name, w.life.orphan(["A", name]))

    return steps


def end_of(
    w: World, name: str, entry: Entry, *, transaction: bool = False, rollback=False
) -> Steps:
    """Leave an entry, perhaps in a transaction that ends after that."""
    mine = Transaction(name)
    mine.stands = transaction
    told = yield from leave(w, name, entry, *[mine][: int(transaction)])
    if transaction:
        if not told:
            w.working.append(mine)
        yield
        mine.stands = False
        if told or rollback:
            # A rollback calls nothing.
            return
        yield
        yield from perform(w, name, w.life.settle())


def first(**end: Any) -> Caller:
    """Leave the entry of the caller that has acquired the hold."""
    return lambda w: end_of(w, "A", w.first, **end)


def first_in_block(**end: Any) -> Caller:
    """Work in the block of the caller that has acquired the hold, and leave it."""

    def steps(w: World) -> Steps:
        w.inside["A"] = w.owner == "hold"
        yield
        yield from end_of(w, "A", w.first, **end)

    return steps


def undone() -> Caller:
    """Begin a block of the first caller, which an interrupt ends before its work."""

    def steps(w: World) -> Steps:
        new = Entry("A")
        refused = w.saw("A", w.life.begin_block(new))
        yield
        if new.used is not None:
            w.life.undo_block(w.saw("A", new.used))
        elif not refused:
            yield from perform(w, "A", w.life.leave(new, failed=True, verified=True))

    return steps


def releaser(name: str = "R") -> Caller:
    """Release the hold in a thread that has not entered it."""

    def steps(w: World) -> Steps:
        yield from ended(w, name, partial(w.life.leave_one, name))

    return steps


def user(name: str = "U", ended: Sequence[str] = ()) -> Caller:
    """Use the hold of another thread in a ``with hold`` block."""

    def steps(w: World) -> Steps:
        new = Entry(name)
        if not w.saw(name, w.life.begin_block(new, ended)):
            entry = w.saw(name, new.used or new)
            w.inside[name] = w.owner == "hold"
            yield
            yield from end_of(w, name, entry)

    return steps


def guard(name: str = "G", *, rollback: bool = False) -> Caller:
    """Run ``hold.atomic()``."""

    def steps(w: World) -> Steps:
        mine = Transaction(name)
        if w.saw(name, w.life.pin(mine)):
            return
        yield
        if not w.saw(name, w.owner == "hold"):
            # The statement that locks the row finds none: LockLost, and a rollback,
            # perhaps only to a savepoint.
            w.life.unpin(mine)
            mine.stands = False
        else:
            w.guard = mine
            w.working.append(mine)
            yield
            if w.owner != "hold":
                w.problems.append("the key was taken under a guard")
            w.guard, mine.stands = None, False
            yield
            w.life.unpin()
        if not rollback:
            yield
            yield from perform(w, name, w.life.settle())

    return steps


def detacher(name: str = "A", *, fails: bool = False, interrupted: str = "") -> Caller:
    """Pass the hold to another process, which resumes it.

    The request may fail, and the caller may be interrupted before or after its end.
    """

    def steps(w: World) -> Steps:
        mine = f"{name} {fails} {interrupted}"
        if w.saw(name, w.life.offer([name], mine)):
            return
        yield
        if fails:
            yield from perform(w, f"{name}'", w.life.withdraw())
        elif interrupted:
            if interrupted == "after":
                w.saw(name, w.life.detach())
                yield
            yield from perform(w, f"{name}'", w.life.recall("in vain", mine))
        elif not w.saw(name, w.life.detach()):
            w.detached = True
            if w.reports:
                w.problems.append("a lost hold is passed on")
            if any(one.stands for one in w.working):
                w.problems.append("the hold is passed on before a commit")
            yield
            if set(w.inside) - {name}:
                w.problems.append("the hold is passed on under a block")
            if w.owner == "hold":
                w.change_owner("resumed")
        else:
            # It is interrupted by its own error.
            yield from perform(w, f"{name}'", w.life.recall("in vain", mine))

    return steps


def loser(*, taken_over: bool = True) -> Caller:
    """Report a lease that has expired. Then another caller may take the key over."""

    def steps(w: World) -> Steps:
        effect = w.life.expire("expired", lambda: w.life.state.deadline < 1)
        if Effect.REPORT in effect and w.life.state.deadline == 1:
            w.problems.append("a renewed hold is lost")
        yield from perform(w, "lease", effect)
        if Effect.REPORT in effect and taken_over:
            yield
            if w.owner == "hold":
                w.change_owner("other")

    return steps


def renewer(w: World) -> Steps:
    """Renew the lease."""
    if w.saw("renewer", w.owner == "hold"):
        yield
        w.life.set_deadline(lambda _: 1.0)


def clearer(w: World) -> Steps:
    """Clear the lock by hand, unless a transaction has locked its row."""
    if w.guard is not None:
        return
    w.saw("clear", w.owner)
    if w.owner == "hold":
        w.change_owner("other")
    yield
    yield from perform(w, "clear", w.life.lose("cleared"))


def orphaner(*ended: str) -> Caller:
    """Look whether all callers of the hold have ended."""

    def steps(w: World) -> Steps:
        yield from perform(w, "timer", w.life.orphan(ended))

    return steps


def settler(w: World) -> Steps:
    """Look twice whether the transactions have ended, as the timer does."""
    yield from perform(w, "settler", w.life.settle())
    yield
    yield from perform(w, "settler", w.life.settle())


def exiter(w: World) -> Steps:
    """Release the holds of the process at its end."""
    yield from perform(w, "exit", w.life.exit())


def explore(
    *callers: Caller, block: bool = False, until_found: bool = False
) -> tuple[int, dict[str, tuple[int, ...]]]:
    """Run all orders of the steps of the callers.

    Return the number of orders, and each problem with the first order that shows it.
    With ``until_found``, the first problem ends the exploration.
    """
    orders: dict[tuple[Any, ...], int] = {}
    problems: dict[str, tuple[int, ...]] = {}

    def run(path: tuple[int, ...]) -> tuple[World, list[int], tuple[int, ...]]:
        w = World(block=block)
        running = {number: caller(w) for number, caller in enumerate(callers)}
        taken = [0] * len(callers)
        for number in path:
            taken[number] += 1
            if next(running[number], w) is w:
                del running[number]
        return w, list(running), tuple(taken)

    def count(path: tuple[int, ...]) -> int:
        w, running, taken = run(path)
        # Which callers have ended is a part of what they have seen.
        key = taken, tuple(running), w.key
        if key in orders:
            return orders[key]
        if not running:
            check_end(w)
        for problem in w.problems:
            problems.setdefault(problem, path)
        if until_found and problems:
            return 1
        orders[key] = sum(count((*path, number)) for number in running) or 1
        return orders[key]

    return count(()), problems


def check_end(w: World) -> None:
    """Check the promises after all callers, and one more look of the timer."""
    for _ in perform(w, "end", w.life.settle()):
        pass
    state = w.life.state
    if (state.phase is Phase.ENDED) != (state.reason is not None):
        w.problems.append("a hold has ended without a reason")
    if state.phase in (Phase.LEFT, Phase.DETACHING):
        w.problems.append(f"the hold stays {state.phase.value}")
    if not state.entries and not w.detached and w.owner == "hold":
        w.problems.append("all entries were left, and the key is still taken")
    if state.entries and state.phase is not Phase.ENDED and w.owner != "hold":
        w.problems.append("an entry is open without the key")
    if state.reason is Reason.RELEASED and w.releases != 1:
        w.problems.append("the release of a released hold was not sent")
    reported = Reason.LOST, Reason.ORPHANED, Reason.RECALLED
    if state.reason in reported and w.reports != 1:
        w.problems.append("a loss was not reported")
