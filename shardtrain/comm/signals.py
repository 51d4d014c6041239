"""Signals between the ranks of one host: which movement each rank has started, and who is gone.

Every two ranks share a Unix socket. A rank *posts* its movements in order, and a peer that must not go on
before others have come as far *awaits* them. Since all ranks make the same movements, the k-th movement
of one is the k-th of all: a peer whose k-th differs has taken another path, and both are told at once,
with names. The kernel does the rest: a waiting rank sleeps, memory written before a signal is visible
after it, and a peer that dies closes its sockets, however it dies.

The sockets live in Linux's abstract namespace: no file, nothing that could be left behind.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

_MESSAGE = struct.Struct("<iiqq")  # kind, number, value, then the movement's position
_DONE = 0  # not a movement: "I have read what your movement at this position offered"
_KINDS = ("done", "gathering", "reducing", "entering", "leaving", "sharing")


class Movement(NamedTuple):
    """One movement of one rank; ``value`` is whatever the other ranks need to know about it."""

    kind: int
    number: int
    value: int


class PeerLost(RuntimeError):
    """Another rank has ended, or has been silent for too long."""


class Diverged(RuntimeError):
    """Another rank takes another path through the model."""


class Peer:
    """What has come from one other rank."""

    def __init__(self, rank: int, link: socket.socket, handles: socket.socket) -> None:
        self.rank = rank
        self.link = link
        self.handles = handles  # carries file descriptors
        self.movements: deque[Movement] = deque()
        self.first = 0  # position of movements[0]
        self.done: set[int] = set()
        self._bytes = b""

    def at(self, position: int) -> Movement | None:
        index = position - self.first
        return self.movements[index] if 0 <= index < len(self.movements) else None

    def receive(self) -> bool:
        """Take in what has come; False when the peer has closed its end."""
        try:
            data = self.link.recv(1 << 16)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._bytes += data
        whole = len(self._bytes) // _MESSAGE.size * _MESSAGE.size
        for kind, number, value, position in _MESSAGE.iter_unpack(self._bytes[:whole]):
            if kind == _DONE:
                self.done.add(position)
            else:
                self.movements.append(Movement(kind, number, value))
        self._bytes = self._bytes[whole:]
        return bool(data)

    def forget_before(self, position: int) -> None:
        while self.first < position and self.movements:
            self.movements.popleft()
            self.first += 1


class Signals:
    """This rank's end of all its links."""

    def __init__(self, rank: int, peers: list[Peer]) -> None:
        self.rank = rank
        self.peers = peers
        self.step = 0  # forwards begun, for messages
        self._own: deque[tuple[Movement, str]] = deque()
        self._first = 0  # position of _own[0]
        self._awaited: set[int] = set()  # positions that `wait` will ask for
        sockets = [s for peer in peers for s in (peer.link, peer.handles)]
        self.close = weakref.finalize(self, _close_all, sockets)
        this = weakref.ref(self)
        # A forked data loader must not keep a dead rank's sockets open.
        os.register_at_fork(after_in_child=lambda: (alive := this()) and alive.close())

    @property
    def _timeout_s(self) -> float:
        """Start-up is given time: ranks read data and build models at speeds of their own."""
        return 120.0 if self.step > 1 else 600.0

    def post(self, kind: str, number: int, name: str, value: int = 0) -> int:
        """Tell every peer of this rank's next movement; return its position.

        Every movement but a gather, which needs nobody, is to be waited for.
        """
        movement = Movement(_KINDS.index(kind), number, value)
        position = self._first + len(self._own)
        self._own.append((movement, name))
        if kind != "gathering":
            self._awaited.add(position)
        self._send(_MESSAGE.pack(*movement, position), f"{kind} {name}")
        return position

    def done(self, position: int) -> None:
        """Tell every peer that this rank has read what their movement at ``position`` offered."""
        self._send(_MESSAGE.pack(_DONE, 0, 0, position), self._name(position))

    def wait(self, position: int) -> dict[int, int]:
        """Return when every peer has come to ``position``: the value that each rank offered there.

        Raises:
            Diverged: a peer made another movement there, or earlier.
            PeerLost: a peer has ended, or the time-out has passed.
        """
        self._pump(lambda peer: peer.at(position) is not None, position)
        values = {peer.rank: peer.at(position).value for peer in self.peers}  # type: ignore[union-attr]
        self._awaited.discard(position)
        return values

    def wait_done(self, position: int) -> None:
        """Return when every peer has read what this rank's movement at ``position`` offered."""
        self._pump(lambda peer: position in peer.done, position)
        for peer in self.peers:
            peer.done.discard(position)

    def is_done(self, position: int) -> bool:
        """Whether `wait_done` would return at once."""
        for peer in self.peers:
            peer.receive()
        return all(position in peer.done for peer in self.peers)

    def _send(self, message: bytes, where: str) -> None:
        for peer in self.peers:
            try:
                self._send_all(peer, message)
            except OSError:
                self._compare()
                raise PeerLost(self._lost(peer, where)) from None

    def _send_all(self, peer: Peer, message: bytes) -> None:
        while message:
            try:
                message = message[peer.link.send(message) :]
            except BlockingIOError:
                select.select([], [peer.link], [], self._timeout_s)

    def _pump(self, arrived: Callable[[Peer], bool], position: int) -> None:
        """Receive until ``arrived(peer)`` holds for every peer."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._compare()
            missing = [peer for peer in self.peers if not arrived(peer)]
            if not missing:
                return
            poll = select.poll()
            by_number = {peer.link.fileno(): peer for peer in missing}
            for number in by_number:
                poll.register(number, select.POLLIN)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                raise PeerLost(self._silent(missing, position))
            for number, _ in ready:
                peer = by_number[number]
                if not peer.receive() and not arrived(peer):
                    self._compare()
                    raise PeerLost(self._lost(peer, self._name(position)))

    def _compare(self) -> None:
        """Check every peer's movements against this rank's, as far as both have come."""
        for peer in self.peers:
            for position in range(max(peer.first, self._first), self._first + len(self._own)):
                theirs = peer.at(position)
                if theirs is None:
                    break
                ours, name = self._own[position - self._first]
                if theirs[:2] != ours[:2]:
                    raise Diverged(
                        f"step {self.step}: rank {peer.rank} takes another path than rank {self.rank}: "
                        f"rank {self.rank} is {_KINDS[ours.kind]} {name} (number {ours.number}), "
                        f"rank {peer.rank} is {_KINDS[theirs.kind]} number {theirs.number}"
                    )
        self._prune()

    def _prune(self) -> None:
        """Forget movements that every rank has made and nobody waits for."""
        reached = min(peer.first + len(peer.movements) for peer in self.peers)
        keep_from = min(reached, self._first + len(self._own), *self._awaited)
        while self._first < keep_from:
            self._own.popleft()
            self._first += 1
        for peer in self.peers:
            peer.forget_before(self._first)

    def _name(self, position: int) -> str:
        index = position - self._first
        if not 0 <= index < len(self._own):
            return "an earlier movement"
        movement, name = self._own[index]
        return f"{_KINDS[movement.kind]} {name}"

    def _lost(self, peer: Peer, where: str) -> str:
        return f"rank {peer.rank} has ended: rank {self.rank} was at step {self.step}, {where}"

    def _silent(self, missing: list[Peer], position: int) -> str:
        ranks = ", ".join(str(peer.rank) for peer in missing)
        return (
            f"rank {self.rank} waited {self._timeout_s:.0f} s for rank {ranks} at step {self.step}, "
            f"{self._name(position)}"
        )


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def connect(rank: int, world: int, meeting: str, barrier: Callable[[], None]) -> Signals:
    """Link this rank with every other rank of the host.

    Args:
        rank, world: this rank and how many there are.
        meeting: a name that only these ranks know, the same on all of them.
        barrier: callable; returns when all ranks have called it.

    Raises:
        OSError: the ranks cannot reach one another this way.
    """
    links: dict[tuple[int, str], socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(f"\0{meeting}-{rank}")
        door.listen(2 * world)
        door.settimeout(10.0)
        barrier()
        for other in range(rank):
            for use in ("link", "handles"):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                link.connect(f"\0{meeting}-{other}")
                link.sendall(_hello(rank, use))
                links[other, use] = link
        while len(links) < 2 * (world - 1):
            link, _ = door.accept()
            hello = json.loads(link.recv(len(_hello(0, "link")), socket.MSG_WAITALL))
            links[hello["rank"], hello["use"]] = link
    for (_, use), link in links.items():
        link.setblocking(use == "handles")
    others = [other for other in range(world) if other != rank]
    return Signals(rank, [Peer(o, links[o, "link"], links[o, "handles"]) for o in others])


def _hello(rank: int, use: str) -> bytes:
    return json.dumps({"rank": rank, "use": use}).ljust(64).encode()
