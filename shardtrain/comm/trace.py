"""Name the collectives between ranks, count what they send, and record spans of time.

A collective is counted under its own name whatever carried it: a gather built from point-to-point messages is
one ``all_gather``. N ranks gathering K bytes in all send (N-1)/N * K bytes each.

Communication that computation does not hide is *exposed*: the time from asking for a collective's result
until it is there, on the CPU with the summation. On an accelerator it is the time for which the compute
stream waits, measured by events, so that the host does not wait.

Whoever computes a unit, or starts a collective and waits for it, calls `begin` and `end`. On an accelerator a
moment is an event in the compute stream, so a span begins when the device reaches it, not the host. A
collective ends at an event in its own stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch

from shardtrain import device as devices


class Movement(Enum):
    """List what ranks do together: collectives, barriers, and steps of the optimizer.

    ``counted``: the key in `Meter`, as torch calls it. ``traced``: the kind of its span in a `Trace`; empty
    if it has none. ``doing``: the verb in the guard's errors. ``number``: its code in the guard's messages.
    """

    GATHER = "all_gather", "gather", "gathering"
    REDUCE = "reduce_scatter", "reduce", "reducing"
    AVERAGE = "all_reduce", "", "averaging"  # across replicas, as part of a reduction
    ALL_REDUCE = "all_reduce", "", "all-reducing"
    BROADCAST = "broadcast", "", "broadcasting"
    ALL_TO_ALL = "all_to_all", "", "exchanging"
    ENTER = "fence", "", "entering"
    LEAVE = "fence", "", "leaving"
    STEP = "fence", "", "stepping"  # the optimizer, since the last forward
    SHARE = "", "", "sharing"  # memory, between the ranks of a host

    def __init__(self, counted: str, traced: str, doing: str) -> None:
        self.counted, self.traced, self.doing = counted, traced, doing
        self.number = len(type(self).__members__)


# Module-level names, since every unit uses them in every step: `Movement.GATHER` takes ten times as long.
MOVEMENTS = tuple(Movement)
GATHER, REDUCE, AVERAGE, ALL_REDUCE, BROADCAST, ALL_TO_ALL, ENTER, LEAVE, STEP, SHARE = Movement


class Span(NamedTuple):
    """Hold one span. ``start``, ``end``: seconds of ``time.perf_counter`` on this rank.

    ``kind``: ``forward``, ``backward``: a unit computes. ``gather``, ``reduce``: a collective is under way.
    ``wait``: the rank waits. ``step``, ``phase``: named by the program.
    """

    kind: str
    name: str
    start: float
    end: float


class Trace:
    """Hold the spans that began and ended while the trace was open; see `begin` and `end`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        devices.synchronize(device)
        self._zero, self._zero_s = devices.moment(device), time.perf_counter()
        self.begun: dict[tuple[str, str], Any] = {}  # by kind and name, the moments of begin
        self.noted: list[tuple[str, str, Any, Any]] = []

    def spans(self) -> list[Span]:
        """Return all ended spans, ordered by start."""
        spans = [
            Span(kind, name, *(self._zero_s + devices.seconds(self._zero, at) for at in (start, end)))
            for kind, name, start, end in self.noted
        ]
        return sorted(spans, key=lambda span: span.start)


class Wait(NamedTuple):
    """Name a wait: the collective's kind as it is counted, the unit, and `Meter.during` at that time."""

    kind: str
    unit: str
    during: str = ""


class Meter:
    """Hold this rank's traffic while the meter is open.

    ``calls[kind]``, ``bytes[kind]``: collectives and bytes sent, for kinds such as ``"all_gather"``: see
    `Movement.counted`. ``during``: what its owner is doing, by which waits are grouped.
    """

    def __init__(self) -> None:
        self.calls, self.bytes = Counter[str](), Counter[str]()
        self.during = ""
        self._seconds: dict[Wait, float] = {}
        self._moments: list[tuple[Wait, Any, Any]] = []  # begins and ends not yet added to the seconds

    def exposed(self) -> dict[Wait, float]:
        """Return seconds of exposed communication. The host waits for an accelerator."""
        for what, start, end in self._moments:
            self._seconds[what] = self._seconds.get(what, 0.0) + devices.seconds(start, end)
        self._moments.clear()
        return self._seconds


# Process-wide, since `meter()` takes no argument, and backward runs in other threads: neither an engine nor a
# context variable can hold them.
opened: list[Trace] = []
_meters: list[Meter] = []
_NOTHING = nullcontext()


@contextmanager
def record(device: torch.device) -> Iterator[Trace]:
    """Record spans on ``device`` inside the ``with`` block."""
    current = Trace(device)
    opened.append(current)
    try:
        yield current
    finally:
        opened.remove(current)


def begin(kind: str, name: str) -> None:
    """Begin a span now. An open one of the same kind and name is dropped."""
    for current in opened:
        current.begun[kind, name] = devices.moment(current.device)


def end(kind: str, name: str, ended: Any = None) -> None:
    """End a span now, or at the moment ``ended``, if it began while the trace was open."""
    for current in opened:
        start = current.begun.pop((kind, name), None)
        if start is not None:
            current.noted.append((kind, name, start, ended or devices.moment(current.device)))


@contextmanager
def meter() -> Iterator[Meter]:
    """Count every collective of this process inside the ``with`` block. Meters may be nested."""
    current = Meter()
    _meters.append(current)
    try:
        yield current
    finally:
        _meters.remove(current)


def count(movement: Movement, sent: Iterable[int]) -> None:
    """Count one ``movement`` in which this rank sends ``sent`` bytes. Sums them only if a meter is open."""
    if not _meters:
        return
    total = sum(sent)
    for current in _meters:
        current.calls[movement.counted] += 1
        current.bytes[movement.counted] += total


def waiting(
    movement: Movement, unit: str, device: torch.device, ended: Any = None
) -> AbstractContextManager[None]:
    """Count the block as a wait on ``device`` for a collective of ``unit``, unless it raises.

    ``ended``: the moment at which the collective ends, if that differs from the block's end: see `Pending`.
    """
    return _recorded(movement, unit, device, ended) if _meters or opened else _NOTHING


@contextmanager
def _recorded(movement: Movement, unit: str, device: torch.device, ended: Any) -> Iterator[None]:
    start = devices.moment(device)
    yield
    stop = devices.moment(device)
    for metering in _meters:
        metering._moments.append((Wait(movement.counted, unit, metering.during), start, stop))
        if isinstance(start, float):  # add at once, since a meter may be open for a whole run
            metering.exposed()
    for current in opened:
        current.noted.append(("wait", f"{movement.counted} of {unit}", start, stop))
    end(movement.traced, unit, ended)
