"""Compare measurements, by plain arithmetic: ratios, verdicts on losses, tables and facts.

Ratios are computed within a round, in which both contenders had the same conditions, and their median over
rounds. Three rounds in which A takes 2, 3, 8 s and B takes 1, 2, 4 s give the ratios 2, 1.5, 2: median 2.
Only contenders with right losses are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean, median, quantiles
from typing import Any, NamedTuple

import torch

from shardtrain.job.dist_env import RankInfo
from shardtrain.job.format import aligned, counted

from .contenders import TITLES
from .interleave import Runner, Samples, interleave
from .settings import Settings

# Rounding differences begin at 1e-7 and grow with every update: 5e-5 within 5 steps of a ResNet on 4 ranks,
# 3e-3 within 16. Training without communication differs by more than 5e-4 within 5 steps (suite and tiny).
# bf16 rounds to 4e-3 at every operation, and contenders keep different layers in fp32. There losses only
# show gross mistakes.
EARLY_STEPS, LATE = 5, 5e-2
EARLY = {"fp32": 2e-4, "bf16": 2e-2}

# Losses must equal those of the first of these that takes part. Exempt ones train on own data, or round.
JUDGES = ("ddp", "fsdp2", "fsdp1", "fsdp2_no_reshard")
EXEMPT = ("no_communication", "bound", "shardtrain_bf16")


@dataclass(frozen=True)
class Spread:
    """Hold the median of ``n`` values and their quartiles."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of ``values``; None if there are none."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0], 1) if values else None
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratios(values: Sequence[float], reference: Sequence[float]) -> Spread | None:
    """Return the spread of the ratios over rounds that both have finished; None if there are none."""
    return spread([own / other for own, other in zip(values, reference, strict=False)])


def loss_difference(losses: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference at any step, as a fraction of the right loss; infinity for NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, right, strict=False)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def losses_agree(losses: Sequence[float], right: Sequence[float], precision: str = "fp32") -> bool:
    """Return whether losses are equal up to rounding: strictly in early steps, loosely in later ones."""
    early = loss_difference(losses[:EARLY_STEPS], right[:EARLY_STEPS])
    return early <= EARLY[precision] and loss_difference(losses, right) <= LATE


def title(name: str) -> str:
    """Return what tables call a contender or another runner."""
    return TITLES.get(name, name)


def tabulated(rows: Sequence[dict[str, str]]) -> list[str]:
    """Return the lines of a table of rows, which hold cells by the titles of their columns."""
    return aligned([[*rows[0]], *([*row.values()] for row in rows)]) if rows else []


class Verdict(NamedTuple):
    """Hold the verdict on one contender. ``status``: ok, wrong (losses differ from the judge's) or failed."""

    status: str
    reason: str | None = None
    loss_difference: float | None = None  # relative to the judge's losses


