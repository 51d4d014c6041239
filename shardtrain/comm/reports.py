"""The guard over gloo: ranks that wait too long tell each other where they are, and compare.

A movement's messages carry its number and position in their tag, so those of different movements never
meet: ranks on different paths wait for each other. Nothing more is needed while all goes well. Once a rank
has waited ``STALL_S`` seconds it reports its latest movements, round a ring of all ranks. Ranks on another
path are waiting too and report theirs, and all of them see where the paths part::

    rank 0   ... 7 gathering layer1   8 gathering layer2   waits    reports 0 to 8
    rank 1   ... 7 gathering layer2                        waits    reports 0 to 7: the paths part at 7

A rank that is merely slow reports nothing and is waited for, until the time-out. Announcing every movement
by a message of its own instead, and waiting for the announcements, took 3 to 7 % of a ResNet-18's step.

A rank that fails closes its connections before it says so: payloads under way could otherwise arrive in
memory that the failing step has given back. Where ranks wait for one another by other means as well, as
those of a host do in `telling`, it hangs up there, too.
"""

from __future__ import annotations

import datetime
import os
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from shardtrain.comm.guard import GRACE_S, MESSAGE, Diverged, Entry, Paths, PeerLost
from shardtrain.comm.messages import report_tag
from shardtrain.comm.movement import Movement
from shardtrain.comm.transport import Pending, Tag

STALL_S = 1.0
_TICK_S = 0.2
_KEPT = 64  # movements in a report: as far as replicas may be apart, which meet in backward only
_HEAD = struct.Struct("<iiii")  # who reports, who is lost (-1: nobody), first movement's position, how many
_SIZE = _HEAD.size + _KEPT * MESSAGE.size


