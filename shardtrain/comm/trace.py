"""When things happen on this rank: spans of time with a kind and a name, noted while a trace is open.

A rank computes units, asks for movements, waits for them; each says so here by `begin` and `end`. With no
trace open that is a look at an empty list. Times are those of ``time.perf_counter``. On CUDA a moment is an
event in the compute stream, so a span lasts from when the device came there, and not the host.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from shardtrain.comm.movement import GATHER, REDUCE

Moment = float | torch.cuda.Event

# forward, backward: a unit computes. gather, reduce: from asking for a movement to having its result.
# wait: nothing else is done meanwhile. phase: what the program says it is doing.
KINDS = ("step", "phase", "forward", "backward", GATHER.traced, REDUCE.traced, "wait")


class Span(NamedTuple):
    """``kind``: of ``KINDS``. ``start``, ``end``: seconds of ``time.perf_counter`` on this rank."""

    kind: str
    name: str
    start: float
    end: float


def moment(device: torch.device) -> Moment:
    """This moment, as it passes on ``device``."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Moment, end: Moment) -> float:
    """From ``start`` to ``end``. On CUDA the host waits for the device here."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    assert isinstance(start, float), start
    assert isinstance(end, float), end
    return end - start


class Trace:
    """The spans that began and ended while the trace was open."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._zero, self._zero_s = moment(device), time.perf_counter()
        self._begun: dict[tuple[str, str], Moment] = {}
        self._noted: list[tuple[str, str, Moment, Moment]] = []

    def begin(self, kind: str, name: str) -> None:
        self._begun[kind, name] = moment(self.device)

    def end(self, kind: str, name: str) -> None:
        start = self._begun.pop((kind, name), None)
        if start is not None:
            self._noted.append((kind, name, start, moment(self.device)))

    def note(self, kind: str, name: str, start: Moment, end: Moment) -> None:
        self._noted.append((kind, name, start, end))

    def spans(self) -> list[Span]:
        """All that have ended, by their start."""
        found = [
            Span(kind, name, *(self._zero_s + seconds(self._zero, at) for at in (start, end)))
            for kind, name, start, end in self._noted
        ]
        return sorted(found, key=lambda span: span.start)


# Process-wide for the reason that open meters are: backward runs in other threads.
_open: list[Trace] = []


@contextmanager
def record(device: torch.device) -> Iterator[Trace]:
    """Note what happens on ``device`` inside the ``with`` block."""
    current = Trace(device)
    _open.append(current)
    try:
        yield current
    finally:
        _open.remove(current)


def begin(kind: str, name: str) -> None:
    """A span begins now; one of the same kind and name that has not ended is forgotten."""
    for current in _open:
        current.begin(kind, name)


def end(kind: str, name: str) -> None:
    """The span ends now; without a beginning since the trace was opened it is none."""
    for current in _open:
        current.end(kind, name)


def note(kind: str, name: str, start: Moment, end: Moment) -> None:
    """A span that has ended."""
    for current in _open:
        current.note(kind, name, start, end)


def is_open() -> bool:
    """Whether anything is noted."""
    return bool(_open)
