"""The movements between ranks by their names, and a trace: spans of time with a kind and a name.

A rank computes units, starts movements and waits for them; each says so here by `begin` and `end`. With no
trace open that is a look at an empty list. Times are those of ``time.perf_counter``. On an accelerator a
moment is an event in the compute stream, so a span lasts from when the device came there, and not the host. A
collective ends at an event in its own stream.
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
    """What ranks do together.

    ``counted``: its key in `Meter`, as torch calls it. ``traced``: the kind of its span in a `Trace`; empty
    where it has none of its own. ``doing``: what the guard says that a rank is doing. ``number``: stands for
    it in the guard's messages.
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


# Every unit of every step makes some: on Python 3.11 `Movement.GATHER` takes ten times as long as a global.
MOVEMENTS = tuple(Movement)
GATHER, REDUCE, AVERAGE, ALL_REDUCE, BROADCAST, ALL_TO_ALL, ENTER, LEAVE, STEP, SHARE = Movement


class Span(NamedTuple):
    """``start``, ``end``: seconds of ``time.perf_counter`` on this rank. ``kind``: what happens between them.

    ``forward``, ``backward``: a unit computes. ``gather``, ``reduce``: a movement is under way, until its
    result is there. ``wait``: nothing else is done meanwhile. ``step``, ``phase``: as the program says.
    """

    kind: str
    name: str
    start: float
    end: float


class Trace:
    """The spans that began and ended while the trace was open; see `begin` and `end`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        devices.synchronize(device)
        self._zero, self._zero_s = devices.moment(device), time.perf_counter()
        self.begun: dict[tuple[str, str], Any] = {}  # the moments
        self.noted: list[tuple[str, str, Any, Any]] = []

    def spans(self) -> list[Span]:
        """Return all that have ended, by their start."""
        spans = [
            Span(kind, name, *(self._zero_s + devices.seconds(self._zero, at) for at in (start, end)))
            for kind, name, start, end in self.noted
        ]
        return sorted(spans, key=lambda span: span.start)


# Process-wide for the reason that open meters are: backward runs in other threads.
opened: list[Trace] = []


@contextmanager
def record(device: torch.device) -> Iterator[Trace]:
    """Record the spans on ``device`` inside the ``with`` block."""
    current = Trace(device)
    opened.append(current)
    try:
        yield current
    finally:
        opened.remove(current)


def begin(kind: str, name: str) -> None:
    """Begin a span now, and forget one of the same kind and name that has not ended."""
    for current in opened:
        current.begun[kind, name] = devices.moment(current.device)


def end(kind: str, name: str, ended: Any = None) -> None:
    """End the span now, or at the moment ``ended``, if it began since the trace was opened."""
    for current in opened:
        start = current.begun.pop((kind, name), None)
        if start is not None:
            current.noted.append((kind, name, start, ended or devices.moment(current.device)))