class Reports:
    """What this rank is waiting for, and what the others have said that they are waiting for."""

    def __init__(
        self, group: dist.ProcessGroup, peers: list[int], tag: int, hang_up: Callable[[], None]
    ) -> None:
        """``hang_up``: callable; ends this rank's waiting, and that for it, by other means than messages."""
        self.paths = Paths(group.rank(), peers)
        self._line = Line(group, peers, tag, _SIZE)
        self._news = threading.Condition()  # guards what follows, and all logs
        self._waits_at: tuple[int, float] | None = None  # position, since when
        self._told: tuple[int, float] | None = None  # the wait that has been reported
        self._parted_at: float | None = None  # when it became known that the paths part
        self._failure: RuntimeError | None = None
        self._hang_up, self._is_elsewhere = hang_up, False
        stop, this = threading.Event(), weakref.ref(self)
        threads = [
            threading.Thread(target=_listen, args=(self._line, this), name="shardtrain-reports", daemon=True),
            threading.Thread(target=_tick, args=(stop, this), name="shardtrain-watch", daemon=True),
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(group, _end, stop, self._line, threads)

    def enter(self) -> None:
        """A step begins."""
        self.paths.step += 1

    def post(self, kind: Movement, tag: Tag) -> int:
        """Note this rank's next movement; its position."""
        with self._news:
            position, _ = self.paths.make(kind, tag.number, tag.name)
            self.paths.own.forget_before(position + 1 - _KEPT)
            self._judge()
            if self._parted_at is not None:
                self._news.wait_for(lambda: self._failure is not None, 2 * GRACE_S)
        self._raise_failure()
        return position

    @contextmanager
    def waiting(self, position: int) -> Iterator[None]:
        """Messages of the movement at ``position`` are waited for in here.

        Raises:
            Diverged: a peer made another movement there, or near it.
            PeerLost: a peer has ended, or the time-out has passed.
        """
        with self._news:
            self._waits_at = position, time.monotonic()
        self._raise_failure()
        try:
            yield
        except RuntimeError as error:
            self._explain(position, error)
            raise
        finally:
            self._waits_at = None

    def watch(self, position: int, moving: Pending) -> Pending:
        """``moving``, waited for with an eye on the others."""

        def finish() -> None:
            if self._failure is not None and isinstance(sys.exc_info()[1], Diverged | PeerLost):
                return  # the step that failed is being tidied up
            with self.waiting(position):
                moving.wait()

        return Pending(finish)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What goes wrong in here was found by other means than messages: let everyone look where all are."""
        self._is_elsewhere = True
        try:
            self._raise_failure()
            yield
        except (Diverged, PeerLost) as error:
            self._explain(self.paths.own.end - 1, error)
            raise
        finally:
            self._is_elsewhere = False

    def _explain(self, position: int, error: RuntimeError) -> None:
        """Raise what a broken connection means; return if ``error`` is something else."""
        with self._news:
            self._tell()
            # Whoever is gone, its right neighbour knows, and tells the others.
            self._news.wait_for(lambda: self._failure is not None or self._left_ended(), GRACE_S + 1)
            if self._failure is None and isinstance(error, Diverged):
                self._fail(error)
            if self._failure is None and self._left_ended():
                self._fail(self.paths.lost([self._line.left], position), self._line.left)
            if self._failure is None and (gone := self._line.ended()):
                self._fail(self.paths.lost(gone, position), gone[0])
            if self._failure is None and is_time_out(error):
                self._fail(self.paths.silent(self._missing(position), position))
        self._raise_failure(error)

    def _left_ended(self) -> bool:
        """The left neighbour is gone, and not because the paths part."""
        return self._line.left_is_gone and self._parted_at is None

    def _raise_failure(self, cause: RuntimeError | None = None) -> None:
        if self._failure is not None:
            self._hang_up()
            self._line.close()
            raise type(self._failure)(str(self._failure)) from cause

    # What the threads do.

    def look(self) -> None:
        """If this rank has been waiting for long, tell the others where; after too long, give up."""
        with self._news:
            self._judge()
            if self._waits_at is None or self._failure is not None:
                return
            position, since = self._waits_at
            waited = time.monotonic() - since
            if waited > STALL_S and self._told != self._waits_at:
                self._told = self._waits_at
                self._tell()
            if waited > self.paths.timeout_s:
                self._fail(self.paths.silent(self._missing(position), position))

    def hear(self, report: bytes) -> None:
        """Take in what a peer says."""
        peer, lost, first, count = _HEAD.unpack_from(report)
        if peer == self.paths.rank:
            return
        if peer != self._line.right:
            self._line.send(report)
        body = report[_HEAD.size : _HEAD.size + count * MESSAGE.size]
        with self._news:
            log = self.paths.theirs[peer]
            log.forget_before(log.end)
            log.first = first
            for kind, number, step, value, _, name in MESSAGE.iter_unpack(body):
                log.append(Entry(kind, number, step, value, name))
            if lost >= 0 and self._failure is None:
                self._fail(self.paths.lost([lost], self.paths.own.end - 1), lost)
            self._news.notify_all()
            self._judge()

    def notice(self) -> None:
        """The left neighbour is gone: a rank that asks who it was may go on."""
        with self._news:
            self._news.notify_all()

    def _judge(self) -> None:
        """Fail if the paths part, once all have said where they are or have had the time to."""
        position = self.paths.difference()
        if position is None or self._failure is not None:
            return
        now = time.monotonic()
        if self._parted_at is None:
            self._parted_at = now
            self._tell()
        if not self._missing(position) or now - self._parted_at > GRACE_S:
            self._fail(self.paths.diverged(position))

    def _missing(self, position: int) -> list[int]:
        return sorted(rank for rank, log in self.paths.theirs.items() if log.at(position) is None)

    def _fail(self, failure: RuntimeError, lost: int = -1) -> None:
        """From now on, raise ``failure``; let a rank that waits find its connections closed."""
        self._failure = failure
        self._tell(lost)
        self._news.notify_all()
        if self._is_elsewhere:
            self._hang_up()
        if self._waits_at is not None:
            self._line.close()

    def _tell(self, lost: int = -1) -> None:
        own = self.paths.own
        movements = [own.at(position) for position in range(own.first, own.end)]
        body = b"".join(m.packed(own.first + index) for index, m in enumerate(movements) if m)
        self._line.send(_HEAD.pack(self.paths.rank, lost, own.first, len(movements)) + body)


def open_reports(group: dist.ProcessGroup, peers: list[int], hang_up: Callable[[], None]) -> Reports:
    """Reports between this rank and ``peers``, under a tag of their own. Collective over ``group``."""
    number = torch.tensor(int.from_bytes(os.urandom(3), "big"))
    dist.broadcast(number, group=group, group_src=0)
    return Reports(group, peers, report_tag(int(number.item())), hang_up)


def _listen(line: Line, to_reports: weakref.ref[Reports]) -> None:
    while (report := line.receive()) and (reports := to_reports()) is not None:
        reports.hear(report)
        del reports
    if (reports := to_reports()) is not None:
        reports.notice()


def _tick(stop: threading.Event, to_reports: weakref.ref[Reports]) -> None:
    while not stop.wait(_TICK_S) and (reports := to_reports()) is not None:
        reports.look()
        del reports


def _end(stop: threading.Event, line: Line, threads: list[threading.Thread]) -> None:
    """The group is no more, or the interpreter ends."""
    stop.set()
    line.hang_up()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(GRACE_S)


# The gloo side of `reports.py`: reports go round a ring of all ranks, and connections tell who is gone.
#
# A receive that waits at every peer for a message that never comes, its *pulse*, ends only with that peer.

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
