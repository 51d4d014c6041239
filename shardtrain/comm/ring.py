"""The ring of all ranks over gloo, round which `Reports` go, and what its connections say of them."""

from __future__ import annotations

import datetime
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist

from shardtrain.comm.guard import GRACE_S, MESSAGE
from shardtrain.comm.messages import FOREVER

KEPT = 64  # collectives in a report: as far as replicas may be apart, which meet in backward only
# Who reports; why; the rank that it has lost (-1: none), and in which state; how long ago it was
# at work, or a rank that it waits for; how many collectives follow.
HEAD = struct.Struct("<iiiidi")
TELLS, ASKS, LIVES, LEAVES = range(4)  # the last two are for the right neighbour alone
REPORT_BYTES = HEAD.size + KEPT * MESSAGE.size
_A_MOMENT = datetime.timedelta(milliseconds=20)


class Ring:
    """This rank's place in a ring of all ranks, round which reports go; its connections say who has ended.

    A receive is posted at every peer for a message that never comes, the *pulse*: only that peer's end
    completes it, with an error.
    """

    def __init__(self, group: dist.ProcessGroup, tag: int, size: int) -> None:
        """``size``: of a report, in bytes. ``tag``: of reports; the next one is the pulse's."""
        self.rank, world = group.rank(), group.size()
        self.left, self.right = (self.rank - 1) % world, (self.rank + 1) % world
        self._group = weakref.ref(group)
        self._tag, self._size = tag, size
        self._sent: deque[tuple[torch.Tensor, dist.Work]] = deque(maxlen=4 * world)
        self._closing = threading.Lock()
        self._nothing = torch.empty(1, dtype=torch.uint8)
        self._pulses = {peer: group.recv([self._nothing], peer, tag + 1) for peer in peers_of(group)}
        self.left_is_gone = False
        self.left_leaves = False  # the left neighbour has dropped the model
        self.stop = threading.Event()  # this rank has, or the group is no more
        self._threads: list[threading.Thread] = []
        self._arriving: deque[tuple[torch.Tensor, dist.Work]] = deque()
        for _ in range(4):  # so that a report goes out even while the right is busy with another
            self._expect(torch.empty(size, dtype=torch.uint8))

    def start(self, target: Callable[..., None], *arguments: object) -> None:
        """Start a thread that ends when the ring does."""
        thread = threading.Thread(
            target=target, args=(self, *arguments), name="shardtrain-reports", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def receive(self) -> bytes:
        """Return the next report from the left, and pass it on; empty once there will be none."""
        if self.left_leaves:
            return b""
        try:
            memory, arriving = self._arriving.popleft()
            arriving.wait(FOREVER)
            report = bytes(memory.tolist())
            self._expect(memory)
        except (RuntimeError, IndexError):  # the connection is closed, or this rank has given up
            self.left_is_gone = True
            return b""
        peer, why, *_ = HEAD.unpack_from(report)
        self.left_leaves = why == LEAVES
        if why in (TELLS, ASKS) and peer != self.right:
            self.send(report)
        return report

    def _expect(self, memory: torch.Tensor) -> None:
        group = self._group()
        if group is not None:
            self._arriving.append((memory, group.recv([memory], self.left, self._tag)))

    def send(self, report: bytes) -> None:
        """Send to the right, unless that rank is gone."""
        group = self._group()
        data = torch.frombuffer(bytearray(report.ljust(self._size, b"\0")), dtype=torch.uint8)
        if group is not None:
            with suppress(RuntimeError):
                self._sent.append((data, group.send([data], self.right, self._tag)))

    def ended(self) -> list[int]:
        """Return the peers whose connections are gone. This closes the others: gloo does at a time-out."""
        return [peer for peer in self._pulses if not self._is_alive(peer)]

    def _is_alive(self, peer: int) -> bool:
        try:
            self._pulses[peer].wait(_A_MOMENT)
        except RuntimeError as error:
            return is_time_out(error)
        return True

    def drain(self) -> None:
        """Return when the right has received all, or is gone."""
        with suppress(RuntimeError, IndexError):
            while True:
                self._sent.popleft()[1].wait(FOREVER)

    def close(self, patience_s: float = GRACE_S) -> None:
        """Let the last report go out, unless that takes longer than ``patience_s``; close all connections.

        A second thread that closes waits, too, or it would cut that report off.
        """
        with self._closing:
            deadline = time.monotonic() + patience_s
            while self._sent:
                left = max(0.001, deadline - time.monotonic())
                with suppress(RuntimeError):
                    self._sent.popleft()[1].wait(datetime.timedelta(seconds=left))
            self.ended()

    def abort(self) -> None:
        """Close all connections, which ends `receive`; hold nothing more that keeps gloo's threads alive."""
        self.stop.set()
        self.ended()
        self._sent.clear()
        self._pulses.clear()
        self._arriving.clear()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(GRACE_S)


def peers_of(group: dist.ProcessGroup) -> list[int]:
    return [rank for rank in range(group.size()) if rank != group.rank()]


def is_time_out(error: RuntimeError) -> bool:
    """Return whether a wait timed out: this one, or another, upon which gloo ends them all."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
