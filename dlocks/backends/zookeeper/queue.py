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

    @property
    def place(self) -> tuple[int, int]:
        """The numbers that define its position."""
        return self.beside[0] if self.beside else self.number, self.number


def node_of(key: str) -> str:
    """Return the name of a key's own node, which is unique and readable."""
    # A name of dots would be a relative path.
    return quote(key, safe="") if key.strip(".") else key.replace(".", "%2E")


def name_for(mark: str, *, shared: bool, beside: QueueNode | None = None) -> str:
    """Return the name of a claim's node, to which the server adds a number."""
    position = f"{beside.number}-{beside.mark}" if beside else ""
    return f"{mark}.{'shared' if shared else 'alone'}.{position}."


def parse_name(name: str) -> QueueNode | None:
    """Return the ticket with this name, or None if it is not that of a ticket."""
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


class NodeQueue:
    """The tickets of one key, in the order of the queue.

    Nodes that are not tickets are ignored.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        tickets = [ticket for name in names if (ticket := parse_name(name))]
        first = tickets[0].place[0] if tickets else 0
        # The server's counter has 32 bits, and wraps around to negative numbers.
        self.tickets = sorted(
            tickets,
            key=lambda ticket: [
                (number - first + 2**31) % 2**32 for number in ticket.place
            ],
        )
        # By name, the position of each ticket and the last earlier one that excludes
        # it.
        self.places: dict[str, tuple[int, QueueNode | None]] = {}
        before: QueueNode | None = None
        alone: QueueNode | None = None
        for position, ticket in enumerate(self.tickets):
            blocking = alone if ticket.shared else before
            if ticket.shared and alone is not None and alone.identity == ticket.beside:
                blocking = None
            self.places[ticket.name] = position, blocking
            before, alone = ticket, alone if ticket.shared else ticket
        # Those at the front, which hold the key.
        self.granted = list(
            takewhile(lambda one: self.places[one.name][1] is None, self.tickets)
        )

    def marked(self, mark: str) -> QueueNode | None:
        """Return the ticket with this mark, or None."""
        return next((ticket for ticket in self.tickets if ticket.mark == mark), None)
