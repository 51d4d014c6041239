"""Collect what a program of the benchmark measures, as tables and as facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Runner, Samples, Spread, interleave
from shardtrain.bench.settings import Settings
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import aligned

Cells = list[tuple[str, str]]  # the cells of a row: the column's title, and the text
Table = tuple[list[Cells], list[str]]  # the rows, and notes below them


@dataclass
class Bench:
    """Hold what a program measures by, and its results so far: after Ctrl-C these are written, too."""

    settings: Settings
    rank_info: RankInfo
    device: torch.device
    tables: dict[str, Table] = field(default_factory=dict)  # by title
    facts: dict[str, Any] = field(default_factory=dict)  # for bench.json
    note: str = ""  # below all tables

    def timed(self, runners: Mapping[str, Runner], title: str, **options: Any) -> dict[str, Samples]:
        """Time ``runners`` in turns, with the options of `interleave`."""
        samples = {name: Samples() for name in runners}
        rounds = self.settings.warmup, self.settings.rounds
        interleave(runners, samples, self.device, *rounds, title, **options)
        return samples

    def add(self, title: str, cells: Cells, facts: dict[str, Any], samples: Mapping[str, Samples]) -> None:
        """Add a row to the table ``title``, and a point to the facts. The first cell names the setting."""
        rows, notes = self.tables.setdefault(title, ([], []))
        rows.append(cells)
        failures = {name: own.failure for name, own in samples.items()}
        seconds = {name: own.values for name, own in samples.items()}
        self.facts["points"].append({**facts, "seconds": seconds, "failures": failures})
        for name, failure in failures.items():
            if failure is not None:
                notes.append(f"{cells[0][1]}, {TITLES.get(name, name)}: not timed: {failure}")

    def text(self) -> str:
        """Return all tables."""
        lines = []
        for title, (rows, notes) in self.tables.items():
            head = [[column for column, _ in row] for row in rows[:1]]
            cells = [[cell for _, cell in row] for row in rows]
            lines += [title, *(aligned([*head, *cells]) if rows else []), *notes, ""]
        return "\n".join([*lines, self.note])


def median(spread: Spread | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return a cell of a table: the median times ``scale``."""
    return "-" if spread is None else f"{spread.median * scale:.{digits}f}"


def quartiles(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.low:.2f}–{spread.high:.2f}"
