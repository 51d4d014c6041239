"""Signals between the ranks of one host: which collective each rank has started, and which rank has ended.

Every two ranks share a Unix socket. A rank *posts* its collectives in order. A rank that must not go on
before the others have come as far *waits* for their posts, and compares them with its own (``guard.py``). The
kernel does the rest: a waiting rank sleeps, what a rank wrote to shared memory before it posted is visible to
those that receive the post, and a rank that dies closes its sockets, however it dies. A rank that stops
because it lost another says so first. Otherwise a third rank, which looks later, might name the second as
the cause.

The sockets live in Linux's abstract namespace: no file, so nothing is left behind.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shardtrain.comm.guard import GRACE_S, MESSAGE, Entry, Paths, PeerLost, unpack
from shardtrain.comm.movement import GATHER, Movement

# Kinds of entries that are no collectives, whose kinds are 0 and above.
_DONE = -1  # "I have read what your collective at this position offered"
_LOST = -2  # "the rank of this value has ended, so I stop, too"
_HANDLE_BYTES = array("i").itemsize


class Peer:
    """The socket to one other rank, and what it has said that is no collective."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank = rank
        self.link = link
        self.done: set[int] = set()  # positions of this rank's collectives that it has read
        self.handles: list[int] = []  # file descriptors that it has sent
        self.cause = rank  # the rank that ended first, once this one is lost
        self._bytes = b""

    def receive(self, paths: Paths) -> bool:
        """Take in what has arrived. Return False once the peer has closed its end."""
        try:
            data, rights, _, _ = self.link.recvmsg(1 << 16, socket.CMSG_SPACE(_HANDLE_BYTES))
        except BlockingIOError:
            return True
        except ConnectionError:
            return False
        self.handles += [int.from_bytes(handle, sys.byteorder) for _, _, handle in rights]
        self._bytes += data
        whole = len(self._bytes) // MESSAGE.size * MESSAGE.size
        for position, entry in unpack(self._bytes[:whole]):
            if entry.kind == _DONE:
                self.done.add(position)
            elif entry.kind == _LOST:
                self.cause = entry.value
            else:
                paths.theirs[self.rank][position] = entry
        self._bytes = self._bytes[whole:]
        return bool(data)


