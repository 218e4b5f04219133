"""A model of the lease protocol, and an exhaustive search of its states.

The model has two clients, one row with a queue, and one clock that ticks. Clients may
pause, which means that they take no step. Replies may be lost and clients may die.
Under the lock, the clients read and write a register, which is part of the model. A
state is a tuple. ``search()`` visits all reachable states breadth first, so it finds
the shortest path to a broken promise.

This checks the protocol and not the program. A harmful change of the rules shows within
seconds, with the steps that lead to it. ``MUTANTS`` are such changes, and the search
must find an error in each.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

TTL = 2
KEPT = 1


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The rules of the protocol. Each mutant changes one of them."""

    # How many replies may be lost, how many clients may die, and how many times the
    # database's clock may step.
    losses: int = 1
    deaths: int = 1
    steps: int = 0
    grace: int = 0
    # The rules of the protocol.
    owner_at_release: bool = True
    owner_at_renewal: bool = True
    # Whether an expired lease can still be renewed, as on SQLite.
    renewed_late: bool = False
    deadline_from: str = "request"
    deadline_looked_at: bool = True
    late_answer_refused: bool = True
    row_kept: bool = True
    token_grows: bool = True
    fence: str = "claim"
    free_is_asked_again: bool = True
    notice: str = "until"
    kept_for_the_next: int = KEPT
    end_from: str = "statement"


class Row(NamedTuple):
    """The lock row: its owner, the ticks left, its token and its queue."""

    owner: int
    left: int
    token: int
    line: tuple[int, ...]


class Client(NamedTuple):
    """A client in one of these states, named by ``at``.

    ``idle``; ``sent`` (the request is under way) or ``looked`` (it saw the row free);
    ``reply`` (granted, and the reply is under way); ``line`` (queued); ``told`` (a
    notification is under way); ``held``; ``read`` (it has read the register);
    ``written``; ``dead``.
    """

    at: str
    # Ticks since the request was sent, ticks for which the client believes in its hold,
    # its token, and whether the value that it read is still current.
    age: int = 0
    left: int = 0
    token: int = 0
    fresh: bool = True


class State(NamedTuple):
    """The state of the row, the clients and the register.

    Times are relative and tokens are ranks, so the number of states is finite.
    """

    row: Row
    clients: tuple[Client, ...]
    # The highest token that has claimed the register, the highest token granted, and
    # the faults that may still happen.
    fence: int
    highest: int
    steps: int
    losses: int
    deaths: int
    broken: str = ""


class Found(Exception):  # noqa: N818 (it is what is sought)
    """A promise was broken. The message lists the steps that lead there."""


def search(rules: Rules, clients: int = 2) -> int:
    """Visit every state, and return their number or raise ``Found``.

    States that differ only by the names of the clients have the same future. One of
    them is visited, and all are counted.
    """
    row = Row(-1, -rules.grace, 0, ())
    idle, faults = Client("idle"), (rules.steps, rules.losses, rules.deaths)
    first, number = _canonical(State(row, (idle,) * clients, 0, 0, *faults))
    came_from: dict[State, State | None] = {first: None}
    waiting = deque([first])
    while waiting:
        state = waiting.popleft()
        for _, after in _steps(rules, state):
            normal, names = _canonical(after)
            if normal in came_from:
                continue
            came_from[normal] = state
            if broken := _broken(rules, normal):
                raise Found(f"{broken}: {' · '.join(_way(rules, came_from, normal))}")
            number += names
            waiting.append(normal)
    return number


def _way(
    rules: Rules, came_from: dict[State, State | None], last: State
) -> Iterator[str]:
    """Yield the steps that lead to a state, with the same names all the way."""
    way = [last]
    while (before := came_from[way[-1]]) is not None:
        way.append(before)
    state = way.pop()
    while way:
        wanted = way.pop()
        what, state = next(
            (what, after)
            for what, after in _steps(rules, state)
            if _canonical(after)[0] == wanted
        )
        yield what