@dataclass
class Comparison:
    """Compare the contenders of one measurement so far. Its table has a column of ratios per reference."""

    samples: dict[str, Samples]
    title: str
    unit: str  # of the values in the table, as "ms per step"
    scale: float  # from values to that unit
    references: Sequence[str]
    precision: str | None = "fp32"  # of the losses; None: there are none

    @property
    def rounds(self) -> int:
        return max((len(samples.values) for samples in self.samples.values()), default=0)

    @property
    def judge(self) -> str | None:
        """The first of JUDGES that has not failed: its losses count as right."""
        done = [name for name, samples in self.samples.items() if samples.failure is None]
        return next((name for name in JUDGES if name in done and self.precision), None)

    def verdict(self, name: str) -> Verdict:
        """Return whether a contender failed, or its losses differ from the judge's."""
        own, judge = self.samples[name], self.judge
        if own.failure is not None or not own.values:
            return Verdict("failed", own.failure or "interrupted before its first timed round")
        if judge is None or self.precision is None:
            return Verdict("ok")
        right = self.samples[judge].losses
        difference = loss_difference(own.losses, right)
        if name not in EXEMPT and not losses_agree(own.losses, right, self.precision):
            reason = f"losses differ from {judge}'s by up to {difference:.1e} of their value"
            return Verdict("wrong", reason, difference)
        return Verdict("ok", None, difference)

    def right(self) -> dict[str, list[float]]:
        """Return the values of the contenders with right losses."""
        return {name: own.values for name, own in self.samples.items() if self.verdict(name).status == "ok"}

    def ratios_to(self, reference: str) -> dict[str, Spread]:
        """Return the ratios of contenders with right losses; none if the reference is wrong."""
        right = self.right()
        spreads = {name: ratios(values, right.get(reference, [])) for name, values in right.items()}
        return {name: ratio for name, ratio in spreads.items() if ratio is not None}

    def ranked(self) -> list[str]:
        """Return the names of the contenders with right losses, the fastest or smallest first."""
        first, right = self.ratios_to(self.references[0]), self.right()
        return sorted(right, key=lambda name: first[name].median if first else median(right[name]))

    def table(self) -> list[str]:
        """Return one row per contender, best first, and a line for each that is not ranked."""
        columns = {to: self.ratios_to(to) for to in self.references if self.ratios_to(to)}
        rows = [self._row(name, columns) for name in self.ranked()]
        lines = [f"{self.title}, {counted(self.rounds, 'round')}", *tabulated(rows)]
        if rows and self.references[0] not in columns:
            lines.append(f"No ratios: {title(self.references[0])} has no right answers to compare with.")
        if rows and self.precision and self.judge is None:
            lines.append("Losses were not compared: no peer is among the contenders.")
        for name in self.samples:
            verdict = self.verdict(name)
            if verdict.status != "ok":
                lines.append(f"{title(name)}: {verdict.status}, not ranked: {verdict.reason}")
        return lines

    def _row(self, name: str, columns: dict[str, dict[str, Spread]]) -> dict[str, str]:
        """Return the cells of a row, by the titles of their columns."""
        own, difference = self.samples[name], self.verdict(name).loss_difference
        row = {"": title(name), self.unit: f"{median(own.values) * self.scale:.1f}"}
        for to, column in columns.items():
            row[f"of {title(to)}"] = f"{column[name].median:.2f}"
            if to == self.references[0]:
                row["quartiles"] = f"{column[name].low:.2f}–{column[name].high:.2f}"
        if difference is not None:
            row["losses"] = f"{'differ by' if name in EXEMPT else 'equal to'} {difference:.0e}"
        if own.footprint:
            row["host ms"] = f"{median(own.host) * 1e3:.1f}"
            row |= {title: f"{value:,}" for title, value in own.footprint.items()}
        return row

    def facts(self) -> dict[str, Any]:
        """Return each contender's measurements, verdict and ratios, for bench.json."""
        columns = {reference: self.ratios_to(reference) for reference in self.references}
        contenders = {
            name: {
                **asdict(own),
                **self.verdict(name)._asdict(),
                "ratios": {to: column[name] for to, column in columns.items() if name in column},
            }
            for name, own in self.samples.items()
        }
        return {"title": self.title, "rounds": self.rounds, "judge": self.judge, "contenders": contenders}


def geometric_means(comparisons: Sequence[Comparison]) -> dict[str, dict[str, float]]:
    """Return the means of median ratios to the references, of contenders that are right in every case."""
    means: dict[str, dict[str, float]] = {}
    for reference in comparisons[0].references if comparisons else ():
        columns = [comparison.ratios_to(reference) for comparison in comparisons]
        for name in columns[0]:
            if all(name in column for column in columns):
                mean = geometric_mean([column[name].median for column in columns])
                means.setdefault(name, {})[reference] = mean
    return means


@dataclass
class Bench:
    """Hold what a program measures by, and its results so far: after Ctrl-C these are written, too."""

    settings: Settings
    rank_info: RankInfo
    device: torch.device
    comparisons: list[Comparison] = field(default_factory=list)
    note: str = ""  # below all tables

    def begin(self, names: Sequence[str], *how: Any) -> Comparison:
        """Begin a comparison of the contenders ``names``."""
        comparison = Comparison({name: Samples() for name in names}, *how)
        self.comparisons.append(comparison)
        return comparison

    def time(self, comparison: Comparison, runners: Mapping[str, Runner], **options: Any) -> None:
        """Time ``runners`` in turns, with the options of `interleave`."""
        rounds = self.settings.warmup, self.settings.rounds
        interleave(runners, comparison.samples, self.device, *rounds, comparison.title, **options)

    def text(self) -> str:
        """Return all tables."""
        lines = [line for comparison in self.comparisons for line in (*comparison.table(), "")]
        if self.settings.program == "suite":
            means = geometric_means(self.comparisons)
            rows = [
                {"": title(name), **{f"of {title(to)}": f"{mean:.2f}" for to, mean in own.items()}}
                for name, own in means.items()
            ]
            lines += ["geometric means of the cases", *tabulated(rows), ""]
        return "\n".join([*lines, self.note])
