"""Whole training steps: every contender on one case, or on each case of the suite."""

from __future__ import annotations

import gc
from statistics import geometric_mean
from typing import Any

from shardtrain import comm
from shardtrain.bench import contenders
from shardtrain.bench.contenders import POOL, SUITE, TITLES, Case, Contender
from shardtrain.bench.interleave import EXEMPT, Comparison, Runner, Samples, attempt, interleave, spread
from shardtrain.bench.report import Program, Results, median, quartiles, table
from shardtrain.job.format import counted

SUITE_REFERENCES = ("fsdp2", "ddp", "no_communication")


class StepBench(Program):
    def measure(self) -> None:
        self.comparisons: dict[Case, Comparison] = {}
        for name in SUITE if self.settings.suite else (self.settings.model,):
            self._measure(self.settings.case(name))

    def _measure(self, case: Case) -> None:
        gc.collect()  # wrappers refer to one another: the case before is freed only now
        settings, device = self.settings, self.device
        samples = {name: Samples() for name in contenders.to_run(settings.contenders)}
        self.comparisons[case] = Comparison(settings.reference, settings.precision, samples)
        data = case.build_data(settings.accumulate, settings.seed, comm.rank(), device)
        runners: dict[str, Runner] = {}
        for name in samples:

            def build(name: str = name) -> Contender:
                model = case.build_model(settings.seed, device)
                return contenders.build(name, model, settings.precision, device)

            contender = attempt(build, samples[name], device)
            if contender is not None:
                runners[name] = lambda number, own=contender: own.step(data[number % POOL])  # type: ignore[misc]
        gc.collect()
        interleave(runners, samples, device, settings.warmup, settings.rounds, case.shape)

    def results(self) -> Results:
        reference, found = self.settings.reference, self.comparisons
        lines = [line for case, comparison in found.items() for line in step_table(case, comparison)]
        facts: dict[str, Any] = {
            "reference": reference,
            "cases": {c.name: _facts(c, found[c]) for c in found},
        }
        if self.settings.suite:
            means = facts["geometric_means"] = suite_means(list(found.values()))
            lines += _suite_table(means, len(found))
        return Results(lines, facts)


def suite_means(comparisons: list[Comparison]) -> dict[str, dict[str, float]]:
    """Return by reference and contender the geometric mean of the contender's median ratios.

    Only contenders that are right in every case have one.
    """
    means = {}
    for reference in SUITE_REFERENCES:
        columns = [comparison.ratios_to(reference) for comparison in comparisons]
        names = [name for name in TITLES if columns and all(name in column for column in columns)]
        if names:
            means[reference] = {name: geometric_mean([c[name].median for c in columns]) for name in names}
    return means


def step_table(case: Case, comparison: Comparison) -> list[str]:
    """Return a line per contender, best first: time per step, ratio to the reference, loss difference."""
    rows, ratios = [], comparison.ratios_to(comparison.reference)
    for name in comparison.ranked():
        difference, ratio = comparison.verdict(name).loss_difference, ratios.get(name)
        losses = f"{'differ by' if name in EXEMPT else 'equal to'} {difference or 0:.0e}"
        rows.append(
            [
                ("", TITLES[name]),
                ("ms per step", median(spread(comparison.samples[name].values), 1, 1e3)),
                (f"of {TITLES[comparison.reference]}", median(ratio)),
                ("quartiles", quartiles(ratio)),
                ("losses", "not compared" if difference is None else losses),
            ]
        )
    precision = "" if comparison.precision == "fp32" else f" in {comparison.precision}"
    title = f"{case.shape}{precision}, {counted(comparison.rounds, 'round')}"
    return table(title, rows, comparison.left_out())


def _suite_table(means: dict[str, dict[str, float]], cases: int) -> list[str]:
    rows = []
    for name in TITLES:
        if any(name in row for row in means.values()):
            cells = [
                (f"of {TITLES[to]}", f"{row[name]:.2f}" if name in row else "-") for to, row in means.items()
            ]
            rows.append([("", TITLES[name]), *cells])
    return table(f"geometric means over {cases} cases", rows)


def _facts(case: Case, comparison: Comparison) -> dict[str, Any]:
    ratios, right = comparison.ratios_to(comparison.reference), comparison.right()
    return {
        "image_size": case.image_size,
        "batch_size_per_rank": case.batch_size,
        "rounds": comparison.rounds,
        "judge": comparison.judge,
        "contenders": {
            name: {
                **comparison.verdict(name)._asdict(),
                "step_seconds": spread(right[name]) if name in right else None,
                "ratio": ratios.get(name),
                "losses": samples.losses,
                "seconds": samples.values,
            }
            for name, samples in comparison.samples.items()
        },
    }
