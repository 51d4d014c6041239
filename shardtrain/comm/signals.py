"""Signals between the ranks of one host: which movement each rank has started, and who is gone.

Every two ranks share a Unix socket. A rank *posts* its movements in order, and a peer that must not go on
before others have come as far *awaits* them; ``guard.py`` compares them on the way. The kernel does the
rest: a waiting rank sleeps, memory written before a signal is visible after it, and a peer that dies closes
its sockets, however it dies. A rank that leaves because another has ended says so first, or a third, which
is late to look, might take the one that left for the cause.

The sockets live in Linux's abstract namespace: no file, nothing that could be left behind.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from shardtrain.comm.guard import GRACE_S, MESSAGE, Entry, Paths, PeerLost
from shardtrain.comm.movement import GATHER, Movement

# What a message says where it tells of no movement, which have the numbers from 0 on.
_DONE = -1  # "I have read what your movement at this position offered"
_MOURNING = -2  # "the rank of this value has ended, so I am leaving, too"


class Peer:
    """The links to one other rank, and what it has read of this one's."""

    def __init__(self, rank: int, link: socket.socket, handles: socket.socket) -> None:
        self.rank = rank
        self.link = link
        self.handles = handles  # carries file descriptors
        self.done: set[int] = set()
        self.cause = rank  # who ended first, once this one has
        self._bytes = b""

    def receive(self, paths: Paths) -> bool:
        """Take in what has come; False when the peer has closed its end."""
        try:
            data = self.link.recv(1 << 16)
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self._bytes += data
        whole = len(self._bytes) // MESSAGE.size * MESSAGE.size
        for kind, number, step, value, position, name in MESSAGE.iter_unpack(self._bytes[:whole]):
            if kind == _DONE:
                self.done.add(position)
            elif kind == _MOURNING:
                self.cause = value
            else:
                paths.theirs[self.rank].append(Entry(kind, number, step, value, name))
        self._bytes = self._bytes[whole:]
        return bool(data)