def _canonical(state: State) -> tuple[State, int]:
    """Return a state with ranks for tokens and sorted clients.

    The number says how many states differ from it only by the names of the clients.
    """
    row, clients = state.row, state.clients
    tokens = {row.token, state.fence, state.highest}
    tokens.update([client.token for client in clients])
    ranks = {token: rank for rank, token in enumerate(sorted(tokens | {0}))}
    ranked = [
        (
            Client(at, age, left, ranks[token], fresh),
            row.owner == me,
            row.line.index(me) if me in row.line else -1,
        )
        for me, (at, age, left, token, fresh) in enumerate(clients)
    ]
    order = sorted(range(len(clients)), key=ranked.__getitem__)
    names = math.factorial(len(order))
    for equal in Counter(ranked).values():
        names //= math.factorial(equal)
    normal = state._replace(
        row=Row(
            order.index(row.owner) if row.owner >= 0 else row.owner,
            row.left,
            ranks[row.token],
            tuple(order.index(me) for me in row.line),
        ),
        clients=tuple(ranked[me][0] for me in order),
        fence=ranks[state.fence],
        highest=ranks[state.highest],
    )
    return normal, names


def _broken(rules: Rules, state: State) -> str:
    if state.broken:
        return state.broken
    believing = [
        client
        for client in state.clients
        if client.at in {"held", "read"}
        and (client.left > 0 or not rules.deadline_looked_at)
    ]
    if len(believing) > 1:
        return "two valid holds"
    owner = state.row.owner
    alive = [client for client in state.clients if client.at not in {"dead", "idle"}]
    if (
        owner >= 0
        and state.clients[owner].at in {"dead", "idle"}
        and alive
        and state.row.left > TTL
    ):
        return "a free key that no waiter acquires"
    return ""


def _steps(rules: Rules, state: State) -> Iterator[tuple[str, State]]:
    row = state.row._replace(left=max(state.row.left - 1, -rules.grace))
    aged = tuple(
        client._replace(
            age=min(client.age + 1, TTL)
            if client.at in {"sent", "looked", "reply"}
            else 0,
            left=max(client.left - 1, 0),
        )
        for client in state.clients
    )
    yield "a tick", state._replace(row=row, clients=aged)
    if state.steps:
        yield (
            "the database's clock steps",
            state._replace(row=row, steps=state.steps - 1),
        )
    for number, client in enumerate(state.clients):
        name = "ABC"[number]
        if state.deaths and client.at not in {"idle", "dead"}:
            yield (
                f"{name} dies",
                _with(state, number, Client("dead"))._replace(deaths=state.deaths - 1),
            )
        for what, after in _client_steps(rules, state, number, client):
            yield f"{name} {what}", after


def _client_steps(
    rules: Rules, state: State, me: int, client: Client
) -> Iterator[tuple[str, State]]:
    row, at = state.row, client.at

    def to(at: str, state: State = state, **changes: Any) -> State:
        return _with(state, me, client._replace(at=at, **changes))

    asks = _with(state, me, Client("sent"))
    if at == "idle":
        yield "sends a request", asks
    elif at == "sent" and not rules.free_is_asked_again and _free(rules, state, me):
        yield "reads that the key is free", to("looked")
    elif at == "looked" or (at == "sent" and _free(rules, state, me)):
        left = TTL - client.age if rules.end_from == "transaction" else TTL
        after = _granted(rules, state, me, left)
        yield "is granted", to("reply", after, token=after.row.token)
    elif at == "sent":
        if me not in row.line and row.owner != me:
            lined = state._replace(row=row._replace(line=(*row.line, me)))
            yield "joins the queue", _with(lined, me, Client("line"))
    elif at == "reply":
        yield from _answers(rules, state, me, client)
    elif at == "line":
        if row.owner == me and row.left > 0:
            yield "sees its turn", to("told", left=row.left, token=row.token)
        elif me not in row.line:
            yield "sees that its turn is over", asks
        elif row.line[0] == me and _free(rules, state, me):
            yield "hands the key to the queue", _was_handed_over(rules, state)
    elif at == "told":
        if client.left > 0 or rules.notice == "believed":
            left = TTL if rules.notice == "believed" else client.left
            yield "holds the key after its turn", to("held", left=left)
        else:
            yield "sees that its turn is over", asks
    elif at in {"held", "read"}:
        yield from _work(rules, state, me, client)
        mine = row.owner == me and row.token == client.token
        if (mine or (not rules.owner_at_renewal and row.owner >= 0)) and (
            row.left > 0 or rules.renewed_late
        ):
            renewed = state._replace(row=row._replace(left=TTL))
            yield "renews", to(at, renewed, left=TTL)
    if at in {"written", "held", "read"}:
        yield "releases", _released(rules, state, me)


