"""Where results go: the terminal, bench.json, bench.txt and bench.png. Rank 0 alone."""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Samples, Spread
from shardtrain.bench.settings import Settings
from shardtrain.job import dist_env, pictures
from shardtrain.job.dist_env import RankInfo, on_rank_0
from shardtrain.job.format import aligned
from shardtrain.job.schema import writing

Cells = list[tuple[str, str]]  # of a row: the title of a column, and the text in it


class Results(NamedTuple):
    """What a program has measured, in three forms."""

    lines: list[str]  # the tables
    facts: dict[str, Any]  # for bench.json, dataclasses included
    label: str  # of the chart: what is divided by what
    panels: Mapping[str, Mapping[str, Spread | None]]  # of the chart: title → contender or label → ratio


class Program:
    """One of the benchmark's programs. ``results()`` returns what ``measure()`` has measured so far."""

    def __init__(self, settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
        self.settings, self.rank_info, self.device = settings, rank_info, device

    def measure(self) -> None:
        raise NotImplementedError

    def results(self) -> Results:
        raise NotImplementedError


class Row(NamedTuple):
    """One row of a table with the bars that it adds to panels of the chart, and what bench.json says."""

    cells: Cells
    bars: dict[str, Spread | None]
    facts: dict[str, Any]


@dataclass
class Point:
    """What has been measured at one setting: a row of a table."""

    table: str
    label: str
    samples: dict[str, Samples]

    def row(self) -> Row:
        raise NotImplementedError


class Report:
    """The output directory, and what every result says about where it was measured."""

    def __init__(self, settings: Settings, program: str, rank_info: RankInfo, device: torch.device) -> None:
        measured = ("memory-" if settings.memory else "") + ("suite" if settings.suite else settings.model)
        self.hardware = dist_env.hardware(device, rank_info.world_size, rank_info.local_world_size)
        self.versions = dist_env.versions()
        self.facts = {"program": program, "settings": settings}
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        title = measured if program == "steps" else program
        default = f"{title}-{rank_info.world_size}ranks-{started}"
        self.folder = Path(settings.out or Path("outputs") / "bench" / (settings.name or default))
        on_rank_0(self._make_folder)

    def write(self, results: Results, interrupted: bool) -> None:
        where = dist_env.in_words(self.hardware, self.versions)
        note = ["interrupted: what was measured until then"] if interrupted else []
        text = "\n".join([where, *note, "", *results.lines]).rstrip()
        where_and_when = {"interrupted": interrupted, "hardware": self.hardware, "versions": self.versions}
        facts = {**self.facts, **where_and_when, **results.facts}
        encoded = json.dumps(facts, indent=2, default=asdict)
        (self.folder / "bench.json").write_text(encoded + "\n")
        (self.folder / "bench.txt").write_text(text + "\n")
        missing = draw(self.folder / "bench.png", where, results)
        print(f"\n{text}\n", *filter(None, [missing]), f"written to {self.folder}", sep="\n", flush=True)

    def _make_folder(self) -> None:
        """Make the folder and write into it: it is better to fail now than after the measurement."""
        with writing("out", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass


def of_points(points: Sequence[Point], label: str) -> Results:
    """Return a table for each group of points, with a row per point and notes on what failed."""
    lines: list[str] = []
    failures: list[str] = []
    panels: dict[str, dict[str, Spread | None]] = {}
    for title in dict.fromkeys(point.table for point in points):
        group, notes = [point for point in points if point.table == title], []
        for point in group:
            for panel, ratio in point.row().bars.items():
                panels.setdefault(panel, {})[point.label] = ratio
            for name, samples in point.samples.items():
                if samples.failure is not None:
                    notes.append(f"{point.label}, {TITLES.get(name, name)}: not timed: {samples.failure}")
        lines += table(title, [point.row().cells for point in group], notes)
        failures += [f"{title}, {note}" for note in notes]
    facts = {"points": [point.row().facts for point in points], "failures": failures}
    return Results(lines, facts, label, panels)


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


def draw(path: Path, title: str, results: Results) -> str | None:
    """Draw a panel below the other, with a bar for each ratio; return why there is no picture, if so."""
    known = {name: {bar: r for bar, r in ratios.items() if r} for name, ratios in results.panels.items()}
    panels = {name: ratios for name, ratios in known.items() if ratios}
    if not panels:
        return "no picture: there is nothing to compare"
    heights = [0.6 + 0.32 * len(ratios) for ratios in panels.values()]

    def onto(figure: Any) -> None:
        grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, ratios) in zip(grid[:, 0], panels.items(), strict=True):
            _panel(axes, name, ratios)
        grid[-1, 0].set_xlabel(results.label)
        figure.suptitle(title, fontsize=9)

    picture = pictures.plot(onto, (8, 1.2 + sum(heights)), dpi=150)
    if isinstance(picture, str):
        return picture
    pictures.save(path, picture)
    return None


def _panel(axes: Any, title: str, ratios: Mapping[str, Spread]) -> None:
    """Draw bars with quartiles as whiskers."""
    names = [TITLES.get(name, name) for name in ratios]
    medians = [ratio.median for ratio in ratios.values()]
    whiskers = [[r.median - r.low for r in ratios.values()], [r.high - r.median for r in ratios.values()]]
    colors = ["tab:orange" if name.startswith("shardtrain") else "tab:blue" for name in names]
    drawn = axes.barh(names, medians, xerr=whiskers, color=colors, ecolor="0.3", capsize=2)
    axes.bar_label(drawn, labels=[f"{value:.2f}" for value in medians], padding=6, fontsize=8)
    axes.axvline(1.0, color="0.5", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15)
    axes.invert_yaxis()  # the first at the top
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
