"""Which part of a step takes how long: seconds by phase, from the marks that the loop sets.

Only one phase is on at a time. One inside another interrupts it: reading images within a step is `data`
alone. On CUDA marks are events in the compute stream, so that launching a forward is not taken for one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
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
