"""The queue of a key, in the order that the names of its nodes define."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class QueueNode:
    """A node in the queue.

    The server assigns ``number`` in the order of arrival. Its counter starts again if
    the node of the key was deleted.

    ``beside`` contains the number and the mark of the same caller's exclusive ticket.
    This ticket is placed directly behind it.
    """

    name: str
    mark: str
    shared: bool
    number: int
    beside: tuple[int, str] | None = None

    @property
    def identity(self) -> tuple[int, str]:
        return self.number, self.mark


def node_of(key: str) -> str:
    """Return the name of a key's own node, which is unique and readable."""
    # A name of dots would be a relative path.
    return quote(key, safe="") if key.strip(".") else key.replace(".", "%2E")


def name_for(mark: str, *, shared: bool, beside: tuple[int, str] | None = None) -> str:
    """Return the name of a claim's node, to which the server adds a number."""
    position = "" if beside is None else "{}-{}".format(*beside)
    return f"{mark}.{'shared' if shared else 'alone'}.{position}."


class NodeQueue:
    """The tickets of one key, in the order of the queue.

    Nodes that are not tickets are ignored.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        found = [ticket for name in names if (ticket := _read(name))]
        first = _rank(found[0]) if found else 0
        self.tickets = sorted(
            found,
            key=lambda ticket: (
                _since(first, _rank(ticket)),
                _since(first, ticket.number),
            ),
        )
        self._places = {
            ticket.name: position for position, ticket in enumerate(self.tickets)
        }
        # For each ticket, the last exclusive ticket before it.
        self._alone: list[QueueNode | None] = []
        alone = None
        for ticket in self.tickets:
            self._alone.append(alone)
            alone = alone if ticket.shared else ticket

    @property
    def granted(self) -> list[QueueNode]:
        """The tickets at the front, which hold the key."""
        return list(
            takewhile(lambda ticket: self.blocking(ticket) is None, self.tickets)
        )

    def marked(self, mark: str) -> QueueNode | None:
        """Return the ticket with this mark, or None."""
        return next((ticket for ticket in self.tickets if ticket.mark == mark), None)

    def position(self, ticket: QueueNode | None) -> int | None:
        """Return the number of tickets before this one, or None if it is absent."""
        return None if ticket is None else self._places.get(ticket.name)

    def blocking(self, ticket: QueueNode) -> QueueNode | None:
        """Return the last earlier ticket that excludes this one, or None."""
        position = self._places[ticket.name]
        if not ticket.shared:
            return self.tickets[position - 1] if position else None
        alone = self._alone[position]
        return None if alone is None or alone.identity == ticket.beside else alone


def _read(name: str) -> QueueNode | None:
    match name.split("."):
        case [mark, ("shared" | "alone") as kind, beside, number]:
            try:
                position, _, other = beside.rpartition("-")
                return QueueNode(
                    name,
                    mark,
                    kind == "shared",
                    int(number),
                    (int(position), other) if beside else None,
                )
            except ValueError:
                return None
    return None


def _rank(ticket: QueueNode) -> int:
    return ticket.number if ticket.beside is None else ticket.beside[0]


def _since(first: int, number: int) -> int:
    # The server's counter has 32 bits, and wraps around to negative numbers.
    return (number - first + 2**31) % 2**32
