"""Which part of a step takes how long: seconds by phase, from the marks that the loop sets.

Only one phase is on at a time. One inside another interrupts it: reading images within a step is `data`
alone. On CUDA marks are events in the compute stream, so that launching a forward is not taken for one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from shardtrain import comm
from shardtrain.comm import trace
from shardtrain.comm.trace import Moment, moment, seconds

DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT = "data", "forward", "backward", "optimizer", "checkpoint"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT)
NONE = ""  # between steps


class Times(NamedTuple):
    """Seconds of one rank: what it did itself, by phase, and what it waited for others meanwhile."""

    busy: dict[str, float]
    waited: float


class Phases:
    """The stopwatch of one rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._now = NONE
        self._marks: list[tuple[str, Moment]] = []  # what began when
        self._meters: list[comm.Meter] = []

    @contextlib.contextmanager
    def step(self) -> Iterator[comm.Meter]:
        """One step, and its traffic. What no `phase` inside it says otherwise belongs to the optimizer."""
        with comm.meter() as traffic:
            self._meters.append(traffic)
            trace.begin("step", "step")
            with self.phase(OPTIMIZER):
                yield traffic
            trace.end("step", "step")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block, part of a step, belongs to ``name``; what was on before goes on afterwards."""
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
        self._marks.append((name, moment(self._device)))

    def take(self) -> Times:
        """The times since the last call; to be called between steps."""
        assert self._now == NONE
        spent, waits = Counter[str](), Counter[str]()
        for (name, start), (_, end) in pairwise(self._marks):
            spent[name] += seconds(start, end)  # type: ignore[assignment]
        for meter in self._meters:
            waits.update(meter.exposed_during())  # type: ignore[arg-type]
        self._marks.clear()
        self._meters.clear()
        busy = {phase: max(0.0, float(spent[phase] - waits[phase])) for phase in PHASES}
        return Times(busy, float(waits.total()))


# Which rank is slower than the others, and in what.
#
# Step times do not tell: the ranks wait for one another, so all steps take as long as the slowest rank's.
# What
# a rank does itself, without what it waits for others, does::
#
#     rank      data  forward  backward  optimizer    busy     of the others
#     0          1.0     30.0      60.0        3.0    94.0 ms
#     1         41.0     30.0      61.0        3.0   135.0 ms  + 42 %, most of it in data
#     2          1.0     31.0      60.0        3.0    95.0 ms

MARGIN = 0.20  # of what the others take
LEAST_S = 0.005  # of a step

HELP = {
    "data": "its disk, its loader's workers, its share of the cores",
    "forward": "its cores or device: clocks, temperature, other programs",
    "backward": "its cores or device: clocks, temperature, other programs",
    "optimizer": "its memory: paging, other programs",
    "checkpoint": "its disk",
}


class Slow(NamedTuple):
    """The slowest of several ranks; seconds of a step. ``others_s``: the median of the others."""

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
            f"rank {self.rank} is slow: busy {1e3 * self.busy_s:.1f} ms a step, the others "
            f"{1e3 * self.others_s:.1f} ms ({self.excess_pct:+.0f} %), most of it in {self.phase} "
            f"({1e3 * self.phase_excess_s:+.1f} ms); look at {HELP[self.phase]}"
        )


def slowest(busy: Sequence[Mapping[str, float]]) -> Slow | None:
    """The rank that is busy longest, of ``busy[rank][phase]`` in seconds a step; a single rank is none."""
    if len(busy) < 2:
        return None
    totals = [sum(row.values()) for row in busy]
    rank = max(range(len(busy)), key=totals.__getitem__)
    others = [row for other, row in enumerate(busy) if other != rank]
    excess = {phase: value - median(row[phase] for row in others) for phase, value in busy[rank].items()}
    phase = max(excess, key=excess.__getitem__)
    others_s = median(total for other, total in enumerate(totals) if other != rank)
    return Slow(rank, totals[rank], others_s, phase, excess[phase])
