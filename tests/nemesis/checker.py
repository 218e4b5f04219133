"""Check a history against the promises of the README.

The valid interval of a hold begins when its caller has acquired it. It ends when its
release is invoked, at its own deadline, when it reports its loss, or with its process.
From the invocation of its release, another caller may hold the key. A hold in a
transaction lasts until its commit is invoked. It counts only if the commit was
acknowledged.

The checks are:

* tokens: they are unique and grow in real time.
* exclusion: no two valid holds overlap that exclude each other.
* updates: no update is lost in a transaction, with claim-before-read fencing, or under
  ``hold.atomic()``.
* releases: after an acknowledged release, no waiter waits for the lease to expire.
* stuck: no key is unavailable for longer than ttl + grace + one poll + 0.25 s while the
  server is up.
* phantoms: every acknowledged grant was in the database.
* max_hold: nothing is held for longer than its ``max_hold``.
* refused: no wait ended by LockDeadlock that was not part of a cycle.
* deadlocks: no cycle of waiting callers lasted longer than 3 s.
* crashes: no process ended by an error that dlocks does not name.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.nemesis.deadlocks import false_refusals, late_reports

GRACE = 0.5
POLL = 0.25
SLACK = 0.25
# Seconds for which a queued claim counts without a heartbeat. A process that died
# shortly before a gap may cause a part of it.
HEARTBEAT_TIMEOUT = 2.0
# Seconds until a hold is released whose thread has ended without a release: two looks
# of the keeper, and its round.
FORGOTTEN = 1.0
# Seconds to reconnect after a fault of a proxy, a pooler or a session.
RECONNECT = 1.0
FOREVER = 1e6
# Faults after which a process sends nothing. Their events name the process and its key.
SILENT = {"kill", "stop", "partition"}

Interval = tuple[float, float]


@dataclass
class Held:
    """One attempt of one worker to acquire, hold and release, as recorded."""

    pid: int
    number: int
    key: str = ""
    mode: str = "x"
    scope: str = "lease"
    permits: int = 0
    ttl: float = 0.0
    timeout: float | None = None
    asked: float = FOREVER
    got: float | None = None
    token: int = 0
    # The time until which it is known to have been held.
    until: float = 0.0
    lost: float = FOREVER
    end: float = FOREVER
    gone: float = FOREVER
    answer: str | None = None
    refused: float = FOREVER
    refusal: str = ""
    max_hold: float = FOREVER
    died: float = FOREVER
    # Whether its worker asked for another key while it held this one.
    waited_inside: bool = False

    @property
    def valid(self) -> Interval | None:
        if self.got is None:
            return None
        if self.scope == "transaction":
            return (self.got, self.end) if self.answer == "" else None
        end = min(self.until, self.lost, self.end, self.died)
        return (self.got, end) if end > self.got else None

    @property
    def occupies(self) -> Interval | None:
        """Return the interval in which it rightly kept other callers out."""
        if self.scope == "transaction" and self.got is not None:
            # A transaction ends with its connection.
            return self.got, min(self.gone, self.died)
        return self.valid

    @property
    def waits(self) -> Interval:
        return self.asked, min(
            self.refused, self.died, FOREVER if self.got is None else self.got
        )

    def __str__(self) -> str:
        got = "never" if self.got is None else f"{self.got:.6f}"
        valid = "none" if self.valid is None else "{:.6f}-{:.6f}".format(*self.valid)
        return (
            f"{self.key!r} {self.mode} {self.scope} by {self.pid}#{self.number}: asked"
            f" {self.asked:.6f}, got {got}, token {self.token}, valid {valid}, release"
            f" invoked {self.end:.6f}, answered {self.gone:.6f} {self.answer!r}"
        )


@dataclass
class Put:
    register: str
    time: float
    value: int
    answer: str
    who: str


@dataclass
class History:
    """The records of the workers and of the campaign in one directory."""

    turns: list[Held] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    # The events of the campaign: kind, time, and details.
    events: list[list[Any]] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)
    granted: set[tuple[str, int]] = field(default_factory=set)
    crashes: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, directory: Path, until: float = FOREVER) -> History:
        """Read the records. ``until`` is the time now if the campaign still runs."""
        history = cls()
        campaign = directory / "campaign.history"
        if campaign.exists():
            history.events = [
                json.loads(line) for line in campaign.read_text().splitlines()
            ]
        died = {event[2]: event[1] for event in history.events if event[0] == "kill"}
        over = max(
            (event[1] for event in history.events if event[0] == "over"), default=until
        )
        for path in sorted(directory.glob("worker-*.history")):
            pid = int(path.stem.split("-")[2])
            history._read_worker(path, pid, min(died.get(pid, over), over))
        final = directory / "final.json"
        if final.exists():
            found = json.loads(final.read_text())
            history.registers = found["registers"]
            history.granted = {(key, token) for key, token in found["granted"]}
        history.crashes = [
            path.read_text() for path in sorted(directory.glob("worker-*.crash"))
        ]
        return history

    def _read_worker(self, path: Path, pid: int, died: float) -> None:
        turns: dict[int, Held] = {}
        for line in path.read_text().splitlines():
            kind, number, *rest = json.loads(line)
            turn = turns.setdefault(number, Held(pid, number, died=died))
            if kind == "ask":
                (
                    turn.asked,
                    turn.key,
                    turn.mode,
                    turn.scope,
                    turn.permits,
                    turn.ttl,
                    _,
                    turn.timeout,
                ) = rest
            elif kind == "got":
                turn.got, turn.token, remaining = rest
                turn.until = turn.got + remaining
            elif kind == "held":
                turn.until = max(turn.until, rest[0] + rest[1])
                # A late renewal succeeds if no other caller has acquired the key.
                turn.lost = FOREVER
            elif kind == "lost":
                turn.lost = min(turn.lost, rest[0])
            elif kind == "end":
                (turn.end,) = rest
            elif kind == "gone":
                turn.gone, turn.answer = rest
            elif kind == "no":
                turn.refused, turn.refusal = rest
            elif kind == "max":
                (turn.max_hold,) = rest
            elif kind == "struck":
                self.events.append(["strike", *rest, pid, "holding", turn.key])
            elif kind == "put":
                time, register, value, answer = rest
                self.puts.append(Put(register, time, value, answer, f"{pid}#{number}"))
        self.turns += [turn for turn in turns.values() if turn.asked < FOREVER]


@dataclass
class Report:
    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    longest_gap: float = 0.0
    longest_wait: float = 0.0

    @property
    def passed(self) -> bool:
        return not any(self.violations.values())

    def lines(self) -> Iterator[str]:
        for name, number in sorted(self.counts.items()):
            yield f"{name}: {number}"
        yield (
            "longest time for which a requested key had no holder:"
            f" {self.longest_gap:.2f} s"
        )
        yield f"longest wait: {self.longest_wait:.2f} s"
        for name, found in self.violations.items():
            yield f"VIOLATED {name}: {len(found)}"
            for text in found[:5]:
                yield f"    {text}"


def check(history: History, *, one_writer: bool = False) -> Report:
    """Run all checks.

    With ``one_writer``, a stopped process may have blocked the whole database (SQLite).
    """
    report = Report()
    _note_waits_inside(history.turns)
    by_key: dict[str, list[Held]] = defaultdict(list)
    for turn in history.turns:
        by_key[turn.key].append(turn)
    _count(history, report)
    for turns in by_key.values():
        _check_tokens(turns, report)
        _check_exclusion(turns, report)
        _check_gaps(turns, history.events, report, one_writer=one_writer)
    _check_registers(history, report)
    for turn in history.turns:
        valid = turn.valid
        if valid is not None and valid[1] - valid[0] > turn.max_hold + 0.001:
            report.violations["max_hold"].append(
                f"held for {valid[1] - valid[0]:.3f} s: {turn}"
            )
        acknowledged = turn.got is not None and (
            turn.scope == "lease" or turn.answer == ""
        )
        if (
            acknowledged
            and history.granted
            and (turn.key, turn.token) not in history.granted
        ):
            report.violations["phantoms"].append(str(turn))
    stops = _stops(history.events)
    # A process that is stopped while it writes keeps all others from writing.
    every = itertools.chain.from_iterable(stops.values())
    unwritable = _union(every) if one_writer else []
    for name, found in (
        ("refused", false_refusals(history.turns)),
        ("deadlocks", late_reports(history.turns, stops, unwritable)),
    ):
        if texts := list(found):
            report.violations[name] += texts
    for text in history.crashes:
        report.violations["crashes"].append(text)
    return report


def _count(history: History, report: Report) -> None:
    counts = report.counts
    for turn in history.turns:
        if turn.got is None:
            counts[f"refused: {turn.refusal or 'died'}"] += 1
            counts["operations"] += bool(turn.refusal)
        else:
            counts["grants"] += 1
            counts["grants in transactions"] += turn.scope == "transaction"
            counts["grants shared"] += turn.mode == "s"
            # Requests that were answered: the lock, its release, and the writes below.
            counts["operations"] += 1 + (turn.answer is not None)
            if turn.timeout != 0:
                report.longest_wait = max(report.longest_wait, turn.got - turn.asked)
    counts["operations"] += len(history.puts)
    for event in history.events:
        if event[0] not in {"cont", "heal", "up", "over", "stall"}:
            counts[f"faults: {event[0]}"] += 1
            counts["faults"] += 1
            # The process that was hit was holding, acquiring or releasing.
            if event[0] in SILENT and event[3] != "idle":
                counts[f"faults that hit one {event[3]}"] += 1


def _check_tokens(turns: Iterable[Held], report: Report) -> None:
    granted = [turn for turn in turns if turn.got is not None]
    seen: dict[int, Held] = {}
    for turn in granted:
        # A transaction that was rolled back never had its token.
        if turn.scope == "transaction" and turn.answer != "":
            continue
        if turn.token in seen:
            report.violations["tokens"].append(
                f"the same token twice: {seen[turn.token]}; {turn}"
            )
        seen[turn.token] = turn
    # A request that was sent after a token was known receives a larger one.
    known = sorted((turn for turn in seen.values()), key=lambda turn: turn.got or 0.0)
    times, largest = [], []
    for turn in known:
        times.append(turn.got or 0.0)
        largest.append(
            turn if not largest or turn.token > largest[-1].token else largest[-1]
        )
    for turn in granted:
        place = bisect.bisect_left(times, turn.asked)
        if place and largest[place - 1].token >= turn.token:
            report.violations["tokens"].append(
                f"not larger: {largest[place - 1]}; then {turn}"
            )
    # Exclusive holds follow one another, whenever they were requested.
    last: Held | None = None
    for turn in known:
        if turn.mode == "x" and turn.valid is not None:
            if last is not None and last.token > turn.token:
                report.violations["tokens"].append(
                    f"not larger than before: {last}; then {turn}"
                )
            last = turn if last is None or turn.token > last.token else last


def _check_exclusion(turns: Iterable[Held], report: Report) -> None:
    intervals = sorted(
        ((*turn.valid, turn) for turn in turns if turn.valid is not None),
        key=lambda one: one[0],
    )
    running: list[tuple[float, Held]] = []
    for begin, end, turn in intervals:
        running = [(until, other) for until, other in running if until > begin]
        for _, other in running:
            if "x" in (turn.mode, other.mode):
                report.violations["exclusion"].append(f"{other}; {turn}")
        shares = [other for _, other in running if other.mode == "s"]
        if turn.mode == "s" and turn.permits and len(shares) >= turn.permits:
            report.violations["exclusion"].append(
                f"more than {turn.permits}: {turn}; {'; '.join(map(str, shares))}"
            )
        running.append((end, turn))


def _check_gaps(
    turns: list[Held], events: list[list[Any]], report: Report, *, one_writer: bool
) -> None:
    key = turns[0].key
    ttl = max(turn.ttl for turn in turns)
    stops = _stops(events)
    faults = [
        event
        for event in events
        if event[0] not in {"over", "stall", "cont", "heal", "up"}
    ]
    # Most faults end when they happen. A server that is down stays a fault until it is
    # up again, and a partition until it has healed.
    over = {id(event): event[1] for event in faults}
    over |= {
        id(event): _up_after(event[1], events) for event in faults if event[0] == "down"
    }
    over |= {
        id(event): _heard_again(event, events)
        for event in faults
        if event[0] == "partition"
    }
    waiting = _union(
        piece for turn in turns for piece in _minus(turn.waits, stops.get(turn.pid, ()))
    )
    unnoticed = _unnoticed_deaths(events)
    occupied = _union(
        piece
        for turn in turns
        if (piece := _occupied(turn, stops, unnoticed)) is not None
    )
    released_at = {
        turn.end: turn for turn in turns if turn.scope == "lease" and turn.answer == ""
    }
    for gap in (piece for wait in waiting for piece in _minus(wait, occupied)):
        begin, end = gap
        length = end - begin
        trouble = sum(
            _overlap(gap, (event[1] - event[2], event[1]))
            for event in events
            if event[0] == "stall"
        )
        near = [
            event
            for event in faults
            if begin - ttl - GRACE - HEARTBEAT_TIMEOUT < over[id(event)]
            and event[1] < end
            # A strike delays the key that its thread was about to have, and no other.
            and (event[0] != "strike" or event[4] == key)
        ]
        report.longest_gap = max(report.longest_gap, length)
        if not near:
            # Without a fault, a waiter acquires a released key at once.
            if length > POLL + 2 * SLACK + trouble and begin in released_at:
                report.violations["releases"].append(
                    f"{length:.3f} s after {released_at[begin]}"
                )
            elif length > POLL + 2 * SLACK + trouble:
                report.violations["stuck"].append(
                    f"{key!r} for {length:.3f} s without any fault,"
                    f" {begin:.3f}-{end:.3f}"
                )
            continue
        # Each process that went silent while queued for the key or holding it may block
        # it for as long as a dead holder.
        # It may have asked for another key inside.
        silent = sum(
            event[0] in SILENT
            and (
                event[4] == key
                or any(
                    turn.pid == event[2]
                    and turn.asked <= event[1] <= min(turn.gone, turn.refused)
                    for turn in turns
                )
            )
            for event in near
        )
        allowed = (1 + silent) * (ttl + GRACE + POLL + SLACK) + trouble
        down = [
            (event[1], _up_after(event[1], events))
            for event in events
            if event[0] == "down"
        ]
        allowed += sum(
            _overlap(gap, (since, until + RECONNECT)) for since, until in down
        )
        allowed += RECONNECT * any(
            event[0] not in {"kill", "stop", "down"} for event in near
        )
        # While the reply is delayed, the new holder does not know of its grant.
        allowed += max((event[2] for event in near if event[0] == "late"), default=0.0)
        if one_writer:
            allowed += sum(
                _overlap(gap, piece) for pieces in stops.values() for piece in pieces
            )
        if length > allowed:
            what = ", ".join(f"{event[0]} {event[1]:.3f} {event[2:]}" for event in near)
            report.violations["stuck"].append(
                f"{key!r} had no holder for {length:.3f} s ({begin:.3f}-{end:.3f}),"
                f" {allowed:.3f} s allowed; {what}"
            )


def _check_registers(history: History, report: Report) -> None:
    by_register: dict[str, list[Put]] = defaultdict(list)
    for put in history.puts:
        if put.answer == "":
            by_register[put.register].append(put)
    for register, puts in by_register.items():
        by_value: dict[int, list[Put]] = defaultdict(list)
        for put in puts:
            by_value[put.value].append(put)
        lost = [group for group in by_value.values() if len(group) > 1]
        if register.startswith("unfenced"):
            # No lease can promise this, so it is counted and not judged.
            report.counts["updates without a fence that were lost"] += sum(
                len(group) - 1 for group in lost
            )
            continue
        report.counts["updates"] += len(puts)
        for group in lost:
            who = ", ".join(f"{put.who} at {put.time:.6f}" for put in group)
            report.violations["updates"].append(
                f"{register!r} was {group[0].value} to {who}"
            )
        final = history.registers.get(register)
        if final is not None and final <= max(by_value):
            report.violations["updates"].append(
                f"{register!r} ended at {final}, but was {max(by_value) + 1}"
            )


def _occupied(
    turn: Held, stops: Mapping[int, list[Interval]], unnoticed: set[int]
) -> Interval | None:
    """Return when a hold rightly kept other callers out.

    The lease of a worker that waits for another key is renewed until the worker is
    stopped, although the worker does not record it. A transaction whose process died
    unnoticed stays open on the server, with its row locks. A thread that ends without a
    release records only that.
    """
    if (
        turn.scope == "lease"
        and turn.got is not None
        and turn.gone == FOREVER > turn.end
    ):
        return turn.got, min(turn.end + FORGOTTEN, turn.died)
    if (
        turn.scope == "transaction"
        and turn.pid in unnoticed
        and turn.died < min(turn.gone, turn.refused)
    ):
        return turn.asked, FOREVER
    if not turn.waited_inside or turn.scope == "transaction" or turn.got is None:
        return turn.occupies
    got = turn.got
    stopped = min(
        (since for since, _ in stops.get(turn.pid, ()) if since > got), default=FOREVER
    )
    end = min(turn.lost, turn.end, turn.died, stopped + turn.ttl)
    return got, max(end, turn.occupies[1] if turn.occupies else 0.0)


def _note_waits_inside(turns: Iterable[Held]) -> None:
    by_pid: dict[int, list[Held]] = defaultdict(list)
    for turn in turns:
        by_pid[turn.pid].append(turn)
    for mine in by_pid.values():
        asked = sorted(turn.asked for turn in mine)
        for turn in mine:
            if turn.got is not None:
                following = bisect.bisect_right(asked, turn.got)
                turn.waited_inside = (
                    following < len(asked) and asked[following] < turn.end
                )


# Intervals.


def _unnoticed_deaths(events: Iterable[list[Any]]) -> set[int]:
    """Return the processes that were killed while they were cut off.

    The kernel gives up sending the end of their connections after the worker's
    ``tcp_user_timeout``. The server learns of it by its keepalive, after two hours by
    default.
    """
    cut_off: set[int] = set()
    dead = set()
    for kind, _, *details in events:
        if kind == "partition":
            cut_off.add(details[0])
        elif kind == "heal":
            # One link connects all of them.
            cut_off.clear()
        elif kind == "kill" and details[0] in cut_off:
            dead.add(details[0])
    return dead


def _stops(events: Iterable[list[Any]]) -> Mapping[int, list[Interval]]:
    """Return for each process when it was stopped or cut off."""
    stops: dict[int, list[Interval]] = defaultdict(list)
    since: dict[int, float] = {}
    for event in events:
        if event[0] == "stop":
            since[event[2]] = event[1]
        elif event[0] in {"cont", "kill"} and event[2] in since:
            stops[event[2]].append((since.pop(event[2]), event[1]))
        elif event[0] == "partition":
            stops[event[2]].append((event[1], _heard_again(event, events)))
    return {pid: _union(intervals) for pid, intervals in stops.items()}


def _heard_again(partition: list[Any], events: Iterable[list[Any]]) -> float:
    """Return when packets sent during a partition have arrived.

    TCP doubles its retransmission interval, starting from 0.2 s. It retries a
    connection after 1, 3 and 7 s.
    """
    _, began, pid, *_ = partition
    ends = (
        event[1]
        for event in events
        if event[0] in {"heal", "kill"} and event[2] == pid and event[1] > began
    )
    healed = min(ends, default=FOREVER)
    return healed + (healed - began) + 1


def _up_after(time: float, events: Iterable[list[Any]]) -> float:
    return min(
        (event[1] for event in events if event[0] == "up" and event[1] > time),
        default=FOREVER,
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def _minus(interval: Interval, others: Iterable[Interval]) -> Iterator[Interval]:
    """Yield the parts of an interval outside of others, which are in order."""
    begin, end = interval
    for since, until in others:
        if until <= begin or since >= end:
            continue
        if since > begin:
            yield begin, since
        begin = max(begin, until)
    if begin < end:
        yield begin, end


def _overlap(one: Interval, other: Interval) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))
