"""Define what a program of the benchmark is, and make its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Runner, Samples, Spread, interleave
from shardtrain.bench.settings import Settings
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import aligned

Cells = list[tuple[str, str]]  # the cells of a row: the column's title, and the text
Results = tuple[list[str], dict[str, Any]]  # the lines of tables, and facts for bench.json


@dataclass
class Program:
    """Define a program of the benchmark. ``results()`` returns what ``measure()`` has measured so far."""

    settings: Settings
    rank_info: RankInfo
    device: torch.device

    def measure(self) -> None:
        raise NotImplementedError

    def results(self) -> Results:
        raise NotImplementedError


@dataclass
class PointProgram(Program):
    """Measure at one setting after the other. Each of several tables has one row per setting."""

    _tables: dict[str, tuple[list[Cells], list[str]]] = field(default_factory=dict)  # rows, notes by title
    _points: list[dict[str, Any]] = field(default_factory=list)

    def timed(self, runners: Mapping[str, Runner], title: str, **options: Any) -> dict[str, Samples]:
        """Time ``runners`` in turns, with the options of `interleave`."""
        samples = {name: Samples() for name in runners}
        rounds = self.settings.warmup, self.settings.rounds
        interleave(runners, samples, self.device, *rounds, title, **options)
        return samples

    def add(self, title: str, cells: Cells, facts: dict[str, Any], samples: Mapping[str, Samples]) -> None:
        """Add a row to the table ``title``. The first cell names the setting."""
        rows, notes = self._tables.setdefault(title, ([], []))
        rows.append(cells)
        failures = {name: own.failure for name, own in samples.items()}
        seconds = {name: own.values for name, own in samples.items()}
        self._points.append({**facts, "seconds": seconds, "failures": failures})
        for name, failure in failures.items():
            if failure is not None:
                notes.append(f"{cells[0][1]}, {TITLES.get(name, name)}: not timed: {failure}")

    def results(self) -> Results:
        tables = [table(title, *content) for title, content in self._tables.items()]
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
