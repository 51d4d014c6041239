"""The guard over gloo: ranks that wait too long report their collectives, and compare.

The tag of a message holds its collective's position and a hash of this rank's path up to it, so messages of
different collectives do not match: ranks on different paths wait for each other. That costs nothing while
all goes well. A rank that has waited for ``STALL_S`` seconds sends the others its latest collectives, and
they answer with theirs::

    rank 0   ... 7 gathering layer1   8 gathering layer2   waits    reports 0 to 8
    rank 1   ... 7 gathering layer2                        waits    reports 0 to 7: they differ at 7

One thread per peer receives its reports, and learns from its connection that the peer has ended. A single
thread that receives from any rank would not: gloo does not wake it when connections close. Since threads
answer, a rank that computes answers, too. The others wait for it as long as it works (`GuardedWait`,
`Activity`), at most ten times the time-out. A stopped rank does not answer, and one that neither waits nor
works is named. Ranks that share memory wait for one another by `Signals`, under the same guard.

A rank that fails reports why, and closes its connections before it raises. Otherwise payloads under way could
arrive in memory that the failing step has freed.
"""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
import torch.distributed as dist

from shardtrain.comm.activity import GUARD, Activity
from shardtrain.comm.backends import living, time_out_s
from shardtrain.comm.guard import MESSAGE, Guard, Paths, named
from shardtrain.comm.messages import FOREVER, report_tag
from shardtrain.comm.trace import Movement
from shardtrain.errors import Diverged, PeerLost

CHECK_S = 0.2  # the interval at which a rank checks how long it has waited
STALL_S = 1.0  # the wait after which it asks for reports
GRACE_S = 2.0  # the time for the others to report, once ranks are known to differ
MOST = 10  # times the time-out: the longest wait, even for a rank at work
# The reason; the rank that the sender has lost (-1: none), and in which state; whether the sender waits for
# ranks; the seconds since it, or a rank that it waits for, was at work; the number of its collectives.
HEAD = struct.Struct("<iii?di")
# LEAVES: the sender has dropped the model. DIFFERS: some ranks differ, and all are asked to report.
TELLS, ASKS, LEAVES, DIFFERS = range(4)
# Why a rank is lost, and how the error says so of one rank and of several.
ENDED, SILENT, ELSEWHERE, IDLE, LATE = range(5)
_STATES = (
    ("has ended", "have ended"),
    ("does not answer", "do not answer"),
    ("waits elsewhere", "wait elsewhere"),
    ("does nothing", "do nothing"),
    ("is still at work", "are still at work"),
)
_A_MOMENT = datetime.timedelta(milliseconds=20)


class GuardedWait:
    """A wait of this rank for others. Each of these has been seen at work since ``at_work``.

    A rank that waits for nobody reports when it was last seen at work (`Activity`). A rank that waits reports
    when those that it waits for were. So ranks that wait for one another (with two models, for example), or
    for a rank that does nothing, fail at the time-out::

        rank 0 waits for rank 1, which waits for rank 2, which computes      both continue to wait
        rank 0 waits for rank 1, which waits for rank 0                      both fail
        rank 0 waits for rank 1, which waits for rank 2, which reads a pipe  both fail, and name rank 2
    """

    def __init__(self, position: int) -> None:
        self.position = position
        self.since = time.monotonic()
        self.at_work = self.since
        self.is_logged = False  # whether the log says that the wait exceeds the time-out

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


# Long waits. Process-wide like open meters: backward runs in other threads, and the rank that one model waits
# for may wait for this rank with another model.
_waits: set[GuardedWait] = set()


