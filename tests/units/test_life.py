"""The state machine of a hold, in all orders of what its callers can do."""

from __future__ import annotations

import inspect
import threading

import pytest

from dlocks.core import life
from dlocks.core.entry import Entry
from dlocks.core.life import Effect, Life, Phase, Reason
from tests.units.explorer import (
    Transaction,
    abandoner,
    block,
    clearer,
    detacher,
    exiter,
    explore,
    first,
    first_in_block,
    guard,
    loser,
    orphaner,
    releaser,
    renewer,
    settler,
    undone,
    user,
)

pytestmark = [pytest.mark.once, pytest.mark.engine("sqlite")]

# What up to four callers do with a hold that caller A has acquired.
SCENARIOS = {
    "two releases": (releaser("R"), releaser("Q"), first()),
    "two leaves of one entry": (first(), first(), loser(taken_over=False)),
    "an entry and a release": (block(), releaser(), first()),
    "cancelled entries": (block(cancelled=True), block("C", cancelled=True), first()),
    "blocks of other threads": (user("U"), user("V"), first(), releaser()),
    "a block after the caller has ended": (
        user("U", ["A"]),
        orphaner("A"),
        block(),
        settler,
    ),
    "orphans": (abandoner(), user("U"), loser(), releaser()),
    "a block of a running caller": (orphaner("A"), block(), first(), loser()),
    "a block that did not begin": (undone(), first(), block(), loser()),
    "a loss": (loser(), block(), first(), orphaner("A")),
    "two losses": (loser(), loser(), block(), first()),
    "a loss without a takeover": (loser(taken_over=False), block(), first()),
    "a loss and a renewal": (loser(taken_over=False), renewer, block(), first()),
    "a clear": (clearer, block(), first()),
    "a clear and a guard": (clearer, block(), guard(), first()),
    "a guard": (guard(), first(), block(), settler),
    "two guards": (guard(), guard("H", rollback=True), first(), settler),
    "a guard of a lost hold": (guard(), loser(), first(), releaser()),
    "leases left in transactions": (
        block(transaction=True),
        block("C"),
        first(transaction=True, rollback=True),
        settler,
    ),
    "entries after a leave in a transaction": (
        first(transaction=True),
        block(),
        block("C", transaction=True),
    ),
    "a loss after a leave in a transaction": (
        loser(),
        first(transaction=True),
        settler,
        block(),
    ),
    "a timer after a leave in a transaction": (
        first(transaction=True, rollback=True),
        user(),
        orphaner("A"),
        settler,
    ),
    "orphans of a transaction": (
        block(transaction=True),
        orphaner("A"),
        guard(),
        settler,
    ),
    "a detach": (detacher(), block(), first(), guard()),
    "a detach of a lost hold": (detacher(), loser(), first(), block()),
    "a failed detach": (detacher(fails=True), first(), block(), guard()),
    "an interrupted detach": (
        detacher(interrupted="before"),
        first(),
        block(),
        guard(),
    ),
    "a detach that is interrupted at its end": (
        detacher(interrupted="after"),
        first_in_block(),
        block(),
        loser(),
    ),
    "a detach and a release": (detacher(), releaser(), orphaner("A"), user()),
    "a detach and a clear": (detacher(fails=True), clearer, detacher(), user()),
    "a detach after a guard": (detacher(), guard(), settler, first()),
    "a detach in a transaction": (
        detacher(),
        block(transaction=True),
        first(),
        loser(),
    ),
    "a detach and a leave in a transaction": (
        detacher(),
        first(transaction=True),
        settler,
        block(),
    ),
    "an interrupted detach and a leave in a transaction": (
        detacher(interrupted="before"),
        first(transaction=True, rollback=True),
        settler,
        block(),
    ),
    "an exit": (exiter, block(), first(transaction=True), guard()),
    "an exit and a detach": (exiter, detacher(), first(), block()),
    "an exit and a loss": (exiter, loser(), block(), first()),
}


@pytest.mark.parametrize("callers", SCENARIOS.values(), ids=SCENARIOS)
@pytest.mark.parametrize("in_block", [False, True], ids=["", "in a block"])
def test_no_order_of_callers_breaks_a_promise(callers, in_block):
    """In every order, a key is released once, and no block loses it in silence.

    No caller gets LockLost without a loss, no transaction commits after its key is
    free, and no key stays taken.
    """
    orders, problems = explore(*callers, block=in_block)
    assert problems == {}
    assert orders > 1


