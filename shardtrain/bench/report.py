"""Where results go: the terminal, bench.json, bench.txt and bench.png. Rank 0 alone."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shardtrain.bench.comparison import Spread
from shardtrain.bench.interleave import Runner, Samples, interleave
from shardtrain.bench.settings import Settings
from shardtrain.job import dist_env, pictures
from shardtrain.job.dist_env import RankInfo, on_rank_0
from shardtrain.job.format import aligned
from shardtrain.job.schema import writing


class Results(NamedTuple):
    """What a program has measured, in three forms."""

    lines: list[str]  # the tables
    facts: dict[str, Any]  # for bench.json, dataclasses included
    label: str  # of the chart: what is divided by what
    panels: Mapping[str, Mapping[str, Spread | None]]  # of the chart: title → name of a bar → ratio


class Program:
    """One of the benchmark's programs."""

    def __init__(self, settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
        self.settings, self.rank_info, self.device = settings, rank_info, device

    def measure(self) -> None:
        """Measure everything; at any moment ``results()`` returns what has been measured so far."""
        raise NotImplementedError

    def results(self) -> Results:
        raise NotImplementedError

    def interleave(
        self, runners: Mapping[str, Runner], samples: Mapping[str, Samples], title: str, **options: Any
    ) -> None:
        """Call `interleave` for as many rounds as the settings say."""
        warmup, rounds = self.settings.warmup, self.settings.rounds
        interleave(runners, samples, self.device, warmup=warmup, rounds=rounds, title=title, **options)


class Report:
    """The output directory, and what every result says about where it was measured."""

    def __init__(self, settings: Settings, program: str, rank_info: RankInfo, device: torch.device) -> None:
        self.hardware = dist_env.hardware(device, rank_info.world_size, rank_info.local_world_size)
        self.versions = dist_env.versions()
        self.facts = {"program": program, "settings": settings}
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        default = f"{settings.title(program)}-{rank_info.world_size}ranks-{started}"
        self.folder = Path(settings.out or Path("outputs") / "bench" / (settings.name or default))
        on_rank_0(self._make_folder)

    def write(self, results: Results, interrupted: bool) -> None:
        where = dist_env.in_words(self.hardware, self.versions)
        note = ["interrupted: what was measured until then"] if interrupted else []
        text = "\n".join([where, *note, "", *results.lines]).rstrip()
        facts = {
            **self.facts,
            "interrupted": interrupted,
            "hardware": self.hardware,
            "versions": self.versions,
            **results.facts,
        }
        encoded = json.dumps(facts, indent=2, default=dataclasses.asdict)
        (self.folder / "bench.json").write_text(encoded + "\n")
        (self.folder / "bench.txt").write_text(text + "\n")
        missing = draw(self.folder / "bench.png", where, results.label, results.panels)
        print(f"\n{text}\n")
        print("\n".join([*([missing] if missing else []), f"written to {self.folder}"]), flush=True)

    def _make_folder(self) -> None:
        """Make the folder and write into it: it is better to fail now than after the measurement."""
        with writing("out", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass


def table(title: str, rows: Sequence[Sequence[tuple[str, str]]], notes: Sequence[str] = ()) -> list[str]:
    """Return a table's lines; each cell comes with the title of its column."""
    head = [[column for column, _ in row] for row in rows[:1]]
    cells = [[cell for _, cell in row] for row in rows]
    return [title, *aligned([*head, *cells]), *notes, ""] if rows else [title, *notes, ""]


def median(spread: Spread | None, digits: int = 2, scale: float = 1.0) -> str:
    """Return a cell of a table: the median times ``scale``."""
    return "-" if spread is None else f"{spread.median * scale:.{digits}f}"


def quartiles(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.low:.2f}–{spread.high:.2f}"


def draw(path: Path, title: str, label: str, panels: Mapping[str, Mapping[str, Spread | None]]) -> str | None:
    """Draw one panel after the other, with a bar for each ratio and quartiles as whiskers.

    Return why there is no picture, if there is none.
    """
    known = {title: {name: bar for name, bar in bars.items() if bar} for title, bars in panels.items()}
    drawn = {title: bars for title, bars in known.items() if bars}
    if not drawn:
        return "no picture: there is nothing to compare"
    heights = [0.6 + 0.32 * len(bars) for bars in drawn.values()]

    def onto(figure: Any) -> None:
        grid = figure.subplots(len(drawn), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, bars) in zip(grid[:, 0], drawn.items(), strict=True):
            _panel(axes, name, bars)
        grid[-1, 0].set_xlabel(label)
        figure.suptitle(title, fontsize=9)

    picture = pictures.plot(onto, (8, 1.2 + sum(heights)), dpi=150)
    if isinstance(picture, str):
        return picture
    pictures.save(path, picture)
    return None


def _panel(axes: Any, title: str, bars: Mapping[str, Spread]) -> None:
    names = list(bars)[::-1]  # matplotlib counts from the bottom
    values = [bars[bar].median for bar in names]
    below = [bars[bar].median - bars[bar].low for bar in names]
    above = [bars[bar].high - bars[bar].median for bar in names]
    colors = ["tab:orange" if bar.startswith("shardtrain") else "tab:blue" for bar in names]
    drawn = axes.barh(names, values, xerr=[below, above], color=colors, ecolor="0.3", capsize=2)
    axes.bar_label(drawn, labels=[f"{value:.2f}" for value in values], padding=6, fontsize=8)
    axes.axvline(1.0, color="0.5", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