class Links:
    """The connections for reports between this rank and its ``peers``. May outlive the model, see `leave`."""

    def __init__(self, group: dist.ProcessGroup, tag: int, paths: Paths) -> None:
        self.peers = [*paths.theirs]
        self._paths = paths
        self.group = weakref.ref(group)
        self._tag = tag  # of a report's head; the two after it: of the pulse, and of a report's rest
        self._activity = Activity()
        self._process = os.getpid()
        self._sent: dict[int, deque[dist.Work]] = {peer: deque(maxlen=32) for peer in self.peers}
        # Receives that never complete, through which `close` reaches gloo once the group is destroyed.
        self._pulses = [group.recv([torch.empty(1)], peer, tag + 1) for peer in self.peers]
        self._closing = threading.Lock()
        self._stop = threading.Event()  # this rank has dropped the model, or the group is destroyed
        self._threads: list[threading.Thread] = []
        _open_links.add(self)
        weakref.finalize(group, _end, weakref.ref(self))

    def _is_forked(self) -> bool:
        """Return whether this process is a child of the rank: it has neither these threads nor gloo's."""
        return os.getpid() != self._process

    def require_rank(self) -> None:
        """Raise RuntimeError in a process that was forked from the rank."""
        if self._is_forked():
            raise RuntimeError(
                f"this process was forked from rank {self._paths.rank} and has no connections to other "
                "ranks: sharded models and collectives work in the rank itself only"
            )

    def start(self, reports: Reports) -> None:
        """Start the threads."""
        known = weakref.ref(reports)
        tasks = [partial(self._check, known), *(partial(self._listen, known, peer) for peer in self.peers)]
        for task in tasks:
            self._threads.append(threading.Thread(target=task, name=GUARD, daemon=True))
            self._threads[-1].start()

    def _check(self, known: weakref.ref[Reports]) -> None:
        while not self._stop.wait(CHECK_S) and (reports := known()) is not None:
            reports.check()
            del reports

    def _listen(self, known: weakref.ref[Reports], peer: int) -> None:
        """Receive reports until the peer has left or ended; then wait until this rank's own have arrived."""
        why = TELLS
        arriving = deque[tuple[torch.Tensor, dist.Work]]()
        while why != LEAVES:
            report = self._next(peer, arriving)
            why = HEAD.unpack_from(report)[0] if report else LEAVES
            if (reports := known()) is not None:
                reports.receive(peer, report)
            del reports
        self._stop.wait()
        with suppress(RuntimeError, IndexError):
            while True:
                self._sent[peer].popleft().wait(FOREVER)

    def _next(self, peer: int, arriving: deque[tuple[torch.Tensor, dist.Work]]) -> bytes:
        """Return the next report of ``peer``; empty once the connection is closed, by either side."""
        try:
            while len(arriving) < 4:  # so that reports arrive while this rank handles another
                memory = torch.empty(HEAD.size, dtype=torch.uint8)
                arriving.append((memory, living(self.group).recv([memory], peer, self._tag)))
            memory, work = arriving.popleft()
            work.wait(FOREVER)
            head = memory.numpy().tobytes()
            # Memory for the rest only now: with many peers it would be as large as a shard.
            *_, collectives = HEAD.unpack(head)
            rest = torch.empty(collectives * MESSAGE.size, dtype=torch.uint8)
            if len(rest):
                living(self.group).recv([rest], peer, self._tag + 2).wait(FOREVER)
            return head + rest.numpy().tobytes()
        except (RuntimeError, ValueError):
            return b""

    def send(self, why: int, lost: int = -1, state: int = ENDED, to: Sequence[int] | None = None) -> None:
        """Send this rank's latest collectives to the peers ``to``; None: to all but ``lost``."""
        group = self.group()
        if group is None or self._is_forked():
            return
        path = self._paths.own
        waits = [*_waits]
        # When this process, or a process that it waits for, was last known to be at work.
        at_work = min((wait.at_work for wait in waits), default=time.monotonic())
        if why in (TELLS, ASKS) and not waits:
            at_work = self._activity.last_s(time_out_s(group) / 16)
        head = HEAD.pack(why, lost, state, bool(waits), time.monotonic() - at_work, len(path))
        rest = b"".join(entry.pack(position) for position, entry in path.items())
        for tag, data in [(self._tag, head), (self._tag + 2, rest)] if rest else [(self._tag, head)]:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for peer in self.peers if to is None else to:
                with suppress(RuntimeError):
                    if peer != lost:
                        self._sent[peer].append(group.send([tensor], peer, tag))

    def close(self, lost: int = -1) -> None:
        """Wait up to ``GRACE_S`` until the last reports are sent; then close all connections.

        A second thread that closes waits, too, or it would cut off these reports. None goes to ``lost``.
        Once this rank has left, it waits for ``CHECK_S`` only: a peer whose group is gone receives nothing.
        """
        if self._is_forked():
            return
        with self._closing:
            deadline = time.monotonic() + (CHECK_S if self._stop.is_set() else GRACE_S)
            self._sent.get(lost, deque()).clear()
            for sent in self._sent.values():
                with suppress(RuntimeError, IndexError):
                    while True:
                        left = max(0.001, deadline - time.monotonic())
                        sent.popleft().wait(datetime.timedelta(seconds=left))
                sent.clear()  # what has failed would keep gloo's threads alive
            for pulse in self._pulses:
                with suppress(RuntimeError):
                    pulse.wait(_A_MOMENT)  # at a time-out gloo closes all connections

    def leave(self) -> None:
        """Report that this rank has dropped the model. Its threads end when all peers have done so."""
        self.send(LEAVES)
        self._stop.set()

    def end(self) -> None:
        """Close all connections, which ends the threads, and release what keeps gloo's threads alive."""
        self._stop.set()
        if self._is_forked():
            return
        self.close()
        self._pulses.clear()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5 * GRACE_S)  # a thread that outlived the interpreter would abort the process


