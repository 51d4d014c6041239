"""Time whole training steps: every contender on one case, or on each case of the suite.

On an accelerator each contender first trains alone (`Footprint`). Then all take turns to be timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from torch._C._autograd import DeviceType

from shardtrain import comm
from shardtrain.bench import contenders
from shardtrain.bench.contenders import POOL, SUITE, TITLES, Batch, Case, Contender
from shardtrain.bench.interleave import Comparison, Footprint, Runner, Samples, attempt, interleave, spread
from shardtrain.bench.report import Bench, Cells, Table, median, quartiles
from shardtrain.device import is_accelerator, peak_memory, reset_peak_memory, synchronize
from shardtrain.job.format import MIB, counted

PLAIN = "no_communication"
SUITE_REFERENCES = ("fsdp2", "ddp", PLAIN)
SETTLED = 3  # steps after which optimizers have their state and allocators their memory


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


def measure(bench: Bench) -> None:
    """Time all contenders on one case after the other."""
    settings = bench.settings
    comparisons: dict[Case, Comparison] = {}
    try:
        for name in SUITE if settings.suite else (settings.model,):
            case = settings.case(name)
            comparisons[case] = Comparison(settings.reference, settings.precision)
            _measure(bench, case, comparisons[case].samples)
    finally:
        bench.tables.update(step_table(*each) for each in comparisons.items())
        cases = {case.name: _facts(case, comparison) for case, comparison in comparisons.items()}
        bench.facts = {"reference": settings.reference, "cases": cases}
        if settings.suite:
            means = bench.facts["geometric_means"] = suite_means(list(comparisons.values()))
            bench.tables[f"geometric means over {len(comparisons)} cases"] = _suite_rows(means), []


def _measure(bench: Bench, case: Case, samples: dict[str, Samples]) -> None:
    gc.collect()  # wrappers are reference cycles, so this frees the previous case
    settings, device = bench.settings, bench.device
    samples.update((name, Samples()) for name in contenders.to_run(settings.contenders))
    data = case.build_data(settings.accumulate, settings.seed, comm.rank(), device)
    runners: dict[str, Runner] = {}

    def build(name: str) -> Contender:
        return contenders.build(name, case.build_model(settings.seed, device), settings.precision, device)

    if is_accelerator(device):  # so that libraries allocate their workspaces before the measurement
        build(PLAIN).step(data[0])
    for name, own in samples.items():
        make = partial(build, name)
        if is_accelerator(device):
            own.footprint = attempt(partial(footprint, make, data, device), own, device)
        contender = None if own.failure else attempt(make, own, device)
        if contender is not None:
            runners[name] = lambda number, own=contender: own.step(data[number % POOL])  # type: ignore[misc]
    gc.collect()
    interleave(runners, samples, device, settings.warmup, settings.rounds, case.shape)


def suite_means(comparisons: list[Comparison]) -> dict[str, dict[str, float]]:
    """Return geometric means of median ratios, of contenders with right losses in every case."""
    means = {}
    for reference in SUITE_REFERENCES:
        columns = [comparison.ratios_to(reference) for comparison in comparisons]
        names = [name for name in TITLES if columns and all(name in column for column in columns)]
        if names:
            means[reference] = {name: geometric_mean([c[name].median for c in columns]) for name in names}
    return means


def step_table(case: Case, comparison: Comparison) -> tuple[str, Table]:
    """Return one row per contender, best first: time per step, ratio to the reference, losses."""
    rows, ratios, plain = [], comparison.ratios_to(comparison.reference), comparison.ratios_to(PLAIN)
    for name in comparison.ranked():
        own, ratio = comparison.samples[name], ratios.get(name)
        cells = [
            ("", TITLES[name]),
            ("ms per step", median(spread(own.values), 1, 1e3)),
            (f"of {TITLES[comparison.reference]}", median(ratio)),
            ("quartiles", quartiles(ratio)),
            ("losses", comparison.losses_in_words(name)),
        ]
        if own.footprint is not None:
            cells += [
                (f"of {TITLES[PLAIN]}", median(plain.get(name))),
                ("host ms", median(spread(own.host), 1, 1e3)),
                ("peak MiB", f"{own.footprint.peak / MIB:.0f}"),
                ("reserved MiB", f"{own.footprint.reserved / MIB:.0f}"),
                ("launches", str(own.footprint.launches)),
            ]
        rows.append(cells)
    precision = "" if comparison.precision == "fp32" else f" in {comparison.precision}"
    title = f"{case.shape}{precision}, {counted(comparison.rounds, 'round')}"
    return title, (rows, comparison.left_out())


def _suite_rows(means: dict[str, dict[str, float]]) -> list[Cells]:
    rows = []
    for name in TITLES:
        if any(name in row for row in means.values()):
            cells = [
                (f"of {TITLES[to]}", f"{row[name]:.2f}" if name in row else "-") for to, row in means.items()
            ]
            rows.append([("", TITLES[name]), *cells])
    return rows


def _facts(case: Case, comparison: Comparison) -> dict[str, Any]:
    right, facts = comparison.right(), comparison.facts()
    for name, own in comparison.samples.items():
        facts[name] |= {
            "step_seconds": spread(right.get(name, [])),
            "seconds": own.values,
            "host_seconds": own.host,
            **(own.footprint._asdict() if own.footprint is not None else {}),
        }
    return {
        "image_size": case.image_size,
        "batch_size_per_rank": case.batch_size,
        "channels_last": case.memory_format is torch.channels_last,
        "rounds": comparison.rounds,
        "judge": comparison.judge,
        "contenders": facts,
    }
