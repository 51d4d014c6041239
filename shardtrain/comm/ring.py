"""The gloo side of `reports.py`: reports go round a ring of all ranks, and connections tell who is gone.

A receive that waits at every peer for a message that never comes, its *pulse*, ends only with that peer.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
from collections import deque
from contextlib import suppress

import torch
import torch.distributed as dist

from shardtrain.comm.guard import GRACE_S

_FOREVER, _A_MOMENT = datetime.timedelta(days=300), datetime.timedelta(milliseconds=20)


class Line:
    """This rank's place in the ring, and its connections to all peers."""

    def __init__(self, group: dist.ProcessGroup, peers: list[int], tag: int, size: int) -> None:
        """``size``: of a report, in bytes. ``tag``: of reports; the next one is the pulse's."""
        ring = sorted([group.rank(), *peers])
        place = ring.index(group.rank())
        self.left, self.right = ring[place - 1], ring[(place + 1) % len(ring)]
        self._group = weakref.ref(group)
        self._tag, self._size = tag, size
        self._sent: deque[tuple[torch.Tensor, dist.Work]] = deque(maxlen=4 * len(ring))
        self._closing = threading.Lock()
        self._nothing = torch.empty(1, dtype=torch.uint8)
        self._pulses = {peer: group.recv([self._nothing], peer, tag + 1) for peer in peers}
        self.left_is_gone = False
        self._arriving: deque[tuple[torch.Tensor, dist.Work]] = deque()
        for _ in range(4):  # so that a report goes out even while the right is busy with another
            self._expect(torch.empty(size, dtype=torch.uint8))

    def receive(self) -> bytes:
        """The next report from the left; empty when there will be none."""
        try:
            memory, arriving = self._arriving.popleft()
            arriving.wait(_FOREVER)
            report = bytes(memory.tolist())
            self._expect(memory)
        except (RuntimeError, IndexError):  # the connection is closed, or we have hung up
            self.left_is_gone = True
            return b""
        return report

    def _expect(self, memory: torch.Tensor) -> None:
        group = self._group()
        if group is not None:
            self._arriving.append((memory, group.recv([memory], self.left, self._tag)))

    def send(self, report: bytes) -> None:
        """Send to the right; whoever is gone is told nothing."""
        group = self._group()
        data = torch.frombuffer(bytearray(report.ljust(self._size, b"\0")), dtype=torch.uint8)
        if group is not None:
            with suppress(RuntimeError):
                self._sent.append((data, group.send([data], self.right, self._tag)))

    def ended(self) -> list[int]:
        """The peers whose connections are gone. Asking closes the others."""
        return [peer for peer in self._pulses if not self._is_alive(peer)]

    def _is_alive(self, peer: int) -> bool:
        try:
            self._pulses[peer].wait(_A_MOMENT)
        except RuntimeError as error:
            return is_time_out(error)
        return True

    def close(self) -> None:
        """Let the last report go out, then close all connections; gloo does that at a time-out.

        A thread that comes while another is about it waits, too, or it would cut that report off.
        """
        with self._closing:
            deadline = time.monotonic() + GRACE_S
            while self._sent:
                left = max(0.001, deadline - time.monotonic())
                with suppress(RuntimeError):
                    self._sent.popleft()[1].wait(datetime.timedelta(seconds=left))
            self.ended()

    def hang_up(self) -> None:
        """Close all connections, which ends `receive`; hold nothing more that keeps gloo's threads alive."""
        self.ended()
        self._sent.clear()
        self._pulses.clear()
        self._arriving.clear()


def is_time_out(error: RuntimeError) -> bool:
    """Ours, or that of another connection, upon which gloo closes them all."""
    text = str(error).lower()
    return "timed out" in text or "timeout" in text
