"""Counts what this rank puts on the wire and how long it waits for others, by the kind of movement.

A movement is counted under its own name whatever carried it: a gather built from point-to-point
messages is one ``all_gather``. Bytes are those this rank sends: N ranks gathering K bytes in all send
(N-1)/N * K bytes each.

A movement that computation hides costs nothing; what is not hidden is *exposed*: the time between asking
for a movement's result and having it. On the CPU that includes adding up what came. On CUDA it is the time
that the compute stream stands still, measured by events, so that the host need not stop.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


class Wait(NamedTuple):
    """What was waited for: a kind of ``KINDS``, or ``fence``; and the unit's name."""

    kind: str
    unit: str


class Meter:
    """This rank's traffic while the meter is open.

    ``calls[kind]``, ``bytes[kind]``: movements and bytes sent, for the kinds in ``KINDS``.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._seconds: defaultdict[Wait, float] = defaultdict(float)
        self._on_device: list[tuple[Wait, torch.cuda.Event, torch.cuda.Event]] = []

    def exposed(self) -> dict[Wait, float]:
        """Seconds of exposed communication by kind and unit. On CUDA the host waits for the device here."""
        for what, start, end in self._on_device:
            end.synchronize()
            self._seconds[what] += start.elapsed_time(end) / 1e3
        self._on_device.clear()
        return dict(self._seconds)


# The one piece of process-wide state: `meter()` takes no argument, and backward runs in other threads,
# so the open meters can live neither in an engine nor in a context variable.
_open: list[Meter] = []


@contextmanager
def meter() -> Iterator[Meter]:
    """Count every movement of this process inside the ``with`` block. Meters may be nested."""
    current = Meter()
    _open.append(current)
    try:
        yield current
    finally:
        _open.remove(current)


def count(kind: str, sent: int) -> None:
    """Add one movement of ``kind`` in which this rank sends ``sent`` bytes."""
    for current in _open:
        current.calls[kind] += 1
        current.bytes[kind] += sent


@contextmanager
def waiting(kind: str, unit: str, device: torch.device) -> Iterator[None]:
    """Count the block as waiting on ``device`` for a movement of ``kind`` of ``unit``."""
    if not _open:
        yield
    elif device.type == "cuda":
        with torch.cuda.device(device):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
        for current in _open:
            current._on_device.append((Wait(kind, unit), start, end))
    else:
        begun = time.perf_counter()
        yield
        for current in _open:
            current._seconds[Wait(kind, unit)] += time.perf_counter() - begun
