"""Memory over one step as numbers, words and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain.job.format import MIB
from shardtrain.job.pictures import Picture, plot
from shardtrain.plan.live import KINDS, LiveTensors

COLORS = ("tab:blue", "tab:cyan", "tab:purple", "tab:orange", "tab:green", "0.7")  # of KINDS
MOST_NAMES = 60  # units that have room along the axis
LONGEST = 20  # characters of a unit's name there; its end is shown


class Point(NamedTuple):
    """After one operation of the step. ``bytes``: of each of KINDS."""

    phase: str
    unit: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.bytes)


class MemoryTimeline(NamedTuple):
    """What one rank held over one step, operation by operation."""

    points: tuple[Point, ...]

    @property
    def peak(self) -> Point:
        return max(self.points, key=lambda point: point.total)

    def most(self, kind: str) -> int:
        """The most bytes of ``kind`` at any point."""
        index = KINDS.index(kind)
        return max(point.bytes[index] for point in self.points)

    def words(self) -> str:
        """``The peak of 93.1 MiB, in backward of layer4.1, consists of 42.6 MiB parameters, …``"""
        peak = self.peak
        parts = sorted(zip(peak.bytes, KINDS, strict=True), reverse=True)
        held = [f"{size / MIB:.1f} MiB {kind}" for size, kind in parts if size >= MIB / 20]
        listed = f"{', '.join(held[:-1])} and {held[-1]}" if len(held) > 1 else held[0]
        where = peak.phase if peak.phase == "update" else f"{peak.phase} of {peak.unit}"
        return f"The peak of {peak.total / MIB:.1f} MiB, in {where}, consists of {listed}."

    def stretches(self) -> list[tuple[str, str, int]]:
        """Phase, unit and first point of each run of points in one unit."""
        found = []
        for (phase, unit), run in groupby(enumerate(self.points), key=lambda item: item[1][:2]):
            found.append((phase, unit, next(run)[0]))
        return found

    def picture(self) -> Picture | str:
        """Stacked areas over the step, the units along the axis; or why there is no picture."""
        return plot(self._draw, inches=(11, 5))

    def _draw(self, figure: Any) -> None:
        axes = figure.subplots()
        rows = [[point.bytes[index] / MIB for point in self.points] for index in range(len(KINDS))]
        axes.stackplot(range(len(self.points)), rows, labels=KINDS, colors=COLORS, linewidth=0)
        self._mark_units(axes)
        at = self.points.index(self.peak)
        top = self.peak.total / MIB
        axes.annotate(f"{top:.1f} MiB", (at, top), (0, 4), textcoords="offset points", ha="center")
        axes.margins(x=0)
        axes.set_ylim(0, 1.12 * top)
        axes.set_ylabel("MiB")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, reverse=True)
        figure.suptitle(self.words(), fontsize=9, wrap=True)

    def _mark_units(self, axes: Any) -> None:
        phases = [
            (phase, next(run)[2]) for phase, run in groupby(self.stretches(), key=lambda found: found[0])
        ]
        for phase, first in phases:
            axes.axvline(first, color="0.3", linewidth=0.8)
            axes.text(first, 1.01, phase, fontsize=8, transform=axes.get_xaxis_transform())
        named: list[tuple[str, int]] = []
        for _, unit, first in self.stretches():
            if not named or first - named[-1][1] >= len(self.points) / MOST_NAMES:
                named.append((unit if len(unit) <= LONGEST else f"…{unit[1 - LONGEST :]}", first))
        axes.set_xticks([first for _, first in named])
        axes.set_xticklabels([unit for unit, _ in named], rotation=90, fontsize=7)


def memory_of_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, present: Sequence[Tensor], step: Callable[[], object]
) -> MemoryTimeline:
    """What ``step()`` makes this rank hold. Not the first step: its order and optimizer state are new.

    ``present``: tensors that are there throughout, such as the batch. It works on the CPU, on CUDA and
    without data, and slows the step down: each operation is seen in Python.
    """
    with LiveTensors(model, optimizer, present) as live:
        step()
    return timeline_of(live)


def timeline_of(live: LiveTensors) -> MemoryTimeline:
    """What has been seen while ``live`` was entered."""
    return MemoryTimeline(tuple(_points(live)))


def _points(live: LiveTensors) -> Iterator[Point]:
    count = len(live.instants)
    totals = []
    for kind in KINDS:
        changes = [0] * (count + 1)
        for life in live.lives:
            if life.kind == kind:
                changes[min(life.born, count)] += life.size
                changes[min(count if life.died is None else life.died, count)] -= life.size
        fixed = live.fixed.get(kind, 0)
        totals.append([fixed + now for now in accumulate(changes[:-1])])
    gathered = KINDS.index("gathered")
    for index, instant in enumerate(live.instants):
        held = [row[index] for row in totals]
        held[gathered] += instant.gathered
        yield Point(instant.phase, instant.unit, tuple(held))
