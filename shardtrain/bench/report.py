"""Collect what a program of the benchmark measures, and the hardware, as tables and as facts."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardtrain import device as devices
from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Runner, Samples, Spread, interleave
from shardtrain.bench.settings import Settings
from shardtrain.job import dist_env
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import aligned, counted

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
        self.facts.setdefault("points", []).append({**facts, "seconds": seconds, "failures": failures})
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


def hardware(device: torch.device, ranks: int, ranks_per_host: int) -> dict[str, str | int]:
    """Return the facts on which measurements depend, for a file of results."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpus = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    facts: dict[str, str | int] = {
        "cpu": cpus[0] if cpus else platform.processor() or platform.machine(),
        "cores": dist_env.cores(),
        "ranks": ranks,
        "ranks_per_host": ranks_per_host,
        "threads_per_rank": torch.get_num_threads(),
        "device": device.type,
        "backend": devices.BACKENDS[device.type],
        "memory_gib": round(devices.total_memory(torch.device("cpu")) / 2**30),
    }
    return facts | ({"gpu": devices.name(device)} if devices.is_accelerator(device) else {})


def in_words(hardware: dict[str, str | int], versions: dict[str, str]) -> str:
    """Return hardware and versions in one line."""
    gpu = f", {hardware['gpu']}" if "gpu" in hardware else ""
    ranks = counted(int(hardware["ranks"]), "rank")
    threads = counted(int(hardware["threads_per_rank"]), "thread")
    software = f"torch {versions['torch']}, python {versions['python']}"
    machine = f"{hardware['cpu']}, {hardware['cores']} cores{gpu}"
    return f"{machine}; {ranks} × {threads}, {hardware['backend']}; {software}"
