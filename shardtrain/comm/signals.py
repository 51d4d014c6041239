"""Signals between the ranks of one host, and the memory that they share.

Every two ranks share a Unix socket. A rank *posts* that it has reached a collective. A rank that must not
continue before the others have reached it, *waits* for their posts. The kernel provides the rest: a
waiting rank sleeps, what a rank wrote to shared memory before a post is visible to its receivers, and a rank
that dies closes its sockets.

Posts are numbered, and each carries a hash of its rank's path. If hashes differ, the ranks have diverged, and
`Reports` finds out where, as it does for ranks that wait too long. No rank waits for gathers in place, so
these are not posted. They enter the hash, and the 128th of them in a row is posted and waited for: otherwise
a report would not reach back to the position at which ranks differ.

Memory comes from ``memfd_create``. Each time that some is shared, peers receive its file with a post.
Files and sockets have no name in any file system, so nothing is left behind however a rank ends, and the size
of ``/dev/shm`` does not matter.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import torch

from shardtrain.comm.channel import Ranks, gather_texts
from shardtrain.comm.guard import KEPT
from shardtrain.comm.mapping import map_shared
from shardtrain.comm.reports import Reports
from shardtrain.comm.trace import SHARE
from shardtrain.errors import Diverged, PeerLost

_POST = struct.Struct("<?qqq")  # whether it means `done`; number, hash, value
_FILE = struct.Struct("i")  # the descriptor of a shared file
_FILE_BYTES = socket.CMSG_SPACE(_FILE.size)
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LINK_S = 10.0  # until all ranks have connected
_KIND = socket.AF_UNIX, socket.SOCK_SEQPACKET  # a message arrives whole, or not at all
_UNHEARD = KEPT // 2  # the most posts in a row that are not sent


class Peer:
    """The socket to one other rank, and what has arrived from it."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank = rank
        self.link = link
        self.posts: dict[int, tuple[int, int]] = {}  # by number: hash and value
        self.reached = -1  # the number of the latest post
        self.done: set[int] = set()  # numbers of this rank's posts whose offer it has read
        self.files: list[int] = []  # descriptors of memory that it shares, not yet mapped
        self.has_ended = False

    def receive(self) -> None:
        """Receive what has arrived, without waiting."""
        try:
            data, control, _, _ = self.link.recvmsg(_POST.size, _FILE_BYTES, _FLAGS)
        except BlockingIOError:
            return
        except OSError:
            data = b""
            control = []
        self.files += [_FILE.unpack(file)[0] for _, _, file in control]
        self.has_ended = not data
        for is_done, number, digest, value in _POST.iter_unpack(data):
            if is_done:
                self.done.add(number)
            else:
                self.posts[number] = (digest, value)
                self.reached = number