def _answers(
    rules: Rules, state: State, me: int, client: Client
) -> Iterator[tuple[str, State]]:
    if rules.late_answer_refused and client.age >= TTL:
        yield "receives the reply too late, and cancels", _released(rules, state, me)
    else:
        left = TTL - client.age if rules.deadline_from == "request" else TTL
        held = Client("held", left=left, token=client.token)
        yield "holds the key", _with(state, me, held)
    if state.losses:
        lost, again = (
            state._replace(losses=state.losses - 1),
            Client("sent", client.age),
        )
        yield "loses the reply and requests again", _with(lost, me, again)
        yield "loses the reply and cancels", _released(rules, lost, me)


def _work(
    rules: Rules, state: State, me: int, client: Client
) -> Iterator[tuple[str, State]]:
    """Read and write the register, whatever the clock says.

    This models a pause that the client does not notice.
    """
    fence = max(state.fence, client.token)
    checks = rules.fence == "claim" or (rules.fence == "write" and client.at == "read")
    if checks and client.token < state.fence:
        yield "is refused by the register", _released(rules, state, me)
    elif client.at == "held":
        claimed = state._replace(fence=fence) if rules.fence == "claim" else state
        yield "reads", _with(claimed, me, client._replace(at="read"))
    else:
        after = state._replace(
            clients=tuple(
                other._replace(fresh=other.at != "read") for other in state.clients
            ),
            fence=fence if rules.fence != "none" else state.fence,
            broken="" if client.fresh else "a lost update",
        )
        yield "writes", _with(after, me, Client("written", token=client.token))


# The lock row.


def _free(rules: Rules, state: State, me: int) -> bool:
    row = state.row
    if row.owner == me:
        # The client repeats a request whose reply was lost.
        return True
    before_me = row.line[: row.line.index(me)] if me in row.line else row.line
    return not before_me and (row.owner < 0 or row.left <= -rules.grace)


def _granted(rules: Rules, state: State, me: int, left: int) -> State:
    row = state.row
    token = row.token + 1 if rules.token_grows else max(1, row.token)
    line = tuple(owner for owner in row.line if owner != me)
    broken = "" if token > state.highest else "a token that does not grow"
    return state._replace(
        row=Row(me, left, token, line), highest=max(state.highest, token), broken=broken
    )


def _was_handed_over(rules: Rules, state: State) -> State:
    return _granted(rules, state, state.row.line[0], rules.kept_for_the_next)


def _released(rules: Rules, state: State, me: int) -> State:
    row = state.row
    after = _with(state, me, Client("idle"))
    if row.owner >= 0 and (row.owner == me or not rules.owner_at_release):
        token = row.token if rules.row_kept else 0
        after = after._replace(
            row=row._replace(owner=-1, left=-rules.grace, token=token)
        )
        if row.line:
            after = _was_handed_over(rules, after)
    return after


def _with(state: State, number: int, client: Client) -> State:
    clients = list(state.clients)
    clients[number] = client
    return state._replace(clients=tuple(clients))


# The rules of each mutant, by the error that the search must find.
MUTANTS: dict[str, list[dict[str, Any]]] = {
    "two valid holds": [
        {"owner_at_release": False},
        {"owner_at_renewal": False},
        {"deadline_from": "response"},
        {"deadline_looked_at": False},
        # A grant that does not check the row again, and a late reply or notification.
        {"free_is_asked_again": False},
        {"deadline_from": "response", "late_answer_refused": False},
        {"notice": "believed"},
        {"end_from": "transaction", "deadline_from": "response"},
        # A clock that steps, without a grace.
        {"steps": 1},
    ],
    "a token that does not grow": [{"row_kept": False}, {"token_grows": False}],
    "a lost update": [{"fence": "none"}, {"fence": "write"}],
    # A dead waiter whose turn never ends.
    "a free key that no waiter acquires": [{"kept_for_the_next": 99}],
}
