"""Peak memory of the whole job, each contender in fresh processes, above what imports take.

The rank with local rank 0 starts as many processes as its host has ranks, which meet among themselves and
train a few steps while it watches them. One contender at a time, so that nothing is shared between two.
"""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from shardtrain import comm
from shardtrain.bench import judging, processes
from shardtrain.bench.cases import Case
from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import attempt
from shardtrain.bench.memory_rank import STEPS, meeting_of
from shardtrain.bench.report import Report
from shardtrain.bench.settings import Settings
from shardtrain.bench.statistics import spread
from shardtrain.bench.steps import to_run
from shardtrain.place import Place
from shardtrain.text import MIB, aligned


@dataclass
class Peak:
    """Bytes over all ranks; ``losses`` the mean over this host's ranks."""

    host: int = 0
    device: int = 0
    losses: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def total(self) -> int:
        return self.host + self.device


@dataclass
class Peaks:
    """What has been measured so far."""

    case: Case | None = None
    precision: str = "fp32"
    found: dict[str, Peak] = field(default_factory=dict)


def measure(peaks: Peaks, settings: Settings, place: Place, device: torch.device) -> None:
    """Fill ``peaks``, one contender after the other."""
    processes.require_pss()
    peaks.case, peaks.precision = settings.case(settings.model), settings.precision
    for name in to_run(settings):
        peak = Peak()
        peak.failure = attempt(lambda name=name, peak=peak: _observe(name, peak, settings, place), device)  # type: ignore[misc]
        total = torch.tensor([peak.host, peak.device], dtype=torch.int64, device=device)
        peak.host, peak.device = (int(value) for value in comm.all_reduce(total).tolist())
        peaks.found[name] = peak
        if place.rank == 0:
            print(f"{TITLES[name]}: {peak.failure or f'{peak.total / MIB:.0f} MiB'}", flush=True)


def report(output: Report, peaks: Peaks, interrupted: bool) -> None:
    """A table, least memory first, and its files."""
    reference = output.settings.reference
    reasons = {
        name: peak.failure or judging.objection(name, peaks.found, peaks.precision)
        for name, peak in peaks.found.items()
    }
    right = {name: peak for name, peak in peaks.found.items() if reasons[name] is None}
    base = right[reference].total if reference in right else None
    ranked = sorted(right, key=lambda name: right[name].total)
    rows = [["", "host MiB", "device MiB", f"of {TITLES[reference]}"]]
    for name in ranked:
        peak = right[name]
        ratio = f"{peak.total / base:.2f}" if base else "-"
        rows.append([TITLES[name], f"{peak.host / MIB:.0f}", f"{peak.device / MIB:.0f}", ratio])
    title = (
        f"{peaks.case.shape if peaks.case else ''}, peak of the whole job above its imports, {STEPS} steps"
    )
    left_out = [f"{TITLES[name]}: not ranked: {reason}" for name, reason in reasons.items() if reason]
    ratios = {TITLES[name]: spread([right[name].total / base]) for name in ranked} if base else {}
    bars = (f"peak memory over {TITLES[reference]}'s (less is better)", {title: ratios})
    results = {"steps": STEPS, "reference": reference, "contenders": _as_json(peaks, reasons, base)}
    output.write(results, "\n".join([title, *aligned(rows), *left_out]), bars, interrupted)


def _observe(name: str, peak: Peak, settings: Settings, place: Place) -> None:
    """On local rank 0 start the contender's processes and look at them; elsewhere wait for that."""
    key = meeting_of(name)
    alone = dataclasses.replace(settings, contenders=(name,), threads=torch.get_num_threads())
    first = place.rank - place.local_rank
    if place.local_rank == 0:
        try:
            seen = processes.run(
                "shardtrain.bench.memory_rank",
                json.dumps(dataclasses.asdict(alone)),
                [_environment(place, first, local) for local in range(place.local_world_size)],
            )
            by_step = zip(*(answer["losses"] for answer in seen.answers), strict=True)
            peak.losses = [sum(losses) / len(losses) for losses in by_step]
            peak.host, peak.device = seen.peak, sum(answer["device_bytes"] for answer in seen.answers)
        finally:
            if place.world_size > 1:
                place.store.set(f"{key}/done/{place.rank}", "")
    leaders = range(0, place.world_size, place.local_world_size) if place.world_size > 1 else ()
    while not all(place.store.check([f"{key}/done/{leader}"]) for leader in leaders):
        time.sleep(0.1)


def _environment(place: Place, first: int, local: int) -> dict[str, str]:
    if place.world_size == 1:
        return {}
    # The launcher's store is up already: nobody is to start another one at its address.
    return {"RANK": str(first + local), "LOCAL_RANK": str(local), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _as_json(peaks: Peaks, reasons: dict[str, str | None], base: int | None) -> dict[str, Any]:
    return {
        name: {
            "reason": reasons[name],
            "host_bytes": peak.host,
            "device_bytes": peak.device,
            "ratio": peak.total / base if base and reasons[name] is None else None,
            "losses": peak.losses,
        }
        for name, peak in peaks.found.items()
    }
