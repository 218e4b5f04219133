"""A network namespace, and a link to it that can lose packets."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

# Requests come from the other namespace, and replies go there.
WAYS = {
    "both": ("requests", "replies"),
    "requests": ("requests",),
    "replies": ("replies",),
}
# A hardware address that no interface has. Packets to it are lost.
NOBODY = "02:00:00:00:00:01"


class Namespace:
    """A network namespace that exists within a ``with`` block.

    A process that enters ``path`` runs in it. Packets can be lost silently in one
    or both directions, as in a broken network. Connections stay open. Packets are
    retransmitted with doubled intervals and arrive late.
    """

    def __enter__(self) -> Self:
        # The process ends with its standard input, and so with the process that started
        # it.
        self._process = process = subprocess.Popen(
            ["unshare", "--net", "cat"], stdin=subprocess.PIPE
        )
        number = process.pid % 2**14
        self.path = f"/proc/{process.pid}/ns/net"
        self._enter = ("nsenter", f"--net={self.path}")
        self._here, self._there = f"dlocks{number}", f"there{number}"
        self.address, self._its_address = (
            f"10.213.{number >> 6}.{(number & 63) * 4 + one}" for one in (1, 2)
        )
        self._cut: tuple[str, ...] = ()
        try:
            self._await()
            _ip(
                f"link add {self._here} type veth peer name {self._there} netns"
                f" {process.pid}"
            )
            for address, name, where in (
                (self.address, self._here, ()),
                (self._its_address, self._there, self._enter),
            ):
                _ip(f"address add {address}/30 dev {name}", where)
                _ip(f"link set {name} up", where)
            _ip("link set lo up", self._enter)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.CalledProcessError):
            _ip(f"link delete {self._here}")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(15)

    def cut(self, way: str) -> None:
        """Drop all packets in this direction from now on."""
        self._cut = WAYS[way]
        for address, name, where in map(self._end, self._cut):
            _ip(
                f"neighbour replace {address} lladdr {NOBODY} dev {name} nud permanent",
                where,
            )

    def heal(self) -> None:
        for address, name, where in map(self._end, self._cut):
            _ip(f"neighbour delete {address} dev {name}", where)
        self._cut = ()

    def _end(self, way: str) -> tuple[str, str, tuple[str, ...]]:
        """Return the receiver's address, the sender's interface, and its namespace."""
        return (
            (self._its_address, self._here, ())
            if way == "replies"
            else (self.address, self._there, self._enter)
        )

    def _await(self) -> None:
        own, its = (
            Path(f"/proc/{process}/ns/net") for process in ("self", self._process.pid)
        )
        deadline = time.monotonic() + 15
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if its.readlink() != own.readlink():
                    return
            time.sleep(0.01)
        raise PermissionError(
            "A network namespace cannot be created here. It needs root."
        )


def _ip(arguments: str, where: tuple[str, ...] = ()) -> None:
    command = [*where, "ip", *arguments.split()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