def _end(known: weakref.ref[Links]) -> None:
    if (links := known()) is not None:
        links.end()


_open_links = weakref.WeakSet[Links]()


@atexit.register
def _end_all() -> None:
    """Close all links when the interpreter exits, and wait for all guards' threads.

    A thread may hold the last reference to its links, or to a destroyed group. It then releases receives, for
    which torch lets go of Python's lock. If the interpreter ends meanwhile, C++ aborts the process.
    """
    for links in [*_open_links]:
        links.end()
    for thread in threading.enumerate():
        if thread.name == GUARD:
            thread.join(5 * GRACE_S)


def _agree_on_number(group: dist.ProcessGroup) -> int:
    """Return a random number of 24 bits, rank 0's. Collective.

    DistributedDataParallel begins with the same collective, so torch names a rank that makes one instead.
    """
    own = torch.tensor([int.from_bytes(os.urandom(3), "big")], device="cpu")
    numbers = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(numbers, own, group=group)
    return int(numbers[0])


class Reports(Guard):
    """The guard over gloo: what this rank waits for, and what others have reported. All ranks make it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        number = _agree_on_number(group)
        peers = [rank for rank in range(group.size()) if rank != group.rank()]
        self._changed = threading.Condition()  # guards all attributes below
        super().__init__(Paths(group.rank(), peers))
        self.paths.digest = number  # in all tags, so that messages of two models never match
        # The last one is what this rank waits for: a wait may contain another.
        self._open: list[GuardedWait] = []
        self._asked_s = 0.0  # when this rank last asked where the others are
        self._heard_s = dict.fromkeys(peers, 0.0)  # when each peer last reported
        self._at_work = dict.fromkeys(peers, 0.0)  # when each peer was last known to be at work
        self._waiters: set[int] = set()  # peers that wait for ranks themselves
        self._left: set[int] = set()  # peers that have dropped the model
        self._ended: set[int] = set()  # peers whose connections are closed
        self._diverged_at: float | None = None  # when it became known that ranks differ
        self._failure: RuntimeError | None = None
        self._lost = -1  # the rank that caused the failure, if one did
        self.abort: Callable[[], object] = lambda: None  # ends all waits by `Signals`, here and for this rank
        self._links = Links(group, report_tag(self.paths.digest), self.paths)
        self._links.start(self)
        weakref.finalize(self, self._links.leave)

    @property
    def _waiting(self) -> GuardedWait | None:
        return self._open[-1] if self._open else None

    def post(self, kind: Movement, name: str) -> int:
        self._links.require_rank()
        with self._changed:
            position = self.paths.add(kind, name)
            self._compare()
            # A rank continues until it reaches the position at which others differ: its path is needed, too.
            if self._diverged_at is not None and position >= (self.paths.difference or 0):
                self._links.send(TELLS)
                self._changed.wait_for(lambda: self._failure is not None, 2 * GRACE_S)
        self._raise_failure()
        return position

    @contextmanager
    def waiting(self, position: int) -> Iterator[None]:
        """Watch the block. Raises `Diverged` or `PeerLost`, also in place of the block's own RuntimeError."""
        with self._changed:
            wait = GuardedWait(position)
            self._open.append(wait)
        self._raise_failure()
        try:
            yield
        except RuntimeError as error:
            self.fail(position, error)
            raise
        finally:
            with self._changed:
                self._open.remove(wait)
                _waits.discard(wait)

    def fail(self, position: int, error: RuntimeError, ended: Sequence[int] = ()) -> None:
        """Raise the cause of ``error``, a broken connection for example. Return if this guard knows of none.

        It is `Diverged` if ranks differ at ``position`` or before. ``ended``: ranks whose sockets are closed.
        """

        def is_known() -> bool:
            # A rank may have ended because ranks differ, which this rank will soon learn.
            return self._failure is not None or (bool(self._ended) and self._diverged_at is None)

        with self._changed:
            if isinstance(error, Diverged):
                self._differ()
            self._links.send(TELLS)
            self._changed.wait_for(is_known, GRACE_S + 1)
            if self._failure is None:
                if isinstance(error, Diverged):
                    self._fail(error)
                elif "timed out" in str(error).lower() or "timeout" in str(error).lower():
                    # This wait timed out, or another one did, at which gloo ends all of them.
                    self._lose(self._missing(position) or self._links.peers, SILENT, position)
                elif lost := sorted(self._ended) or ended:
                    self._lose(lost, ENDED, position)
        self._raise_failure(error)

    def _raise_failure(self, cause: RuntimeError | None = None) -> None:
        if self._failure is not None:
            self._end_waits()
            raise type(self._failure)(str(self._failure)) from cause

    def _end_waits(self) -> None:
        """Close all connections once the last reports are out, and so end this rank's waits.

        Not to be called by a thread that listens, nor inside the lock that it takes: meanwhile it receives
        the last reports of ranks that fail, too. Else each would wait until ``GRACE_S`` is over.
        """
        self._links.close(self._lost)
        self.abort()

    # Called by the threads:

    def check(self) -> None:
        """Check this rank's wait, and end its waits once it has failed."""
        with self._changed:
            self._compare()
            self._check_wait()
            must_end = self._failure is not None and self._waiting is not None
        if must_end:
            self._end_waits()

    def _check_wait(self) -> None:
        """Ask for reports if this rank has waited for long; fail if it has waited for too long."""
        wait = self._waiting
        now_s = time.monotonic()
        group = self._links.group()
        if self._failure is not None or wait is None or group is None:
            return
        limit_s = time_out_s(group)
        if wait.seconds < min(STALL_S, limit_s / 8):
            return
        _waits.add(wait)
        if self._asked_s < wait.since or now_s - self._asked_s > limit_s / 8:
            self._asked_s = now_s
            self._links.send(ASKS)
        missing = self._missing(wait.position) or self._links.peers
        wait.at_work = max(wait.at_work, min(self._at_work[rank] for rank in missing))
        if (left := self._left.intersection(missing)) and self._diverged_at is None:
            self._lose(sorted(left), ENDED, wait.position)
        elif now_s - wait.at_work > limit_s or wait.seconds > MOST * limit_s:
            self._give_up(wait, missing, limit_s)
        elif wait.seconds > limit_s and now_s - wait.at_work < limit_s / 2 and not wait.is_logged:
            wait.is_logged = True
            where = self.paths.where(wait.position)
            text = "rank %d has waited %.0f s at %s for %s"
            facts = self.paths.rank, wait.seconds, where, named(missing)
            logging.getLogger("shardtrain").warning(f"{text}, still at work: it keeps waiting", *facts)

    def _give_up(self, wait: GuardedWait, missing: Sequence[int], limit_s: float) -> None:
        """Fail because of the ranks that do not answer, that do nothing, or that have worked for too long."""
        now_s = time.monotonic()
        recent = now_s - limit_s / 2
        silent = [rank for rank in self._heard_s if max(self._heard_s[rank], wait.since) < recent]
        others = [rank for rank in missing if rank not in self._waiters]
        idle = [rank for rank in others if self._at_work[rank] < recent]
        if silent:
            self._lose(silent, SILENT, wait.position)
        elif idle:
            self._lose(idle, IDLE, wait.position)
        elif others and wait.seconds > MOST * limit_s:
            self._lose(others, LATE, wait.position)
        else:
            elsewhere = [rank for rank in missing if rank in self._waiters]
            self._lose(elsewhere or missing, ELSEWHERE, wait.position)

    def receive(self, peer: int, report: bytes) -> None:
        """Take in a peer's report, and answer it. An empty one means that the connection is closed."""
        with self._changed:
            if not report:
                self._ended.add(peer)
            elif self._failure is None:
                now_s = time.monotonic()
                self._heard_s[peer] = now_s
                why, lost, state, waits, age_s, _ = HEAD.unpack_from(report)
                self._at_work[peer] = now_s - age_s
                (self._waiters.add if waits else self._waiters.discard)(peer)
                self.paths.hear(peer, report[HEAD.size :])
                if lost >= 0:
                    # What this rank waits for, where it waits: later collectives may have been started.
                    wait = self._waiting
                    self._lose([lost], state, self.paths.end - 1 if wait is None else wait.position)
                elif why == ASKS:
                    self._links.send(TELLS, to=[peer])
                elif why == LEAVES:
                    self._left.add(peer)
                elif why == DIFFERS:
                    self._differ()
                self._compare()
            self._changed.notify_all()

    def _differ(self) -> None:
        """Tell all ranks that some differ. Otherwise a rank that fails because of it would look dead."""
        if self._diverged_at is None:
            self._diverged_at = time.monotonic()
            self._links.send(DIFFERS)

    def _compare(self) -> None:
        """Fail if ranks differ, once all have reported or ``GRACE_S`` has passed."""
        position = self.paths.difference
        if position is None or self._failure is not None:
            return
        self._differ()
        is_complete = position in self.paths.own and not self._missing(position)
        if is_complete or time.monotonic() - (self._diverged_at or 0) > GRACE_S:
            self._fail(self.paths.diverged(position))

    def _missing(self, position: int) -> list[int]:
        return sorted(rank for rank, log in self.paths.theirs.items() if position not in log)

    def _lose(self, ranks: Sequence[int], state: int, position: int) -> None:
        """Fail because ``ranks`` are lost."""
        wait = self._waiting
        was = "was"
        if wait is not None and wait in _waits and state != ENDED:
            was = f"has waited {wait.seconds:.0f} s"
        verb = _STATES[state][len(ranks) > 1]
        where = self.paths.where(position)
        text = f"{named(ranks)} {verb}: rank {self.paths.rank} {was} at {where}"
        if state in (ENDED, ELSEWHERE):
            text += self.paths.hint_of_fewer(position)
        self._fail(PeerLost(text), ranks[0], state)

    def _fail(self, failure: RuntimeError, lost: int = -1, state: int = ENDED) -> None:
        """Store ``failure``, which all waits raise from now on, and report it; `check` ends the waits."""
        self._failure = failure
        self._lost = lost
        self._links.send(TELLS, lost, state)
        self._changed.notify_all()