# Mistakes in the rules: the scenario that finds it, the text of the code, and its
# replacement.
MISTAKES = {
    "a block of an ended hold ends in silence": (
        "a loss",
        "    return Effect.LOST\n\n\ndef _settled",
        "    return Effect.NOTHING\n\n\ndef _settled",
    ),
    "a hold with two entries is detached": ("a detach", "or len(old.entries) != 1", ""),
    "a failed detach revives a hold that was left": (
        "a failed detach",
        "return (held, Effect.NOTHING) if old.entries else _settled(held)",
        "return held, Effect.NOTHING",
    ),
    "an interrupted detach keeps the key": (
        "an interrupted detach",
        "_settled(old)\n        return _end(old, Reason.RECALLED",
        "old, Effect.NOTHING\n        return _end(old, Reason.RECALLED",
    ),
    "an interrupted detach frees the key before a commit": (
        "an interrupted detach and a leave in a transaction",
        "_settled(old)\n        return _end(old, Reason.RECALLED",
        """\
_end(old, Reason.RELEASED), Effect.RELEASE
        return _end(old, Reason.RECALLED""",
    ),
    "a hold is passed on before a commit": (
        "a detach and a leave in a transaction",
        "if old.phase is not Phase.DETACHING or old.is_kept:",
        "if old.phase is not Phase.DETACHING:",
    ),
    "an interrupted detach ends a block in silence": (
        "a detach that is interrupted at its end",
        "_end(old, Reason.RECALLED, why), Effect.RELEASE | Effect.REPORT",
        "old, Effect.RELEASE",
    ),
    "a leave forgets the guards": (
        "a guard",
        "return bool(_standing(self.pins) or _standing(self.marks))",
        "return bool(_standing(self.marks))",
    ),
    "a new entry forgets the transactions": (
        "entries after a leave in a transaction",
        "left_by=None,",
        "left_by=None, marks=(),",
    ),
    "only the last leave counts its transactions": (
        "entries after a leave in a transaction",
        "marks = _standing(dict.fromkeys((*marks, *within)))",
        "marks = _standing(within) if is_last else ()",
    ),
    "a caller that has ended ends the hold of others": (
        "a block of a running caller",
        "or len(_of_callers(old.entries, ended)) < len(old.entries)",
        "or not _of_callers(old.entries, ended)",
    ),
    "an orphan is released under a transaction": (
        "orphans of a transaction",
        "            or old.is_kept\n            or len(_of_callers",
        "            or len(_of_callers",
    ),
    "an expired lease is lost under a guard": (
        "a guard of a lost hold",
        "(_standing(old.pins) or not is_due())",
        "not is_due()",
    ),
    "a renewed lease is lost": (
        "a loss and a renewal",
        "(_standing(old.pins) or not is_due())",
        "_standing(old.pins)",
    ),
    "a lost hold is not released": (
        "a loss without a takeover",
        "        return Effect.LOST | Effect.RELEASE",
        "        return Effect.LOST",
    ),
    "a hold is settled although it was entered again": (
        "two releases",
        "_settled(old) if old.phase is Phase.LEFT else (old, Effect.NOTHING)",
        "_settled(old)",
    ),
    "a detach of a lost hold succeeds": (
        "a detach of a lost hold",
        """\
        if old.phase is not Phase.DETACHING or old.is_kept:
            return old, Effect.LOST
""",
        "",
    ),
    "an exit ends blocks in silence": (
        "an exit and a detach",
        "return self.reason not in (None, Reason.RELEASED, Reason.DETACHED)",
        "return self.reason is Reason.LOST",
    ),
    "another thread releases under a block": (
        "blocks of other threads",
        "        elif free:\n            entry = (_alone(free) or free)[0]\n",
        "        elif received:\n            entry = received[0]\n",
    ),
    "an entry is verified after it was left": (
        "a guard",
        "        return old, Effect.VERIFY",
        """\
        return old._replace(entries=_without(old.entries, (entry,))), Effect.VERIFY""",
    ),
    "a release that found no key is no loss": (
        "a clear",
        """\
        new = old._replace(reason=Reason.LOST, why=why)
        return new, Effect.REPORT | Effect.LOST
""",
        "        return old, Effect.NOTHING\n",
    ),
    "a leave counts twice": (
        "two leaves of one entry",
        "    if entry not in old.entries:\n        return old, Effect.NOTHING\n",
        "",
    ),
}


def life_with(*changes):
    """Return the class ``Life`` of a module with changed text."""
    text = inspect.getsource(life)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = {"__name__": "mistaken"}
    exec(compile(text, "mistaken", "exec"), names)
    # The explorer compares with the words of the real module.
    for word in ("Effect", "Phase", "Reason"):
        names[word] = getattr(life, word)
    return names["Life"]


@pytest.mark.parametrize(
    ("scenario", "changes"),
    [(scenario, changes) for scenario, *changes in MISTAKES.values()],
    ids=MISTAKES,
)
def test_every_mistake_in_the_rules_is_found(scenario, changes, monkeypatch):
    """The scenarios are enough: each of these mistakes breaks a promise in one."""
    monkeypatch.setattr("tests.units.explorer.Life", life_with(*changes))
    callers = SCENARIOS[scenario]
    assert any(
        explore(*callers, block=in_block, until_found=True)[1]
        for in_block in (False, True)
    )


def test_a_handler_may_leave_within_a_section_of_its_own_thread():
    """A signal handler that releases the hold during another event is not undone."""
    first_entry, second = Entry("A"), Entry("B")
    hold = Life(first_entry)
    hold.enter(second)

    class Interrupting(Transaction):
        @property
        def stands(self):
            # Python calls a signal handler between any two calls.
            hold.leave(second, verified=True)
            return False

        @stands.setter
        def stands(self, value):
            pass

    effect = hold.leave(first_entry, [Interrupting("T")])
    assert effect is Effect.RELEASE
    assert hold.state.reason is Reason.RELEASED
    assert hold.state.entries == ()


def test_an_exception_within_a_section_changes_nothing():
    """An interrupt in the middle of an event leaves the state as it was."""
    hold = Life(Entry("A"))

    class Interrupting:
        @property
        def stands(self):
            raise KeyboardInterrupt

    before = hold.state
    with pytest.raises(KeyboardInterrupt):
        hold.leave(hold.state.entries[0], [Interrupting()])
    assert hold.state is before
    # The mutex is free, also for other threads.
    other = threading.Thread(target=hold.leave, args=(hold.state.entries[0],))
    other.start()
    other.join(10)
    assert hold.state.phase is Phase.ENDED
