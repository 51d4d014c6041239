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

from shardtrain import machine
from shardtrain.bench import chart, table
from shardtrain.bench.contenders import TITLES
from shardtrain.bench.settings import Settings, what_is_measured
from shardtrain.bench.statistics import Spread, geometric_mean
from shardtrain.bench.steps import Measurement
from shardtrain.errors import writing
from shardtrain.place import Place, on_rank_0

SUITE_REFERENCES = ("fsdp2", "ddp", "no_communication")


class Report:
    """The output directory and what every result says about where it was measured."""

    def __init__(self, settings: Settings, program: str, place: Place, device: torch.device) -> None:
        self.settings, self.program = settings, program
        self.hardware = machine.hardware(device, place.world_size, place.local_world_size)
        self.versions = machine.versions()
        self.where = machine.in_words(self.hardware, self.versions)
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
        missing = chart.draw(self.folder / "bench.png", self.where, *bars)
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
    texts = [table.of_steps(measurement) for measurement in measurements]
    results: dict[str, Any] = {"reference": reference, "cases": cases}
    if report.settings.suite:
        means = suite_means(measurements)
        results["geometric_means"] = means
        texts.append(table.of_suite(means, len(measurements)))
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
