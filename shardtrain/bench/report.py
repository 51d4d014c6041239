"""Define what a program of the benchmark is, and make its tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Runner, Samples, Spread, interleave
from shardtrain.bench.settings import Settings
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import aligned

Cells = list[tuple[str, str]]  # the cells of a row: the column's title, and the text
Results = tuple[
    list[str], dict[str, Any]
]  # lines with tables, and facts for bench.json, dataclasses included


class Program:
    """Define a program of the benchmark. ``results()`` returns what ``measure()`` has measured so far."""

    def __init__(self, settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
        self.settings, self.rank_info, self.device = settings, rank_info, device

    def measure(self) -> None:
        raise NotImplementedError

    def results(self) -> Results:
        raise NotImplementedError


class PointProgram(Program):
    """Measure at one setting after the other. Each of several tables has one row per setting."""

    def __init__(self, settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
        super().__init__(settings, rank_info, device)
        self._rows: defaultdict[str, list[Cells]] = defaultdict(list)
        self._notes: defaultdict[str, list[str]] = defaultdict(list)
        self._points: list[dict[str, Any]] = []

    def time(self, runners: Mapping[str, Runner], title: str, **options: Any) -> dict[str, Samples]:
        """Time ``runners`` in turns, with the options of `interleave`."""
        samples = {name: Samples() for name in runners}
        rounds = self.settings.warmup, self.settings.rounds
        interleave(runners, samples, self.device, *rounds, title, **options)
        return samples

    def add(self, title: str, cells: Cells, facts: dict[str, Any], samples: Mapping[str, Samples]) -> None:
        """Add a row to the table ``title``. The first cell names the setting."""
        self._rows[title].append(cells)
        failures = {name: own.failure for name, own in samples.items()}
        seconds = {name: own.values for name, own in samples.items()}
        self._points.append({**facts, "seconds": seconds, "failures": failures})
        for name, failure in failures.items():
            if failure is not None:
                note = f"{cells[0][1]}, {TITLES.get(name, name)}: not timed: {failure}"
                self._notes[title].append(note)

    def results(self) -> Results:
        tables = [table(title, rows, self._notes[title]) for title, rows in self._rows.items()]
        return [*chain.from_iterable(tables)], {"points": self._points}


def table(title: str, rows: Sequence[Cells], notes: Sequence[str] = ()) -> list[str]:
    """Return the lines of a table."""
    head = [[column for column, _ in row] for row in rows[:1]]
    cells = [[cell for _, cell in row] for row in rows]
    return [title, *(aligned([*head, *cells]) if rows else []), *notes, ""]


def median(spread: Spread | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return a cell of a table: the median times ``scale``."""
    return "-" if spread is None else f"{spread.median * scale:.{digits}f}"


def quartiles(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.low:.2f}–{spread.high:.2f}"
