"""How long each phase of a step takes, and which rank is slower than the others.

Only one phase runs at a time. A phase inside another interrupts it: loading images within a step is ``data``
alone. On an accelerator marks are events in the compute stream, so launching a forward is not taken for one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from shardtrain import comm, device
from shardtrain.comm import trace

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint")
BETWEEN_STEPS = ""


class Times(NamedTuple):
    """One rank's seconds of own work by phase, its seconds of waiting for others, bytes sent by kind."""

    busy: dict[str, float]
    waited: float
    sent: Counter[str]


class Phases:
    """The stopwatch of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = BETWEEN_STEPS
        self._marks: list[tuple[str, Any]] = []  # phases, and the moments at which they began
        self._meters: list[comm.Meter] = []  # one per step

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time one step and count its traffic. Whatever lies outside a `phase` is the optimizer's."""
        with comm.meter() as meter:
            self._meters.append(meter)
            trace.begin("step", "step")
            try:
                with self.phase("optimizer"):
                    yield
            finally:
                trace.end("step", "step")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block, part of a step, as ``name``; afterwards the phase before it continues."""
        before = self._now
        self._enter(name)
        trace.begin("phase", name)
        try:
            yield
        finally:
            trace.end("phase", name)
            self._enter(before)

    def _enter(self, name: str) -> None:
        self._now = self._meters[-1].during = name
        self._marks.append((name, device.moment(self._device)))

    def take(self) -> Times:
        """Return the times since the last call; to be called between steps."""
        assert self._now == BETWEEN_STEPS
        spent, waits, sent = Counter[str](), Counter[str](), Counter[str]()
        for (name, start), (_, end) in pairwise(self._marks):
            spent[name] += device.seconds(start, end)  # type: ignore[assignment]
        for meter in self._meters:
            waits.update(meter.exposed_during())  # type: ignore[arg-type]
            sent.update(meter.bytes)
        self._marks.clear()
        self._meters.clear()
        busy = {phase: max(0.0, float(spent[phase] - waits[phase])) for phase in PHASES}
        return Times(busy, float(waits.total()), sent)


# Step times do not show which rank is slow: ranks wait for one another, so all steps take as long as the
# slowest rank's. What a rank does itself, without waiting for others, shows it:
#
#     rank      data  forward  backward  optimizer    busy     beyond the others' median
#     0          1.0     30.0      60.0        3.0    94.0 ms
#     1         41.0     30.0      61.0        3.0   135.0 ms  + 42 %, most of it in data
#     2          1.0     31.0      60.0        3.0    95.0 ms

MARGIN = 0.20  # of the others' time
LEAST_S = 0.005  # per step

_COMPUTES = "its cores or device: clocks, temperature, other programs"
HELP = {
    "data": "its disk, its loader's workers, its share of the cores",
    "forward": _COMPUTES,
    "backward": _COMPUTES,
    "optimizer": "its memory: paging, other programs",
    "checkpoint": "its disk",
}


class SlowestRank(NamedTuple):
    """The slowest of several ranks, in seconds per step. ``others_s``: the median of the others."""

    rank: int
    busy_s: float
    others_s: float
    phase: str
    phase_excess_s: float

    @property
    def excess_pct(self) -> float:
        return 100 * (self.busy_s / self.others_s - 1) if self.others_s else 0.0

    @property
    def beyond_margin(self) -> bool:
        return self.busy_s - self.others_s > max(MARGIN * self.others_s, LEAST_S)

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: busy {1e3 * self.busy_s:.1f} ms per step, the others "
            f"{1e3 * self.others_s:.1f} ms ({self.excess_pct:+.0f} %), most of it in {self.phase} "
            f"({1e3 * self.phase_excess_s:+.1f} ms); look at {HELP[self.phase]}"
        )


def slowest(busy: Sequence[Mapping[str, float]]) -> SlowestRank | None:
    """Return the rank that is busy longest, of ``busy[rank][phase]`` in seconds per step; None if alone."""
    if len(busy) < 2:
        return None
    totals = [sum(row.values()) for row in busy]
    rank = max(range(len(busy)), key=totals.__getitem__)
    others = [row for other, row in enumerate(busy) if other != rank]
    excess = {phase: value - median(row[phase] for row in others) for phase, value in busy[rank].items()}
    phase = max(excess, key=excess.__getitem__)
    return SlowestRank(rank, totals[rank], median(sum(row.values()) for row in others), phase, excess[phase])
