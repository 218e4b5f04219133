"""Plans: which callers a round has, and which steps they take.

A plan follows from its seed and kind alone, and is readable as code.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

KINDS = ("threads", "tasks", "keys", "generators")


@dataclass(frozen=True)
class Step:
    """A step of a caller. ``how`` says which variant, and ``body`` what it does inside.

    ``keys`` are indexes of the plan's keys, ``ms`` is a duration in milliseconds, and
    ``box`` is where a hold is passed to another caller. ``shared`` means that the
    callers use one lock object. A lock that is not shared is made for the step.
    """

    op: str
    how: str = ""
    keys: tuple[int, ...] = ()
    timeout: float = 1.0
    ms: int = 0
    box: int | None = None
    name: str = ""
    shared: bool = False
    body: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Caller:
    """A thread, or a task of the event loop ``loop``.

    ``ends`` means that its thread ends after its steps. Otherwise it stays alive until
    all keys were checked.
    """

    name: str
    loop: int | None = None
    ends: bool = False
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True)
class Plan:
    """A round. ``modes`` has the kind of each key: lock, permits, read or write."""

    seed: int
    kind: str
    modes: tuple[str, ...]
    callers: tuple[Caller, ...]
    # How each event loop is run: by asyncio.run() or by async_to_sync().
    loops: tuple[str, ...] = ()
    boxes: int = 0

    def lines(self) -> list[str]:
        """Return the plan as text that reads like code."""
        modes = ", ".join(
            f"{letter(number)!r} ({mode})" for number, mode in enumerate(self.modes)
        )
        lines = [f"seed {self.seed}, kind {self.kind}, keys {modes}"]
        for caller in self.callers:
            what = (
                "thread"
                if caller.loop is None
                else f"task of loop {caller.loop}, {self.loops[caller.loop]}"
            )
            ends = ", ends after its steps" if caller.ends else ""
            lines.append(f"{caller.name} ({what}{ends}):")
            lines += [f"    {line}" for line in _lines(caller.steps)]
        return lines


def letter(number: int) -> str:
    return "abcdef"[number]


def lock_text(step: Step) -> str:
    keys = ", ".join(repr(letter(key)) for key in step.keys)
    shared = "shared " if step.shared else ""
    return f"{shared}lock({keys}, timeout={step.timeout:g})"


TEXTS = {
    "pause": "pause {ms} ms",
    "with": "with {lock}:",
    "try": "with {lock}, if try_acquire():",
    "keep": "acquire {lock}, then {how}{box}:",
    "take": "take from box {box}, then {how}:",
    "atomic": "with hold.atomic():",
    "generator": "{name} = next() of a generator with {lock}",
    "close": "close {name}, {how}{box}",
    "spawn": "in a new caller, {how} after {ms} ms:",
    "waitfor": "wait_for({lock}.aacquire(), {ms} ms), then arelease():",
    "stray": "acquire {lock}; after a timeout, release() must be refused:",
    "borrow": "async_to_sync({lock}.aacquire)(), then with hold:",
    "stop": "close an event loop {ms} ms after a task began {lock}.aacquire()",
}


def _lines(steps: tuple[Step, ...]) -> Iterator[str]:
    for step in steps:
        box = "" if step.box is None else f" {step.box}"
        values = {**vars(step), "lock": lock_text(step), "box": box}
        yield TEXTS[step.op].format(**values).replace("  ", " ")
        yield from (f"    {line}" for line in _lines(step.body))


def plan_of(seed: int, kind: str) -> Plan:
    """Return the plan of a seed and a kind."""
    return _Maker(seed, kind).plan()


@dataclass
class _Maker:
    seed: int
    kind: str
    random: random.Random = field(init=False)
    number: int = 0

    def plan(self) -> Plan:
        self.random = choose = random.Random(f"{self.seed}/{self.kind}")
        several = self.kind == "keys"
        count = choose.choice([2, 2, 3]) if several else choose.choice([1, 1, 2])
        modes = ["lock", "lock", "lock", "permits", "rw"]
        if self.kind == "generators":
            modes = ["lock", "permits", "lock"]
        self.modes = tuple(
            "lock" if several else choose.choice(modes) for _ in range(count)
        )
        threads, loops = {
            "threads": (choose.randint(2, 4), []),
            "tasks": (choose.randint(0, 1), [2, 3, [2, 2]][choose.randint(0, 2)]),
            "keys": (choose.randint(2, 3), choose.choice([[], [], [2]])),
            "generators": (choose.randint(1, 3), choose.choice([[], [2], [2]])),
        }[self.kind]
        sizes = loops if isinstance(loops, list) else [loops]
        names = [(f"t{number}", None) for number in range(threads)]
        names += [
            (f"l{loop}t{number}", loop)
            for loop, size in enumerate(sizes)
            for number in range(size)
        ]
        steps = {name: self.body(loop, 0, choose.randint(1, 3)) for name, loop in names}
        boxes = self.pass_on(names, steps) if len(names) > 1 else 0
        callers = tuple(
            Caller(
                name,
                loop,
                # A hold that was left behind ends with its thread.
                ends=loop is None
                and any(step.how in {"orphan", "nothing"} for step in steps[name]),
                steps=tuple(steps[name]),
            )
            for name, loop in names
        )
        styles = tuple(choose.choice(["run", "async_to_sync"]) for _ in sizes)
        return Plan(self.seed, self.kind, self.modes, callers, styles, boxes)

    def body(self, loop, depth, length) -> list[Step]:
        ops = {"pause": 2, "with": 5, "keep": 3, "try": 1}
        if depth and self.kind in {"threads", "tasks"}:
            ops["atomic"] = 2
        if loop is not None:
            # Tasks of this kind are cancelled.
            ops["spawn"] = 4 if self.kind != "generators" else 1
            if self.kind == "tasks" and not depth:
                ops["waitfor" if self.seed % 2 else "stray"] = 2
        elif self.kind == "threads" and not depth:
            ops |= {"spawn": 1, "stray": 1, "borrow": 0.5}
        if loop is None and not depth:
            ops["stop"] = 1 if self.kind in {"threads", "keys"} else 0.3
        if self.kind == "generators":
            ops["generator"] = 8
        if depth > 2:
            ops = {"pause": 1}
        return [
            step
            for op in self.random.choices(list(ops), list(ops.values()), k=length)
            for step in self.make(op, loop, depth)
        ]

    def make(self, op, loop, depth) -> list[Step]:
        choose = self.random
        leaf = op in {"pause", "generator", "stop"}
        inner = () if leaf else tuple(
            self.body(loop, depth + 1, choose.randint(0, 2))
        )  # fmt: skip
        keys = (choose.randrange(len(self.modes)),)
        if self.kind == "keys" and choose.random() < 0.6:
            number = choose.randint(2, len(self.modes))
            keys = tuple(sorted(choose.sample(range(len(self.modes)), number)))
        step = Step(
            op,
            keys=keys,
            timeout=choose.choice([0.02, 0.1, 0.3, 1.0, 1.0]),
            shared=choose.random() < 0.3,
            body=inner,
        )
        change = dataclasses.replace
        if op == "pause":
            return [Step("pause", ms=choose.choice([0, 1, 3, 8, 20]))]
        if op == "keep":
            hows = ["hold", "hold", "lock", "with", "detach"]
            if not depth and loop is None:
                hows.append("nothing")
            how = choose.choice(hows)
            if how == "detach" and (
                len(keys) > 1 or self.modes[keys[0]] != "lock" or depth
            ):
                how = "hold"
            return [change(step, how=how)]
        if op == "atomic":
            return [Step("atomic", body=inner)]
        if op == "spawn":
            how = choose.choice(["cancel", "cancel", "cancel", "await"])
            body = inner or tuple(self.make("with", loop, 2))
            if loop is None:
                how = "join"
                if choose.random() < 0.5:
                    body = (change(step, op="keep", how="nothing", body=()),)
            return [
                Step("spawn", how=how, ms=choose.choice([0, 1, 3, 8, 20]), body=body)
            ]
        if op == "stop":
            return [change(step, ms=choose.choice([0, 2, 5, 10, 30]))]
        if op in {"waitfor", "stray", "borrow"}:
            exclusive = [k for k, mode in enumerate(self.modes) if mode == "lock"]
            if not exclusive:
                return []
            keys = (choose.choice(exclusive),)
            ms = choose.choice([5, 20, 100, 1000])
            return [change(step, keys=keys, ms=ms, shared=True)]
        if op == "generator":
            self.number += 1
            name = f"g{self.number}"
            here = change(step, op="generator", name=name)
            how = choose.choice(["close", "close", "drop", "other", "other", "leave"])
            middle = self.body(loop, depth + 1, choose.randint(0, 2))
            last = Step("close", how=how, name=name)
            if how == "close" and choose.random() < 0.5:
                # It ends in the middle of another block.
                block = self.make("with", loop, 2)[0]
                block = change(block, body=(*block.body, last), keys=here.keys)
                return [here, *middle, block]
            return [here, *middle, last]
        return [step]

    def pass_on(self, names, steps) -> int:
        """Let callers pass holds on to others, and return the number of boxes."""
        choose = self.random
        boxes = choose.choice(
            {"threads": [1, 2, 2], "generators": [0, 0, 1]}.get(self.kind, [1, 1, 2])
        )
        for box in range(boxes):
            (giver, loop), (taker, other) = choose.sample(names, 2)
            step = self.make("with", loop, 1)[0]
            if self.kind == "keys" and choose.random() < 0.6:
                step = dataclasses.replace(step, keys=step.keys[:1])
            hows = ["transfer", "transfer", "lend", "lend", "lend early"]
            if self.kind != "threads":
                hows += ["transfer"] * 3
            if loop is None:
                hows += ["orphan", "orphan"]
            if len(step.keys) == 1 and self.modes[step.keys[0]] == "lock":
                hows += ["detach for", "lend and detach"]
            how = choose.choice(hows)
            taken = {
                "transfer": choose.choice(["release", "release", "atomic"]),
                "orphan": choose.choice(["with", "release"]),
                "detach for": "resume",
            }.get(how, "with")
            if choose.random() < 0.8:
                # The giver enters its hold again, perhaps together with other keys.
                keys = step.keys
                if self.kind == "keys":
                    keys = tuple(range(len(self.modes)))
                op = "with" if choose.random() < 0.7 else "keep"
                timeout = choose.choice([0.02, 0.05, 0.1, 1.0])
                again = dataclasses.replace(
                    self.make(op, loop, 2)[0], keys=keys, timeout=timeout
                )
                step = dataclasses.replace(step, body=(again, *step.body))
                others = [name for name, _ in names if name not in {giver, taker}]
                if len(keys) > len(step.keys) and others:
                    # Another caller keeps the other keys for a while.
                    busy = tuple(key for key in keys if key not in step.keys)
                    pause = Step("pause", ms=choose.choice([30, 60, 120]))
                    block = Step("with", keys=busy, body=(pause,))
                    steps[choose.choice(others)].insert(0, block)
            give = dataclasses.replace(step, op="keep", how=how, box=box, timeout=0.5)
            if loop is not None and choose.random() < 0.5:
                ms = choose.choice([10, 20, 40])
                give = Step("spawn", how="cancel", ms=ms, body=(give,))
            body = [Step("pause", ms=choose.choice([0, 3, 8, 20, 40]))]
            if choose.random() < 0.5:
                body += self.body(other, 2, 1)
            if how == "orphan" and choose.random() < 0.5:
                # Longer than it takes to notice that a thread has ended.
                body = [Step("pause", ms=1300)]
            take = Step("take", how=taken, box=box, body=tuple(body))
            place = len(steps[giver]) if how == "orphan" else choose.randint(0, 1)
            steps[giver].insert(place, give)
            place = choose.randint(0, len(steps[taker])) if choose.random() < 0.4 else 0
            steps[taker].insert(place, take)
        return boxes
