"""Write results to the terminal, bench.json and bench.txt, on rank 0."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, NamedTuple

import torch

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Samples, Spread
from shardtrain.bench.settings import Settings
from shardtrain.job import dist_env
from shardtrain.job.dist_env import RankInfo, on_rank_0
from shardtrain.job.format import aligned
from shardtrain.job.schema import path_of, writing

Cells = list[tuple[str, str]]  # the cells of a row: the column's title, and the text


class Results(NamedTuple):
    """Hold what a program has measured."""

    lines: list[str]  # the tables
    facts: dict[str, Any]  # for bench.json, dataclasses included


class Program:
    """Define a program of the benchmark. ``results()`` returns what ``measure()`` has measured so far."""

    def __init__(self, settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
        self.settings, self.rank_info, self.device = settings, rank_info, device

    def measure(self) -> None:
        raise NotImplementedError

    def results(self) -> Results:
        raise NotImplementedError


class Points:
    """Collect tables point by point: the measurements at one setting, and the failures there."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Cells]] = {}
        self._notes: dict[str, list[str]] = {}
        self._facts: list[dict[str, Any]] = []

    def add(self, title: str, cells: Cells, facts: dict[str, Any], samples: Mapping[str, Samples]) -> None:
        """Add a row to the table ``title``. The first cell names the setting."""
        self._rows.setdefault(title, []).append(cells)
        self._facts.append(facts)
        notes = self._notes.setdefault(title, [])
        for name, own in samples.items():
            if own.failure is not None:
                notes.append(f"{cells[0][1]}, {TITLES.get(name, name)}: not timed: {own.failure}")

    def results(self, last: str = "") -> Results:
        """Return all tables and failures, and the line ``last``."""
        tables = [table(title, rows, self._notes[title]) for title, rows in self._rows.items()]
        failures = [f"{title}, {note}" for title, notes in self._notes.items() for note in notes]
        return Results([*chain.from_iterable(tables), last], {"points": self._facts, "failures": failures})


class Report:
    """Write results to the output directory, with facts about the machine."""

    def __init__(self, settings: Settings, program: str, rank_info: RankInfo, device: torch.device) -> None:
        measured = ("memory-" if settings.memory else "") + ("suite" if settings.suite else settings.model)
        hardware = dist_env.hardware(device, rank_info.world_size, rank_info.local_world_size)
        versions = dist_env.versions()
        self.where = dist_env.in_words(hardware, versions)
        self.facts = {"program": program, "settings": settings, "hardware": hardware, "versions": versions}
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        title = measured if program == "steps" else program
        default = f"{title}-{rank_info.world_size}ranks-{started}"
        self.folder = path_of("out", settings.out or f"outputs/bench/{default}")
        on_rank_0(self._make_folder)

    def write(self, results: Results, interrupted: bool) -> None:
        note = ["interrupted: what was measured until then"] if interrupted else []
        text = "\n".join([self.where, *note, "", *results.lines]).rstrip()
        facts = {**self.facts, "interrupted": interrupted, **results.facts}
        encoded = json.dumps(facts, indent=2, default=asdict)
        (self.folder / "bench.json").write_text(encoded + "\n")
        (self.folder / "bench.txt").write_text(text + "\n")
        print(f"\n{text}\n\nwritten to {self.folder}", flush=True)

    def _make_folder(self) -> None:
        """Make the folder and a file in it, to fail now rather than after the measurement."""
        with writing("out", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "bench.json").touch()


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