class Signals:
    """This rank's end of all its links."""

    def __init__(self, rank: int, peers: list[Peer]) -> None:
        self.rank = rank
        self.peers = peers
        self.paths = Paths(rank, [peer.rank for peer in peers])
        self._awaited: set[int] = set()  # positions that `wait` will ask for
        self._sockets = [s for peer in peers for s in (peer.link, peer.handles)]
        self.close = weakref.finalize(self, _close_all, self._sockets)
        this = weakref.ref(self)
        # A forked data loader must not keep a dead rank's sockets open.
        os.register_at_fork(after_in_child=lambda: (alive := this()) and alive.close())

    def post(self, kind: Movement, number: int, name: str, value: int = 0) -> int:
        """Tell every peer of this rank's next movement; return its position.

        Every movement but a gather is to be waited for.
        """
        position, message = self.paths.make(kind, number, name, value)
        if kind is not GATHER:
            self._awaited.add(position)
        self._send(message, position)
        return position

    def done(self, position: int) -> None:
        """Tell every peer that this rank has read what their movement at ``position`` offered."""
        self._send(Entry(_DONE, 0, 0, 0, b"").packed(position), position)

    def wait(self, position: int) -> dict[int, int]:
        """Return when every peer has come to ``position``: the value that each rank offered there.

        Raises:
            Diverged: a peer made another movement there, or earlier.
            PeerLost: a peer has ended, or the time-out has passed.
        """
        self._pump(lambda peer: self._at(peer, position) is not None, position)
        values = {peer.rank: movement.value for peer in self.peers if (movement := self._at(peer, position))}
        self._awaited.discard(position)
        return values

    def wait_done(self, position: int) -> None:
        """Return when every peer has read what this rank's movement at ``position`` offered."""
        self._pump(lambda peer: position in peer.done, position)
        for peer in self.peers:
            peer.done.discard(position)

    def is_done(self, position: int) -> bool:
        """Whether `wait_done` would return at once."""
        self._take_in()
        return all(position in peer.done for peer in self.peers)

    def hang_up(self) -> None:
        """End all waiting, here and at the peers: something else has failed. Any thread may call this."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def compare_now(self) -> None:
        """Raise Diverged if what peers have said so far shows that one takes another path."""
        self._take_in()
        self._compare()

    def _take_in(self) -> None:
        for peer in self.peers:
            peer.receive(self.paths)

    def receive_handle(self, owner: int, position: int) -> int:
        """The file descriptor that ``owner`` sends at ``position``."""
        peer = next(peer for peer in self.peers if peer.rank == owner)
        _, handles, _, _ = socket.recv_fds(peer.handles, 1, 1)
        if not handles:
            raise self._lost([peer], position)
        return handles[0]

    def _at(self, peer: Peer, position: int) -> Entry | None:
        return self.paths.theirs[peer.rank].at(position)

    def _send(self, message: bytes, position: int) -> None:
        for peer in self.peers:
            try:
                self._send_all(peer, message, position)
            except OSError:
                peer.receive(self.paths)
                self._compare()
                raise self._lost([peer], position) from None

    def _send_all(self, peer: Peer, message: bytes, position: int) -> None:
        while message:
            try:
                message = message[peer.link.send(message) :]
            except BlockingIOError:
                room = select.poll()
                room.register(peer.link, select.POLLOUT)
                if not room.poll(self.paths.timeout_s * 1000):
                    raise self.paths.silent([peer.rank], position) from None

    def _pump(self, arrived: Callable[[Peer], bool], position: int) -> None:
        """Receive until ``arrived(peer)`` holds for every peer."""
        deadline = time.monotonic() + self.paths.timeout_s
        while True:
            self._compare()
            missing = [peer for peer in self.peers if not arrived(peer)]
            if not missing:
                return
            ended = self._listen(missing, deadline)
            if ended is None:
                raise self.paths.silent([peer.rank for peer in missing], position)
            gone = [peer for peer in ended if not arrived(peer)]
            if gone:
                self._compare()
                raise self._lost(gone, position)

    def _lost(self, ended: Sequence[Peer], position: int) -> PeerLost:
        """What to raise when ``ended`` have: it names who was first, and so does this rank to the others."""
        causes = sorted({peer.cause for peer in ended})
        word = Entry(_MOURNING, 0, 0, causes[0], b"").packed(position)
        for peer in self.peers:
            with suppress(OSError):
                peer.link.send(word)
        return self.paths.lost(causes, position)

    def _listen(self, peers: list[Peer], deadline: float) -> list[Peer] | None:
        """Take in what any of ``peers`` sends next; those that have ended, or None at the deadline.

        One that has lost another counts as ended: it may live on, but makes no movement any more.
        """
        leaving = [peer for peer in peers if peer.cause != peer.rank]
        if leaving:
            return leaving
        poll = select.poll()
        by_number = {peer.link.fileno(): peer for peer in peers}
        for number in by_number:
            poll.register(number, select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            return None
        return [by_number[number] for number, _ in ready if not by_number[number].receive(self.paths)]

    def _compare(self) -> None:
        """Check every peer's movements against this rank's, as far as both have come."""
        position = self.paths.difference()
        if position is not None:
            self._hear_the_rest(position)
            raise self.paths.diverged(position)
        self.paths.forget_before(min(self._awaited, default=self.paths.own.end))

    def _hear_the_rest(self, position: int) -> None:
        """Give the peers that have not said where they are a moment to say so: most ranks are right."""
        deadline = time.monotonic() + GRACE_S
        missing = [peer for peer in self.peers if self._at(peer, position) is None]
        while missing and (ended := self._listen(missing, deadline)) is not None:
            missing = [p for p in missing if p not in ended and self._at(p, position) is None]


def _close_all(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


def connect(rank: int, ranks: Sequence[int], meeting: str, barrier: Callable[[], None]) -> Signals:
    """Link this rank with every other rank of the host.

    Args:
        rank, ranks: this rank and all of the host's.
        meeting: a name that only these ranks know, the same on all of them.
        barrier: callable; returns when all ranks have called it.

    Raises:
        OSError: the ranks cannot reach one another this way.
    """
    links: dict[tuple[int, str], socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(f"\0{meeting}-{rank}")
        door.listen(2 * len(ranks))
        door.settimeout(10.0)
        barrier()
        others = [other for other in ranks if other != rank]
        for other in [other for other in others if other < rank]:
            for use in ("link", "handles"):
                link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                link.connect(f"\0{meeting}-{other}")
                link.sendall(_hello(rank, use))
                links[other, use] = link
        while len(links) < 2 * len(others):
            link, _ = door.accept()
            hello = json.loads(link.recv(len(_hello(0, "link")), socket.MSG_WAITALL))
            links[hello["rank"], hello["use"]] = link
    for (_, use), link in links.items():
        link.setblocking(use == "handles")
    return Signals(rank, [Peer(o, links[o, "link"], links[o, "handles"]) for o in others])


def _hello(rank: int, use: str) -> bytes:
    return json.dumps({"rank": rank, "use": use}).ljust(64).encode()
