"""Where results go: the terminal, bench.json, bench.txt and bench.png. Rank 0 alone."""

from __future__ import annotations

import dataclasses
import datetime
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import EXEMPT, Spread, geometric_mean
from shardtrain.bench.settings import Settings, what_is_measured
from shardtrain.bench.steps import Measurement, Verdict
from shardtrain.job import dist_env, pictures
from shardtrain.job.dist_env import RankInfo, on_rank_0
from shardtrain.job.format import aligned, counted
from shardtrain.job.schema import writing

SUITE_REFERENCES = ("fsdp2", "ddp", "no_communication")


class Report:
    """The output directory and what every result says about where it was measured."""

    def __init__(self, settings: Settings, program: str, place: RankInfo, device: torch.device) -> None:
        self.settings, self.program = settings, program
        self.hardware = dist_env.hardware(device, place.world_size, place.local_world_size)
        self.versions = dist_env.versions()
        self.where = dist_env.in_words(self.hardware, self.versions)
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        default = f"{what_is_measured(settings, program)}-{place.world_size}ranks-{started}"
        self.folder = Path(settings.out or Path("outputs") / "bench" / (settings.name or default))
        self.speaks = place.rank == 0
        on_rank_0(self._make_folder)

    def write(
        self,
        results: Mapping[str, Any],
        text: str,
        bars: tuple[str, Mapping[str, Mapping[str, Spread]]],
        interrupted: bool,
    ) -> None:
        """``bars``: what a ratio of the chart is to, and its panels."""
        if not self.speaks:
            return
        head = f"{self.where}\n" + ("interrupted: what was measured until then\n" if interrupted else "")
        facts = {
            "program": self.program,
            "interrupted": interrupted,
            "settings": dataclasses.asdict(self.settings),
            "hardware": self.hardware,
            "versions": self.versions,
        }
        (self.folder / "bench.json").write_text(json.dumps({**facts, **results}, indent=2) + "\n")
        (self.folder / "bench.txt").write_text(f"{head}\n{text}\n")
        missing = draw(self.folder / "bench.png", self.where, *bars)
        print(f"\n{head}\n{text}\n")
        print("\n".join([*([missing] if missing else []), f"written to {self.folder}"]), flush=True)

    def _make_folder(self) -> None:
        with writing("out", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass  # better now than after the measurement


def of_steps(report: Report, measurements: Sequence[Measurement], interrupted: bool) -> None:
    """One case, or the suite with its geometric means."""
    reference = report.settings.reference
    cases = {measurement.case.name: _case(measurement) for measurement in measurements}
    texts = [steps_table(measurement) for measurement in measurements]
    results: dict[str, Any] = {"reference": reference, "cases": cases}
    if report.settings.suite:
        means = suite_means(measurements)
        results["geometric_means"] = means
        texts.append(of_suite(means, len(measurements)))
    panels = {m.case.shape: _titled(m.ratios_to(reference)) for m in measurements}
    label = f"time of a step over {TITLES[reference]}'s (less is better)"
    report.write(results, "\n\n".join(texts), (label, panels), interrupted)


def suite_means(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Reference → contender → geometric mean of its median ratios, of those right in every case."""
    means = {}
    for reference in SUITE_REFERENCES:
        columns = [measurement.ratios_to(reference) for measurement in measurements]
        names = [name for name in TITLES if columns and all(name in column for column in columns)]
        if names:
            means[reference] = {name: geometric_mean([c[name].median for c in columns]) for name in names}
    return means


def _case(measurement: Measurement) -> dict[str, Any]:
    found = {}
    for name, verdict in measurement.verdicts().items():
        track = measurement.tracks[name]
        found[name] = {
            "status": verdict.status,
            "reason": verdict.reason,
            "step_seconds": _spread(verdict.seconds),
            "ratio": _spread(verdict.ratio),
            "loss_difference": verdict.loss_difference,
            "losses": track.losses,
            "seconds": track.seconds,
        }
    case = measurement.case
    return {
        "image_size": case.image_size,
        "batch_size_per_rank": case.batch_size,
        "rounds": measurement.rounds,
        "judge": measurement.judge,
        "contenders": found,
    }


def _spread(found: Spread | None) -> dict[str, float] | None:
    return None if found is None else found._asdict()


def _titled(found: Mapping[str, Spread]) -> dict[str, Spread]:
    return {TITLES[name]: found[name] for name in sorted(found, key=lambda name: found[name].median)}


# Results as text, best first.


def steps_table(measurement: Measurement) -> str:
    """One line a contender: time of a step, ratio to the reference with quartiles, loss difference."""
    verdicts = measurement.verdicts()
    ok = {name: verdict for name, verdict in verdicts.items() if verdict.status == "ok"}
    ranked = sorted(ok, key=lambda name: _order(ok[name]))
    reference = TITLES[measurement.reference]
    rows = [["", "ms a step", f"of {reference}", "quartiles", "losses"]]
    rows += [_row(name, ok[name]) for name in ranked]
    precision = "" if measurement.precision == "fp32" else f" in {measurement.precision}"
    lines = [f"{measurement.case.shape}{precision}, {counted(measurement.rounds, 'round')}", *aligned(rows)]
    if ok and measurement.reference not in ok:
        lines.append(f"No ratios: {reference} has no right answers to compare with.")
    if ok and measurement.judge is None:
        lines.append("Losses were not compared: no peer is among the contenders.")
    return "\n".join([*lines, *_left_out(verdicts)])


def of_suite(means: Mapping[str, Mapping[str, float]], cases: int) -> str:
    """Geometric means over the cases, one column a reference."""
    names = sorted({name for column in means.values() for name in column}, key=list(TITLES).index)
    rows = [["", *(f"of {TITLES[reference]}" for reference in means)]]
    for name in names:
        cells = [f"{column[name]:.2f}" if name in column else "-" for column in means.values()]
        rows.append([TITLES[name], *cells])
    return "\n".join([f"geometric means over {cases} cases", *aligned(rows)])


def quartiles(found: Spread) -> str:
    return f"{found.low:.2f}–{found.high:.2f}"


def _order(verdict: Verdict) -> float:
    found = verdict.ratio or verdict.seconds
    assert found is not None
    return found.median


def _row(name: str, verdict: Verdict) -> list[str]:
    assert verdict.seconds is not None
    ratio = verdict.ratio
    return [
        TITLES[name],
        f"{verdict.seconds.median * 1e3:.1f}",
        f"{ratio.median:.2f}" if ratio else "-",
        quartiles(ratio) if ratio else "-",
        _losses(name, verdict.loss_difference),
    ]


def _losses(name: str, difference: float | None) -> str:
    if difference is None:
        return "not compared"
    return f"differ by {difference:.0e}" if name in EXEMPT else f"equal to {difference:.0e}"


def _left_out(verdicts: Mapping[str, Verdict]) -> list[str]:
    return [
        f"{TITLES[name]}: {verdict.status}, not ranked: {verdict.reason}"
        for name, verdict in verdicts.items()
        if verdict.status != "ok"
    ]


# A bar chart of ratios, with quartiles as whiskers.


def draw(path: Path, title: str, label: str, groups: Mapping[str, Mapping[str, Spread]]) -> str | None:
    """One panel a group, one bar an entry, in the order given.

    Returns why there is no picture, if there is none.
    """
    groups = {name: bars for name, bars in groups.items() if bars}
    if not groups:
        return "no picture: there is nothing to compare"
    heights = [0.6 + 0.32 * len(bars) for bars in groups.values()]

    def panels(figure: Any) -> None:
        found = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, bars) in zip(found[:, 0], groups.items(), strict=True):
            _panel(axes, name, bars)
        found[-1, 0].set_xlabel(label)
        figure.suptitle(title, fontsize=9)

    picture = pictures.plot(panels, (8, 1.2 + sum(heights)), dpi=150)
    if isinstance(picture, str):
        return picture
    pictures.save(path, picture)
    return None


def _panel(axes: Any, name: str, bars: Mapping[str, Spread]) -> None:
    names = list(bars)[::-1]  # matplotlib counts from the bottom
    values = [bars[bar].median for bar in names]
    below = [bars[bar].median - bars[bar].low for bar in names]
    above = [bars[bar].high - bars[bar].median for bar in names]
    colors = ["tab:orange" if bar.startswith("shardtrain") else "tab:blue" for bar in names]
    drawn = axes.barh(names, values, xerr=[below, above], color=colors, ecolor="0.3", capsize=2)
    axes.bar_label(drawn, labels=[f"{value:.2f}" for value in values], padding=6, fontsize=8)
    axes.axvline(1.0, color="0.5", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15)
    axes.set_title(name, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
