"""Name the collectives between ranks, and record a trace: spans of time with a kind and a name.

Whoever computes a unit, or starts a collective and waits for it, calls `begin` and `end`. They cost nothing
while no trace is open. Times are those of ``time.perf_counter``. On an accelerator a moment is an event in
the compute stream, so a span begins when the device reaches it, not the host. A collective ends at an event
in its own stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
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


# Globals, since every unit of every step uses them: `Movement.GATHER` takes ten times as long (Python 3.11).
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


# Process-wide like open meters, since backward runs in other threads.
opened: list[Trace] = []


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
