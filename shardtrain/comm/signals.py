"""Signals between the ranks of one host: which collective each rank has started, and which rank is lost.

Every two ranks share a Unix socket. A rank *posts* its collectives in order. A rank that must not go on
before the others have come as far *waits* for their posts, and compares them with its own (``guard.py``). The
kernel does the rest: a waiting rank sleeps, what a rank wrote to shared memory before it posted is visible to
those that receive the post, and a rank that dies closes its sockets, however it dies. A rank that stops
because it lost another says so first. Otherwise a third rank, which looks later, might name the second as
the cause.

A socket's buffer holds a few hundred posts. A rank that waits, for a post or for room in a buffer, takes in
what any other rank sends, so no two ranks wait for each other to read.

A rank that has waited for long asks the kernel whether the others run: a rank that computes by itself for an
hour is waited for, a stopped one is lost at the time-out.

Memory comes from ``memfd_create``: one file per rank, which the others receive when they connect, and which
grows by what is shared of it. Files and sockets have no name in any file system, so nothing is left behind
however a rank ends, and the size of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from shardtrain.comm.guard import (
    CHECK_S,
    ELSEWHERE,
    ENDED,
    GRACE_S,
    MESSAGE,
    SILENT,
    Entry,
    Paths,
    PeerLost,
    Wait,
    shown_in,
    unpack,
)
from shardtrain.comm.movement import GATHER, SHARE, STEP, Movement

# Kinds of entries that are no collectives, whose kinds are 0 and above.
_DONE = -1  # "I have read what your collective at this position offered"
_LOST = -2  # "the rank of this value is lost, in the state of this number, so I stop, too"
_LAZY_BYTES = 32 * MESSAGE.size  # gathers that nobody waits for are sent together


class Peer:
    """The socket to one other rank, and what it has said that is no collective."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank, self.link = rank, link
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * 4)
        self.process = struct.unpack("3i", credentials)[0]  # 0 in a container of its own
        self.done: set[int] = set()  # positions of this rank's collectives that it has read
        self.lost: tuple[int, int] | None = None  # if it is: why, and the rank that was lost first
        self.has_room = True
        self.at_work = 0.0  # when it was last known to be

    def receive(self, paths: Paths) -> bool:
        """Take in what has arrived. Return False once the peer has closed its end."""
        try:
            data = self.link.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            data = b""
        if not data:
            self.lost = self.lost or (ENDED, self.rank)
            return False
        for position, entry in unpack(data):
            if entry.kind >= 0:
                paths.hear(self.rank, position, entry)
            elif entry.kind == _DONE:
                self.done.add(position)
            elif entry.kind == _LOST:
                self.lost = entry.number, entry.value
        return True

    def runs(self) -> bool:
        """Return whether the kernel says that the process is neither stopped nor dead."""
        try:
            status = Path(f"/proc/{self.process}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] not in "TtZX"


class Signals:
    """This rank's sockets to the other ranks of its host, and the memory that they share.

    ``files``: the descriptor of every rank's file, this one's too.
    """

    def __init__(
        self, rank: int, peers: list[Peer], files: Mapping[int, int], time_out_s: Callable[[], float]
    ) -> None:
        self.rank, self.peers = rank, peers
        self.paths = Paths(rank, [peer.rank for peer in peers], time_out_s)
        self._files = files
        self._sizes = dict.fromkeys(files, 0)  # bytes that are shared
        self.show_in(torch.zeros(1 + max(files), dtype=torch.float64))
        self._unsent = b""
        self._awaited: set[int] = set()  # positions that `wait` will ask for
        self._open = {peer.link.fileno(): peer for peer in peers}
        self._poll = select.poll()
        for number in self._open:
            self._poll.register(number, select.POLLIN)
        self.close = weakref.finalize(self, _close, tuple(peers), tuple(files.values()))
        _all.add(self)

    def show_in(self, board: torch.Tensor) -> None:
        """From now on each rank shows in ``board[rank]`` when it was last known to be at work, see `Wait`."""
        self.board, self._own = board, board[self.rank]
        shown_in.add(self._own)

    def post(self, kind: Movement, number: int, name: str, value: int = 0) -> int:
        """Send this rank's next collective to every peer. Return its position.

        All but ``GATHER`` and ``STEP`` must be waited for. These may be sent later, with others.
        """
        position, message = self.paths.add(kind, number, name, value)
        self._unsent += message
        if kind not in (GATHER, STEP):
            self._awaited.add(position)
            self.send(position)
        elif len(self._unsent) >= _LAZY_BYTES:
            self.send(position)
            self.compare()
        return position

    def done(self, position: int) -> None:
        """Tell every peer that this rank has read what their collective at ``position`` offered."""
        self._unsent += Entry(_DONE, 0, 0, 0, b"").packed(position)
        self.send(position)

    def wait(self, position: int) -> dict[int, int]:
        """Wait until every peer has come to ``position``. Return the value that each rank offered there.

        Raises:
            Diverged: a peer made another collective there, or earlier.
            PeerLost: a peer has ended, or does not answer for as long as the time-out.
        """
        theirs = self.paths.theirs
        self._wait_until(lambda peer: position in theirs[peer.rank], position)
        self._awaited.discard(position)
        return {rank: log[position].value for rank, log in theirs.items()}

    def wait_done(self, position: int) -> None:
        """Wait until every peer has read what this rank's collective at ``position`` offered."""
        self._wait_until(lambda peer: position in peer.done, position)
        for peer in self.peers:
            peer.done.discard(position)

    def is_done(self, position: int) -> bool:
        """Return whether `wait_done` would return at once."""
        if not all(position in peer.done for peer in self.peers):
            self._take_in()
        return all(position in peer.done for peer in self.peers)

    def compare(self) -> None:
        """Raise Diverged if what peers have said so far shows that one takes another path."""
        while self._take_in():
            pass
        self._compare()

    def share(self, owner: int, size: int) -> torch.Tensor:
        """Return ``size`` bytes of rank ``owner``'s file, which every rank maps; uint8, zeros. Collective."""
        start, page = self._sizes[owner], mmap.ALLOCATIONGRANULARITY
        self._sizes[owner] += max(page, -(-size // page) * page)
        if owner == self.rank:
            os.ftruncate(self._files[owner], self._sizes[owner])
        self.wait(self.post(SHARE, size, f"{size} bytes"))
        memory = mmap.mmap(self._files[owner], self._sizes[owner] - start, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8)[:size]

    def abort(self) -> None:
        """End all waiting, here and at the peers: something else has failed. Any thread may call this."""
        for peer in self.peers:
            with suppress(OSError):
                peer.link.shutdown(socket.SHUT_RDWR)

    def send(self, position: int) -> None:
        """Send what has not been sent, up to the collective at ``position``."""
        message, self._unsent = self._unsent, b""
        for peer in self.peers:
            while message:
                try:
                    peer.link.send(message)
                    break
                except BlockingIOError:
                    peer.has_room = False
                    self._wait_until(lambda each: each.has_room, position)
                except OSError:
                    self.compare()
                    raise self._lost([peer], position) from None

    def _wait_until(self, has_come: Callable[[Peer], bool], position: int) -> None:
        """Take in what any peer sends until ``has_come(peer)`` holds for every peer."""
        since, wait = time.monotonic(), None
        try:
            while True:
                self._compare()
                late = [peer for peer in self.peers if not has_come(peer)]
                if not late:
                    return
                if gone := [peer for peer in late if peer.lost]:
                    raise self._lost(gone, position)
                if not self._take_in(CHECK_S, [peer for peer in late if not peer.has_room]):
                    wait = wait or Wait(self.paths, position, since)
                    self._check(wait, late, position)
        finally:
            if wait is not None:
                wait.end()

    def _check(self, wait: Wait, late: Sequence[Peer], position: int) -> None:
        """Raise PeerLost if nobody that this rank waits for has been at work for as long as the time-out."""
        for peer in late:
            if peer.runs():
                peer.at_work = self.board[peer.rank].item() or time.monotonic()
        if not wait.is_over_time({peer.rank: peer.at_work for peer in late}):
            return
        # Those for whom this rank waits may in turn wait for one that is stopped.
        stopped = [peer.rank for peer in self.peers if not (peer.lost or peer.runs())]
        for peer in late:
            peer.lost = (SILENT, stopped[0]) if stopped else (ELSEWHERE, peer.rank)
        raise self._lost(late, position, wait.waited_s)

    def _take_in(self, seconds: float = 0.0, full: Sequence[Peer] = ()) -> bool:
        """Receive what peers send within ``seconds``, or until one that was ``full`` has room.

        Returns whether anything has happened.
        """
        for peer in full:
            self._poll.modify(peer.link, select.POLLIN | select.POLLOUT)
        ready = self._poll.poll(seconds * 1000)
        for peer in full:
            self._poll.modify(peer.link, select.POLLIN)
        for number, event in ready:
            peer = self._open[number]
            peer.has_room = peer.has_room or bool(event & select.POLLOUT)
            if not peer.receive(self.paths):
                self._poll.unregister(number)
        return bool(ready)

    def _lost(self, lost: Sequence[Peer], position: int, waited_s: float | None = None) -> PeerLost:
        """Return the error for ``lost`` peers, which names who was lost first, and tell the other peers."""
        causes = sorted({peer.lost or (ENDED, peer.rank) for peer in lost})
        state = causes[0][0]
        ranks = [rank for each, rank in causes if each == state]
        self._tell(Entry(_LOST, state, 0, ranks[0], b"").packed(position))
        return self.paths.lost(ranks, position, state, waited_s)

    def _tell(self, message: bytes = b"") -> None:
        """Send what has not been sent, and ``message``, to peers that have room for it."""
        message, self._unsent = self._unsent + message, b""
        for peer in self.peers:
            with suppress(OSError):
                peer.link.send(message)

    def _compare(self) -> None:
        """Compare every peer's collectives with this rank's, as far as both are known."""
        position = self.paths.difference
        if position is None:
            self.paths.forget_before(min(self._awaited, default=self.paths.end))
            return
        self._tell()  # the others must see that it is another path
        # Most ranks are right: give those that have not said where they are a moment to say so.
        deadline = time.monotonic() + GRACE_S
        theirs = self.paths.theirs
        while any(position not in theirs[peer.rank] and not peer.lost for peer in self.peers):
            left = deadline - time.monotonic()
            if left <= 0 or not self._take_in(left):
                break
        raise self.paths.diverged(position)


def _close(peers: Sequence[Peer], files: Sequence[int]) -> None:
    for peer in peers:
        peer.link.close()
    for file in files:
        os.close(file)


# A forked data loader must not keep a dead rank's sockets open.
_all: weakref.WeakSet[Signals] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [each.close() for each in _all])


def connect(
    rank: int, ranks: Sequence[int], name: str, barrier: Callable[[], None], time_out_s: Callable[[], float]
) -> Signals:
    """Connect ``rank`` with the others of ``ranks``, those of its host. Collective.

    ``name``: of the sockets; known to these ranks alone. ``barrier``: returns when all ranks have called it.
    ``time_out_s``: returns the seconds that a rank may not answer.

    Raises:
        OSError: the ranks cannot reach one another this way.
    """
    kind = socket.AF_UNIX, socket.SOCK_SEQPACKET  # a message arrives whole, or not at all
    with socket.socket(*kind) as listener:
        listener.bind(f"\0{name}-{rank}")
        listener.listen(len(ranks))
        listener.settimeout(10.0)
        barrier()
        links = []
        for other in (other for other in ranks if other < rank):
            links.append(socket.socket(*kind))
            links[-1].connect(f"\0{name}-{other}")
        links += [listener.accept()[0] for other in ranks if other > rank]
    files, peers = {rank: os.memfd_create("shardtrain")}, []
    for link in links:
        link.settimeout(10.0)
        socket.send_fds(link, [rank.to_bytes(8, "big")], [files[rank]])
    for link in links:
        sent, (file,), _, _ = socket.recv_fds(link, 8, 1)
        link.setblocking(False)
        peers.append(Peer(int.from_bytes(sent, "big"), link))
        files[peers[-1].rank] = file
    peers.sort(key=lambda peer: peer.rank)
    signals = Signals(rank, peers, files, time_out_s)
    signals.show_in(signals.share(ranks[0], signals.board.nbytes).view(signals.board.dtype))
    return signals
