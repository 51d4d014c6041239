"""Time whole training steps: every contender on one case, or on each case of the suite.

On an accelerator each contender first trains alone (`Footprint`). Then all take turns to be timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch
from torch._C._autograd import DeviceType

from shardtrain import comm
from shardtrain.bench import contenders
from shardtrain.bench.contenders import POOL, SUITE, TITLES, Batch, Case, Contender
from shardtrain.bench.interleave import EXEMPT, Comparison, Runner, Samples, attempt, interleave, spread
from shardtrain.bench.report import Program, Results, median, quartiles, table
from shardtrain.device import is_accelerator, peak_memory, reset_peak_memory, synchronize
from shardtrain.job.format import MIB, counted

PLAIN = "no_communication"
SUITE_REFERENCES = ("fsdp2", "ddp", PLAIN)
SETTLED = 3  # steps after which optimizers have their state and allocators their memory


class Footprint(NamedTuple):
    """Hold a contender's peak bytes of tensors on an accelerator, and those that torch's allocator reserved.

    ``launches``: kernels, copies and collectives per step.
    """

    peak: int
    reserved: int
    launches: int


def footprint(build: Callable[[], Contender], data: list[list[Batch]], device: torch.device) -> Footprint:
    """Train the contender ``build()`` for a few steps; return its footprint."""
    gc.collect()
    torch.accelerator.empty_cache()
    reset_peak_memory(device)
    held = torch.accelerator.memory_allocated(device), torch.accelerator.memory_reserved(device)
    contender = build()
    for number in range(SETTLED):
        contender.step(data[number % POOL])
    synchronize(device)
    peak, reserved = peak_memory(device), torch.accelerator.max_memory_reserved(device)
    with torch.profiler.profile() as seen:
        contender.step(data[0])
        synchronize(device)
    launches = sum(e.device_type != DeviceType.CPU and not e.is_user_annotation for e in seen.events() or ())
    return Footprint(peak - held[0], reserved - held[1], launches)


class StepBench(Program):
    def measure(self) -> None:
        self.comparisons: dict[Case, Comparison] = {}
        self.footprints: dict[Case, dict[str, Footprint]] = {}
        for name in SUITE if self.settings.suite else (self.settings.model,):
            self._measure(self.settings.case(name))

    def _measure(self, case: Case) -> None:
        gc.collect()  # wrappers are reference cycles, so this frees the previous case
        settings, device = self.settings, self.device
        samples = {name: Samples() for name in contenders.to_run(settings.contenders)}
        self.comparisons[case] = Comparison(settings.reference, settings.precision, samples)
        data = case.build_data(settings.accumulate, settings.seed, comm.rank(), device)
        runners: dict[str, Runner] = {}
        alone = self.footprints[case] = {}
        if is_accelerator(device):  # so that libraries allocate their workspaces before the measurement
            plain = contenders.build(PLAIN, case.build_model(0, device), settings.precision, device)
            plain.step(data[0])
        for name in samples:

            def build(name: str = name) -> Contender:
                model = case.build_model(settings.seed, device)
                return contenders.build(name, model, settings.precision, device)

            if is_accelerator(device):
                took = attempt(partial(footprint, build, data, device), samples[name], device)
                alone |= {} if took is None else {name: took}
            contender = None if samples[name].failure else attempt(build, samples[name], device)
            if contender is not None:
                runners[name] = lambda number, own=contender: own.step(data[number % POOL])  # type: ignore[misc]
        gc.collect()
        interleave(runners, samples, device, settings.warmup, settings.rounds, case.shape)

    def results(self) -> Results:
        reference, found = self.settings.reference, self.comparisons
        lines = [line for case in found for line in step_table(case, found[case], self.footprints[case])]
        cases = {case.name: _facts(case, found[case], self.footprints[case]) for case in found}
        facts: dict[str, Any] = {"reference": reference, "cases": cases}
        if self.settings.suite:
            means = facts["geometric_means"] = suite_means(list(found.values()))
            lines += _suite_table(means, len(found))
        return Results(lines, facts)


def suite_means(comparisons: list[Comparison]) -> dict[str, dict[str, float]]:
    """Return the geometric mean of median ratios, by reference and contender.

    Only contenders with right losses in every case have one.
    """
    means = {}
    for reference in SUITE_REFERENCES:
        columns = [comparison.ratios_to(reference) for comparison in comparisons]
        names = [name for name in TITLES if columns and all(name in column for column in columns)]
        if names:
            means[reference] = {name: geometric_mean([c[name].median for c in columns]) for name in names}
    return means


def step_table(case: Case, comparison: Comparison, alone: Mapping[str, Footprint]) -> list[str]:
    """Return one line per contender, best first: time per step, ratio to the reference, loss difference.

    ``alone``: footprints by contender, on an accelerator.
    """
    rows, ratios = [], comparison.ratios_to(comparison.reference)
    plain = comparison.ratios_to(PLAIN) if alone else {}
    for name in comparison.ranked():
        difference, ratio = comparison.verdict(name).loss_difference, ratios.get(name)
        losses = f"{'differ by' if name in EXEMPT else 'equal to'} {difference or 0:.0e}"
        cells = [
            ("", TITLES[name]),
            ("ms per step", median(spread(comparison.samples[name].values), 1, 1e3)),
            (f"of {TITLES[comparison.reference]}", median(ratio)),
            ("quartiles", quartiles(ratio)),
            ("losses", "not compared" if difference is None else losses),
        ]
        if name in alone:
            peak, reserved, launches = alone[name]
            cells[3:4] = [(f"of {TITLES[PLAIN]}", median(plain.get(name))), cells[3]]
            cells += [
                ("host ms", median(spread(comparison.samples[name].host), 1, 1e3)),
                ("peak MiB", f"{peak / MIB:.0f}"),
                ("reserved MiB", f"{reserved / MIB:.0f}"),
                ("launches", str(launches)),
            ]
        rows.append(cells)
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


def _facts(case: Case, comparison: Comparison, alone: Mapping[str, Footprint]) -> dict[str, Any]:
    ratios, right = comparison.ratios_to(comparison.reference), comparison.right()
    return {
        "image_size": case.image_size,
        "batch_size_per_rank": case.batch_size,
        "channels_last": case.memory_format is torch.channels_last,
        "rounds": comparison.rounds,
        "judge": comparison.judge,
        "contenders": {
            name: {
                **comparison.verdict(name)._asdict(),
                "step_seconds": spread(right[name]) if name in right else None,
                "ratio": ratios.get(name),
                "losses": samples.losses,
                "seconds": samples.values,
                "host_seconds": samples.host,
                **(alone[name]._asdict() if name in alone else {}),
            }
            for name, samples in comparison.samples.items()
        },
    }