class Signals:
    """This rank's sockets to the other ranks of its host."""

    def __init__(self, rank: int, peers: list[Peer]) -> None:
        self.rank = rank
        self.peers = peers
        self.paths = Paths(rank, [peer.rank for peer in peers])
        self._awaited: set[int] = set()  # positions that `wait` will ask for
        self.close = weakref.finalize(self, _close, tuple(peers))
        this = weakref.ref(self)
        # A forked data loader must not keep a dead rank's sockets open.
        os.register_at_fork(after_in_child=lambda: (alive := this()) and alive.close())

    def post(self, kind: Movement, number: int, name: str, value: int = 0, handle: int | None = None) -> int:
        """Send this rank's next collective to every peer. Return its position.

        Every collective but a gather must be waited for. ``handle``: a file descriptor to send with it.
        """
        position, message = self.paths.add(kind, number, name, value)
        if kind is not GATHER:
            self._awaited.add(position)
        self._send(message, position, handle)
        return position

    def done(self, position: int) -> None:
        """Tell every peer that this rank has read what their collective at ``position`` offered."""
        self._send(Entry(_DONE, 0, 0, 0, b"").packed(position), position)

    def wait(self, position: int) -> dict[int, int]:
        """Wait until every peer has come to ``position``. Return the value that each rank offered there.

        Raises:
            Diverged: a peer made another collective there, or earlier.
            PeerLost: a peer has ended, or the time-out has passed.
        """
        theirs = self.paths.theirs
        self._receive_until(lambda peer: position in theirs[peer.rank], position)
        self._awaited.discard(position)
        return {rank: log[position].value for rank, log in theirs.items()}

    def wait_done(self, position: int) -> None:
        """Wait until every peer has read what this rank's collective at ``position`` offered."""
        self._receive_until(lambda peer: position in peer.done, position)
        for peer in self.peers:
            peer.done.discard(position)

    def is_done(self, position: int) -> bool:
        """Return whether `wait_done` would return at once."""
        self._receive_all()
        return all(position in peer.done for peer in self.peers)

    def compare(self) -> None:
        """Raise Diverged if what peers have said so far shows that one takes another path."""
        self._receive_all()
        self._compare()

    def take_handle(self, owner: int) -> int:
        """Return the file descriptor that ``owner`` sent with a collective that has been waited for."""
        return next(peer for peer in self.peers if peer.rank == owner).handles.pop(0)

    def abort(self) -> None:
        """End all waiting, here and at the peers: something else has failed. Any thread may call this."""
        for peer in self.peers:
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_RDWR)

    def _send(self, message: bytes, position: int, handle: int | None = None) -> None:
        rights = [] if handle is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [handle]))]
        for peer in self.peers:
            try:
                self._send_to(peer, message, position, rights)
            except OSError:
                peer.receive(self.paths)
                self._compare()
                raise self._lost([peer], position) from None

    def _send_to(self, peer: Peer, message: bytes, position: int, rights: list[Any]) -> None:
        while message:
            try:
                message, rights = message[peer.link.sendmsg([message], rights) :], []
            except BlockingIOError:
                room = select.poll()
                room.register(peer.link, select.POLLOUT)
                if not room.poll(self.paths.timeout_s * 1000):
                    raise self.paths.silent([peer.rank], position) from None

    def _receive_all(self) -> None:
        for peer in self.peers:
            peer.receive(self.paths)

    def _receive_until(self, arrived: Callable[[Peer], bool], position: int) -> None:
        """Receive until ``arrived(peer)`` holds for every peer."""
        deadline = time.monotonic() + self.paths.timeout_s
        while True:
            self._compare()
            missing = [peer for peer in self.peers if not arrived(peer)]
            if not missing:
                return
            ended = self._receive_some(missing, deadline)
            if ended is None:
                raise self.paths.silent([peer.rank for peer in missing], position)
            gone = [peer for peer in ended if not arrived(peer)]
            if gone:
                self._compare()
                raise self._lost(gone, position)

    def _receive_some(self, peers: list[Peer], deadline: float) -> list[Peer] | None:
        """Receive what any of ``peers`` sends next. Return those that have ended, or None at the deadline.

        A peer that has lost another counts as ended: it may live on, but makes no collective any more.
        """
        if stopped := [peer for peer in peers if peer.cause != peer.rank]:
            return stopped
        poll = select.poll()
        by_number = {peer.link.fileno(): peer for peer in peers}
        for number in by_number:
            poll.register(number, select.POLLIN)
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ready:
            return None
        return [by_number[number] for number, _ in ready if not by_number[number].receive(self.paths)]

    def _lost(self, ended: Sequence[Peer], position: int) -> PeerLost:
        """Return the error for ``ended`` peers, which names who ended first, and tell the other peers so."""
        causes = sorted({peer.cause for peer in ended})
        message = Entry(_LOST, 0, 0, causes[0], b"").packed(position)
        for peer in self.peers:
            with suppress(OSError):
                peer.link.send(message)
        return self.paths.lost(causes, position)

    def _compare(self) -> None:
        """Compare every peer's collectives with this rank's, as far as both are known."""
        position = self.paths.difference()
        if position is None:
            self.paths.forget_before(min(self._awaited, default=self.paths.end))
            return
        # Most ranks are right: give those that have not said where they are a moment to say so.
        deadline = time.monotonic() + GRACE_S
        missing = [peer for peer in self.peers if position not in self.paths.theirs[peer.rank]]
        while missing and (ended := self._receive_some(missing, deadline)) is not None:
            missing = [p for p in missing if p not in ended and position not in self.paths.theirs[p.rank]]
        raise self.paths.diverged(position)


def _close(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.link.close()
        for handle in peer.handles:
            os.close(handle)


def connect(rank: int, ranks: Sequence[int], name: str, barrier: Callable[[], None]) -> Signals:
    """Connect this rank with every other rank of the host.

    Args:
        rank, ranks: this rank and all of the host's.
        name: of the sockets; known to these ranks alone, the same on all of them.
        barrier: callable; returns when all ranks have called it.

    Raises:
        OSError: the ranks cannot reach one another this way.
    """
    links: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}-{rank}")
        listener.listen(len(ranks))
        listener.settimeout(10.0)
        barrier()
        for other in [other for other in ranks if other < rank]:
            links[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            links[other].connect(f"\0{name}-{other}")
            links[other].sendall(rank.to_bytes(8, "big"))
        while len(links) < len(ranks) - 1:
            link, _ = listener.accept()
            links[int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")] = link
    for link in links.values():
        link.setblocking(False)
    return Signals(rank, [Peer(other, links[other]) for other in ranks if other != rank])
