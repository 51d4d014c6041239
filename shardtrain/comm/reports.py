"""The guard over gloo: ranks that wait too long report where they are, and compare.

The tag of a message holds its collective's number and position, so messages of different collectives never
meet: ranks on different paths wait for each other. Nothing more is needed while all goes well. A rank that
has waited for ``STALL_S`` seconds reports its latest collectives, round a ring of all ranks, and the others
answer with theirs. Ranks on another path wait too, and all ranks see where the paths part::

    rank 0   ... 7 gathering layer1   8 gathering layer2   waits    reports 0 to 8
    rank 1   ... 7 gathering layer2                        waits    reports 0 to 7: they differ at 7

A rank that computes answers, too, and the others wait for it as long as it does (`guard.Wait`). A stopped one
answers nothing, and cuts the ring. So that the ranks behind it are asked all the same, each rank sends its
right neighbour a sign of life now and then, and one that misses its left neighbour's asks in its place.
Announcing every collective by a message of its own instead, and waiting for the announcements, took 3 to 7 %
of a ResNet-18's step.

A rank that fails closes its connections before it raises: payloads under way could otherwise arrive in memory
that the failing step has given back. Where ranks also wait for one another by other means, as those of a host
do in `Reports.sharing`, it ends that waiting, too.

A rank that drops the model says so to its right neighbour. Its threads end when it has, and its left
neighbour, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardtrain.comm.guard import (
    CHECK_S,
    ELSEWHERE,
    ENDED,
    GRACE_S,
    MESSAGE,
    SILENT,
    Diverged,
    Paths,
    PeerLost,
    Wait,
    last_at_work,
    unpack,
)
from shardtrain.comm.messages import report_tag
from shardtrain.comm.movement import Movement
from shardtrain.comm.native import time_out_of
from shardtrain.comm.ring import (
    ASKS,
    HEAD,
    KEPT,
    LEAVES,
    LIVES,
    REPORT_BYTES,
    TELLS,
    Ring,
    is_time_out,
    peers_of,
)
from shardtrain.comm.transport import Pending, Tag

STALL_S = 1.0


class Reports:
    """What this rank waits for, and what the others have reported. Collective when created."""

    def __init__(self, group: dist.ProcessGroup, abort: Callable[[], object]) -> None:
        """``abort``: callable; ends all waiting, of this rank and for it, that is not for messages."""
        number = torch.tensor(int.from_bytes(os.urandom(3), "big"))
        dist.broadcast(number, group=group, group_src=0)
        self.number = int(number.item())  # so that messages of two models never meet, nor their reports
        self.paths = Paths(group.rank(), peers_of(group), time_out_of(group))
        self._ring = Ring(group, report_tag(self.number), REPORT_BYTES)
        self._changed = threading.Condition()  # guards what follows, and `paths`
        self._waiting: tuple[int, float] | None = None  # position, since when
        self._wait: Wait | None = None  # the same, once it is long
        # When this rank last asked, reported to all, sent anything.
        self._asked_s = self._told_s = self._sent_s = time.monotonic()
        self._heard_s = dict.fromkeys(self.paths.theirs, time.monotonic())  # when each peer did
        self._at_work = dict.fromkeys(self.paths.theirs, 0.0)  # when each was last known to be
        self._diverged_at: float | None = None  # when it became known that ranks differ
        self._failure: RuntimeError | None = None
        self._abort, self._is_sharing = abort, False
        self._ring.start(_receive, weakref.ref(self))
        self._ring.start(_check, weakref.ref(self))
        weakref.finalize(group, _end, weakref.ref(self._ring))
        weakref.finalize(self, _leave, self._ring, self.paths)

    def enter(self) -> None:
        """Count a step that begins."""
        self.paths.step += 1

    def post(self, kind: Movement, tag: Tag) -> int:
        """Add this rank's next collective. Return its position."""
        with self._changed:
            position, _ = self.paths.add(kind, tag.number, tag.name)
            self.paths.own.pop(position - KEPT, None)
            self._compare()
            if self._diverged_at is not None:
                self._changed.wait_for(lambda: self._failure is not None, 2 * GRACE_S)
        self._raise_failure()
        return position

    @contextmanager
    def waiting(self, position: int) -> Iterator[None]:
        """Inside, this rank waits for messages of the collective at ``position``.

        Raises:
            Diverged: a peer made another collective there, or near it.
            PeerLost: a peer has ended, or does not answer for as long as the time-out.
        """
        with self._changed:
            self._waiting = position, time.monotonic()
        self._raise_failure()
        try:
            yield
        except RuntimeError as error:
            self._raise_cause(position, error)
            raise
        finally:
            with self._changed:
                self._waiting = None
                if self._wait is not None:
                    self._wait.end()
                    self._wait = None

    def watch(self, position: int, moving: Pending) -> Pending:
        """Return ``moving``, such that waiting for it is `waiting`."""

        def finish() -> None:
            if self._failure is not None and isinstance(sys.exc_info()[1], Diverged | PeerLost):
                return  # the step that failed is being tidied up
            with self.waiting(position):
                moving.wait()

        return Pending(finish)

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Inside, this rank waits for others by other means than messages; all ranks hear of its errors."""
        self._is_sharing = True
        try:
            self._raise_failure()
            yield
        except (Diverged, PeerLost) as error:
            self._raise_cause(self.paths.end - 1, error)
            raise
        finally:
            self._is_sharing = False

    def _raise_cause(self, position: int, error: RuntimeError) -> None:
        """Raise what a broken connection means. Return if ``error`` is something else."""
        with self._changed:
            self._report()
            # Whoever is gone, its right neighbour knows, and tells the others.
            self._changed.wait_for(lambda: self._failure is not None or self._left_ended(), GRACE_S + 1)
            if self._failure is not None:
                pass
            elif isinstance(error, Diverged):
                self._fail(error)
            elif self._left_ended():
                self._lose(self._ring.left, ENDED, position)
            elif self._waiting and (silent := self._silent(self._waiting[1])) is not None:
                self._lose(silent, SILENT, position)
            elif gone := self._ring.ended():
                self._fail(self.paths.lost(gone, position), gone[0])
            elif is_time_out(error):
                self._lose((self._missing(position) or [self._ring.left])[0], SILENT, position)
        self._raise_failure(error)

    def _left_ended(self) -> bool:
        """Return whether the left neighbour is gone, and not because ranks differ."""
        return self._ring.left_is_gone and self._diverged_at is None

    def _raise_failure(self, cause: RuntimeError | None = None) -> None:
        if self._failure is not None:
            self._abort()
            self._ring.close()
            raise type(self._failure)(str(self._failure)) from cause

    # The threads call the next three.

    def check(self) -> None:
        """Ask where the others are once this rank has waited for long; fail once it has for too long."""
        with self._changed:
            self._compare()
            if self._failure is not None:
                return
            now, pause = time.monotonic(), self.paths.time_out_s() / 8
            position, since = self._waiting or (0, now)
            is_long = now - since > min(STALL_S, pause)
            misses_left = now - self._heard_s[self._ring.left] > 3 * pause and not self._ring.left_leaves
            if (is_long and self._asked_s < since) or (
                (is_long or misses_left) and now - self._asked_s > pause
            ):
                self._asked_s = now
                self._report(ASKS)
            elif now - self._sent_s > pause:
                self._report(LIVES)
            if is_long:
                self._be_patient(position, since)

    def _be_patient(self, position: int, since: float) -> None:
        """Fail if nobody that this rank waits for has been at work for as long as the time-out."""
        self._wait = self._wait or Wait(self.paths, position, since)
        missing = self._missing(position)
        awaited = missing or [*self.paths.theirs]
        if self._ring.left_leaves and self._ring.left in missing and self._diverged_at is None:
            self._lose(self._ring.left, ENDED, position)
        elif self._wait.is_over_time({peer: self._at_work[peer] for peer in awaited}):
            silent = self._silent(since)
            if silent is not None:
                self._lose(silent, SILENT, position)
            else:
                self._fail(self.paths.lost(awaited, position, ELSEWHERE, self._wait.waited_s))

    def _silent(self, since: float) -> int | None:
        """Return the first rank to the left that does not answer; those behind it may be cut off."""
        limit, ranks = time.monotonic() - self.paths.time_out_s() / 2, 1 + len(self._heard_s)
        to_the_left = [(self.paths.rank - step) % ranks for step in range(1, ranks)]
        return next((peer for peer in to_the_left if max(self._heard_s[peer], since) < limit), None)

    def receive(self, report: bytes) -> None:
        """Compare a peer's collectives with this rank's, and answer it."""
        peer, why, lost, state, age_s, count = HEAD.unpack_from(report)
        with self._changed:
            now = self._heard_s[peer] = time.monotonic()
            self._at_work[peer] = now - age_s
            self.paths.theirs[peer] = {}
            for position, entry in unpack(report[HEAD.size : HEAD.size + count * MESSAGE.size]):
                self.paths.hear(peer, position, entry)
            if self._failure is None:
                if lost >= 0:
                    self._lose(lost, state, self.paths.end - 1)
                elif why == ASKS and now - self._told_s > CHECK_S / 4:
                    self._report()
            self._changed.notify_all()
            self._compare()

    def wake(self) -> None:
        """The left neighbour is gone: let a rank that waits to hear who ended go on."""
        with self._changed:
            self._changed.notify_all()

    def _compare(self) -> None:
        """Fail if ranks differ, once all have said where they are or have had the time to."""
        position = self.paths.difference
        if position is None or self._failure is not None:
            return
        now = time.monotonic()
        if self._diverged_at is None:
            self._diverged_at = now
            self._report(ASKS)
        if not self._missing(position) or now - self._diverged_at > GRACE_S:
            self._fail(self.paths.diverged(position))

    def _missing(self, position: int) -> list[int]:
        return sorted(rank for rank, log in self.paths.theirs.items() if position not in log)

    def _lose(self, rank: int, state: int, position: int) -> None:
        """Fail because ``rank`` is lost."""
        waited_s = None if self._wait is None or state == ENDED else self._wait.waited_s
        self._fail(self.paths.lost([rank], position, state, waited_s), rank, state)

    def _fail(self, failure: RuntimeError, lost: int = -1, state: int = ENDED) -> None:
        """From now on raise ``failure``. End this rank's waiting, so that it does."""
        self._failure = failure
        self._report(TELLS, lost, state)
        self._changed.notify_all()
        if self._is_sharing:
            self._abort()
        if self._waiting is not None:
            self._ring.close(0.0 if lost == self._ring.right else GRACE_S)

    def _report(self, why: int = TELLS, lost: int = -1, state: int = ENDED) -> None:
        self._sent_s = time.monotonic()
        if why != LIVES:
            self._told_s = self._sent_s
        self._ring.send(_packed(self.paths, why, lost, state))


def _packed(paths: Paths, why: int, lost: int = -1, state: int = ENDED) -> bytes:
    now = time.monotonic()
    body = b"".join(entry.packed(position) for position, entry in paths.own.items())
    return HEAD.pack(paths.rank, why, lost, state, now - (last_at_work() or now), len(paths.own)) + body


def _receive(ring: Ring, to_reports: weakref.ref[Reports]) -> None:
    while report := ring.receive():
        if (reports := to_reports()) is not None:
            reports.receive(report)
        del reports
    if (reports := to_reports()) is not None:
        reports.wake()
    del reports
    ring.stop.wait()
    ring.drain()


def _check(ring: Ring, to_reports: weakref.ref[Reports]) -> None:
    while not ring.stop.wait(CHECK_S) and (reports := to_reports()) is not None:
        reports.check()
        del reports


def _leave(ring: Ring, paths: Paths) -> None:
    """The model is no more, or the interpreter ends."""
    ring.send(_packed(paths, LEAVES))
    ring.stop.set()


def _end(to_ring: weakref.ref[Ring]) -> None:
    """The group is no more, or the interpreter ends."""
    if (ring := to_ring()) is not None:
        ring.abort()
