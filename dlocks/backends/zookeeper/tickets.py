"""The nodes in line before a key, as their names tell: in which order they stand, and who is in whose way."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from urllib.parse import quote


@dataclass(frozen=True, slots=True)
class Ticket:
    """
    A node in line. ``number`` is the server's, in the order of arrival, anew where the key's node was deleted.

    ``beside`` are the number and the mark of the same caller's exclusive ticket, right behind which it stands.
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
    """Return the name of a key's own node: one for each key, and readable."""
    # A dot alone would be a relative path.
    return quote(key, safe="") if key.strip(".") else key.replace(".", "%2E")


def name_for(mark: str, *, shared: bool, beside: tuple[int, str] | None = None) -> str:
    """Return the name of a claim's node, to which the server adds the number."""
    place = "" if beside is None else "{}-{}".format(*beside)
    return f"{mark}.{'shared' if shared else 'alone'}.{place}."


class Line:
    """The tickets before one key, as they stand in line; nodes that are no tickets are nobody's."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        found = [ticket for name in names if (ticket := _read(name))]
        first = _rank(found[0]) if found else 0
        self.tickets = sorted(found, key=lambda ticket: (_since(first, _rank(ticket)), _since(first, ticket.number)))
        self._places = {ticket.name: place for place, ticket in enumerate(self.tickets)}
        # Of each, the last one before it that wants the key alone.
        self._alone: list[Ticket | None] = []
        alone = None
        for ticket in self.tickets:
            self._alone.append(alone)
            alone = alone if ticket.shared else ticket

    @property
    def granted(self) -> list[Ticket]:
        """Those that have the key: the foremost."""
        return list(takewhile(lambda ticket: self.in_the_way(ticket) is None, self.tickets))

    def marked(self, mark: str) -> Ticket | None:
        """Return the ticket with this mark."""
        return next((ticket for ticket in self.tickets if ticket.mark == mark), None)

    def place(self, ticket: Ticket | None) -> int | None:
        """Return how many stand before a ticket, or None where it is not in line."""
        return None if ticket is None else self._places.get(ticket.name)

    def in_the_way(self, ticket: Ticket) -> Ticket | None:
        """Return the last one before a ticket that keeps it from having the key."""
        place = self._places[ticket.name]
        if not ticket.shared:
            return self.tickets[place - 1] if place else None
        alone = self._alone[place]
        return None if alone is None or alone.identity == ticket.beside else alone


def _read(name: str) -> Ticket | None:
    match name.split("."):
        case [mark, ("shared" | "alone") as kind, beside, number]:
            try:
                place, _, other = beside.rpartition("-")
                return Ticket(name, mark, kind == "shared", int(number), (int(place), other) if beside else None)
            except ValueError:
                return None
    return None


def _rank(ticket: Ticket) -> int:
    return ticket.number if ticket.beside is None else ticket.beside[0]


def _since(first: int, number: int) -> int:
    # The server counts in 32 bits, and goes on below zero when they are used up.
    return (number - first + 2**31) % 2**32
