"""Peak memory of the whole job, each contender in fresh processes, above what imports take.

The rank with local rank 0 starts as many processes as its host has ranks, which meet among themselves and
train a few steps while it watches them. One contender at a time, so that nothing is shared between two.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from shardtrain import comm
from shardtrain.bench import watch
from shardtrain.bench.cases import Case
from shardtrain.bench.contenders import EXEMPT, JUDGES, TITLES
from shardtrain.bench.interleave import attempt
from shardtrain.bench.memory_rank import Task
from shardtrain.bench.report import Report
from shardtrain.bench.settings import Settings
from shardtrain.bench.statistics import loss_difference, losses_agree, spread
from shardtrain.bench.steps import case_of, to_run
from shardtrain.launch import Place
from shardtrain.text import MIB, aligned

STEPS = 5  # the optimizer's state is there after the first; allocators settle in the next


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
    watch.require_pss()
    peaks.case, peaks.precision = case_of(settings, settings.model), settings.precision
    for name in to_run(settings):
        peak = Peak()
        peak.failure = attempt(lambda name=name, peak=peak: _watch(name, peak, settings, place), device)  # type: ignore[misc]
        total = torch.tensor([peak.host, peak.device], dtype=torch.int64, device=device)
        peak.host, peak.device = (int(value) for value in comm.all_reduce(total).tolist())
        peaks.found[name] = peak
        if place.rank == 0:
            print(f"{TITLES[name]}: {peak.failure or f'{peak.total / MIB:.0f} MiB'}", flush=True)


def report(output: Report, peaks: Peaks, interrupted: bool) -> None:
    """A table, least memory first, and its files."""
    reference = output.settings.reference
    reasons = _reasons(peaks)
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


def _watch(name: str, peak: Peak, settings: Settings, place: Place) -> None:
    """On local rank 0 start and watch the contender's processes; elsewhere wait for that."""
    key = f"shardtrain/bench/memory/{name}"
    first = place.rank - place.local_rank
    if place.local_rank == 0:
        try:
            seen = watch.watch(
                "shardtrain.bench.memory_rank",
                json.dumps(asdict(_task(name, key, settings))),
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


def _task(name: str, meeting: str, settings: Settings) -> Task:
    case = case_of(settings, settings.model)
    return Task(
        contender=name,
        model=case.name,
        image_size=case.image_size,
        batch_size=case.batch_size,
        precision=settings.precision,
        accumulate=settings.accumulate,
        optimizer=settings.optimizer,
        lr=settings.lr,
        seed=settings.seed,
        steps=STEPS,
        device=settings.device,
        threads=torch.get_num_threads(),
        meeting=meeting,
    )


def _environment(place: Place, first: int, local: int) -> dict[str, str]:
    if place.world_size == 1:
        return {}
    # The launcher's store is up already: nobody is to start another one at its address.
    return {"RANK": str(first + local), "LOCAL_RANK": str(local), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _reasons(peaks: Peaks) -> dict[str, str | None]:
    """Why a contender is not ranked, if it is not."""
    judges = [name for name in JUDGES if name in peaks.found and peaks.found[name].failure is None]
    reasons = {}
    for name, peak in peaks.found.items():
        reasons[name] = peak.failure
        if peak.failure is None and judges and name not in EXEMPT:
            right = peaks.found[judges[0]].losses
            if not losses_agree(peak.losses, right, peaks.precision):
                difference = loss_difference(peak.losses, right)
                reasons[name] = f"losses differ from {judges[0]}'s by up to {difference:.1e} of their value"
    return reasons


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