class Signals:
    """This rank's sockets to the other ranks of its host. ``reports``: the guard of all ranks."""

    def __init__(self, reports: Reports, peers: list[Peer]) -> None:
        self.rank = reports.paths.rank
        self.reports = reports
        self.peers = peers
        self._number = -1  # of this rank's latest post
        # By number, this rank's position and hash at posts that `wait` will ask for.
        self._posted: dict[int, tuple[int, int]] = {}
        self._unsent = 0  # collectives since the last post
        self._by_descriptor = {peer.link.fileno(): peer for peer in peers}
        self._poll = select.poll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)
        reports.abort = partial(_shut_down, peers)
        self.close = weakref.finalize(self, _close, peers)
        _all.add(self)

    def post(self, value: int = 0, files: Sequence[int] = ()) -> int:
        """Post to every peer that this rank has reached the latest collective of its path, with ``files``.

        Return the number of the post, which the caller must wait for.
        """
        self._unsent = 0
        self._number += 1
        paths = self.reports.paths
        self._posted[self._number] = (paths.end - 1, paths.digest)
        self._send(_POST.pack(False, self._number, paths.digest, value), files)
        return self._number

    def advance(self) -> None:
        """Note that this rank has reached a collective that nobody waits for."""
        self._unsent += 1
        if self._unsent == _UNHEARD:
            self.wait(self.post())

    def done(self, number: int) -> None:
        """Post to every peer that this rank has read what they offered at ``number``."""
        self._send(_POST.pack(True, number, 0, 0))

    def wait(self, number: int) -> dict[int, int]:
        """Wait for every peer's post ``number``. Return the value that each offered with it, by rank.

        Raises `Diverged` if a peer made another collective there, or earlier; `PeerLost` if one has ended, or
        does not answer for as long as the time-out.
        """
        position, digest = self._posted[number]
        self._wait_until(lambda peer: peer.reached >= number, position)
        del self._posted[number]
        values = {}
        for peer in self.peers:
            posted, values[peer.rank] = peer.posts.pop(number, (None, 0))
            if posted != digest:
                where = self.reports.paths.where(position)
                self.reports.fail(position, Diverged(f"ranks differ before {where}"))
        return values

    def wait_done(self, number: int) -> None:
        """Wait until every peer has read what this rank offered with its post ``number``."""
        self._wait_until(lambda peer: number in peer.done, self.reports.paths.end - 1)
        for peer in self.peers:
            peer.done.discard(number)

    def is_done(self, number: int) -> bool:
        """Return whether `wait_done` would return without waiting."""
        self._take_in(0)
        return all(number in peer.done for peer in self.peers)

    def share(self, owner: int, size: int) -> torch.Tensor:
        """Map ``size`` bytes that rank ``owner`` provides on every rank: uint8 zeros. Collective."""
        files = list[int]()
        length = max(size, 1)
        if owner == self.rank:
            files.append(os.memfd_create("shardtrain", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.ftruncate(files[0], length)
            # Sealed against shrinking: reading a truncated mapping kills the process.
            fcntl.fcntl(files[0], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        try:
            self.reports.post(SHARE, f"{size} bytes")
            self.wait(self.post(files=files))
        except BaseException:
            for file in files:
                os.close(file)
            raise
        files += [peer.files.pop(0) for peer in self.peers if peer.rank == owner]
        return map_shared(files[0], length)[:size]

    def _send(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Send ``message`` to every peer. Socket buffers hold far more messages than ranks are ever apart."""
        for peer in self.peers:
            with suppress(OSError):  # the peer has ended, which `_wait_until` reports
                socket.send_fds(peer.link, [message], files) if files else peer.link.send(message)

    def _wait_until(self, is_there: Callable[[Peer], bool], position: int) -> None:
        """Receive from all peers until ``is_there(peer)`` holds for every peer."""
        if all(map(is_there, self.peers)):
            return
        with self.reports.waiting(position):
            while late := [peer for peer in self.peers if not is_there(peer)]:
                if ended := [peer.rank for peer in late if peer.has_ended]:
                    self.reports.fail(position, PeerLost(), ended)
                self._take_in(None)

    def _take_in(self, milliseconds: int | None) -> None:
        """Receive what peers send within ``milliseconds``; with ``None`` wait for the next message."""
        for descriptor, _ in self._poll.poll(milliseconds):
            peer = self._by_descriptor[descriptor]
            peer.receive()
            if peer.has_ended:
                self._poll.unregister(descriptor)


def _shut_down(peers: Sequence[Peer]) -> None:
    """End all waits here and on the peers, after a failure. Any thread may call it."""
    for peer in peers:
        with suppress(OSError):
            peer.link.shutdown(socket.SHUT_RDWR)


def _close(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.link.close()
        for file in peer.files:
            os.close(file)


# A forked data loader must not keep a dead rank's sockets open.
_all: weakref.WeakSet[Signals] = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [signals.close() for signals in _all])


def connect(all_ranks: Ranks, host_ranks: Sequence[int]) -> Signals:
    """Connect this rank with the other ``host_ranks``, those of its host. Collective over ``all_ranks``.

    Each rank listens under a random name before it announces it, so no other process can take the name.
    Raises ValueError, on every rank, if some ranks cannot reach one another this way.
    """
    reports = all_ranks.guard
    assert isinstance(reports, Reports), "all ranks have gloo"
    peers = list[Peer]()
    problem = ""
    name = f"shardtrain-{secrets.token_hex(16)}"
    with socket.socket(*_KIND) as listener:
        with suppress(OSError):  # the rank that has to connect will report it
            listener.bind(f"\0{name}")
            listener.listen()
            listener.settimeout(_LINK_S)
        texts = gather_texts(f"{name} {os.getpid()}", all_ranks)
        try:
            _link(listener, {other: texts[other] for other in host_ranks}, peers)
        except OSError as error:
            problem = f"the ranks cannot reach one another on this host: {error}"
    if problem := next(filter(None, gather_texts(problem, all_ranks)), ""):
        _close(peers)
        raise ValueError(problem)
    return Signals(reports, sorted(peers, key=lambda peer: peer.rank))


def _link(listener: socket.socket, texts: dict[int, str], peers: list[Peer]) -> None:
    """Add every other rank of ``texts`` to ``peers``.

    Each rank connects to those before it. The kernel reports process and user at the other end. A connection
    of any other process is closed without an answer.
    """
    deadline = time.monotonic() + _LINK_S
    missing = dict[tuple[int, int], tuple[int, str]]()
    for other, text in texts.items():
        name, process = text.split()
        missing[int(process), os.geteuid()] = other, name
    rank, _ = missing.pop((os.getpid(), os.geteuid()))
    while missing:
        first, name = min(missing.values())
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {first} did not connect")
        if first < rank:
            link = socket.socket(*_KIND)
            link.connect(f"\0{name}")
        else:
            link, _ = listener.accept()
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        who = _CREDENTIALS.unpack(credentials)[:2]
        if who in missing:
            peers.append(Peer(missing.pop(who)[0], link))
        else:
            link.close()
