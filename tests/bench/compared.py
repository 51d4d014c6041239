"""Compare measurements, by plain arithmetic: ratios, verdicts on losses, a table; and write them as JSON.

Ratios are computed within a round, in which both contenders had the same conditions, and their median over
rounds. Three rounds in which A takes 2, 3, 8 s and B takes 1, 2, 4 s give the ratios 2, 1.5, 2: median 2.
Only contenders with right losses are compared.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from shardtrain import comm
from shardtrain import device as devices

from contenders import TITLES
from rounds import Samples
from settings import Settings

Facts = dict[str, dict[str, Any]]  # by contender, what JSON has of it

# Rounding differences begin at 1e-7 and grow with every update: 5e-5 within 5 steps of a ResNet on 4 ranks,
# 3e-3 within 16. Training without communication differs by more than 5e-4 within 5 steps (suite and tiny).
# bf16 rounds to 4e-3 at every operation, and contenders keep different layers in fp32. There losses only
# show gross mistakes.
EARLY_STEPS = 5
EARLY = {"fp32": 2e-4, "bf16": 2e-2}
LATE = 5e-2

# Losses must equal those of the first of these that takes part. Exempt ones train on their own data.
JUDGES = ("ddp", "fsdp2", "fsdp1")
EXEMPT = ("no_communication", "bound")


def ratios(values: Sequence[float], reference: Sequence[float]) -> dict[str, float] | None:
    """Return the median and the quartiles of the ratios over rounds that both have finished, if any."""
    quotients = [value / other for value, other in zip(values, reference, strict=False)]
    if not quotients:
        return None
    several = quotients if len(quotients) > 1 else 2 * quotients
    low, middle, high = quantiles(several, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high, "n": len(quotients)}


def loss_difference(losses: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference at any step, as a fraction of the right loss; infinity for NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, right, strict=False)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def losses_agree(losses: Sequence[float], right: Sequence[float], precision: str = "fp32") -> bool:
    """Return whether losses are equal up to rounding: strictly in early steps, loosely in later ones."""
    early = loss_difference(losses[:EARLY_STEPS], right[:EARLY_STEPS])
    return early <= EARLY[precision] and loss_difference(losses, right) <= LATE


def compared(samples: Mapping[str, Samples], references: Sequence[str], precision: str) -> Facts:
    """Return measurements, problems and ratios to ``references``. Without a problem a contender is right."""
    working = [name for name, own in samples.items() if own.failure is None]
    judge = next((name for name in JUDGES if name in working), None)
    right = samples[judge].losses if judge else []
    facts: Facts = {}
    for name, own in samples.items():
        problem = own.failure
        difference = loss_difference(own.losses, right)
        agrees = judge is None or name in EXEMPT or losses_agree(own.losses, right, precision)
        if problem is None and not own.values:
            problem = "interrupted before its first timed round"
        elif problem is None and not agrees:
            problem = f"losses differ from {judge}'s by up to {difference:.1e} of their value"
        facts[name] = {**asdict(own), "judge": judge, "loss_difference": difference, "problem": problem}
        facts[name]["ratios"] = {}
    fine = [name for name in samples if facts[name]["problem"] is None]
    for reference in dict.fromkeys(references):
        for name in fine if reference in fine else ():
            facts[name]["ratios"][reference] = ratios(samples[name].values, samples[reference].values)
    return facts


def table(title: str, facts: Facts, unit: str, scale: float) -> str:
    """Return a row per contender, best first, and a line for each problem. ``scale``: to ``unit``."""
    fine = [name for name in facts if facts[name]["problem"] is None]
    rows = [
        _row(facts[name], name, unit, scale)
        for name in sorted(fine, key=lambda n: median(facts[n]["values"]))
    ]
    cells = [[*row] for row in rows[:1]] + [[*row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["", title]
    for first, *others in cells:
        aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *aligned]))
    if any(own["judge"] is None for own in facts.values()):
        lines.append("Losses were not compared: no peer is among the contenders.")
    problems = [name for name in facts if name not in fine]
    return "\n".join([*lines, *(f"{TITLES[name]}: {facts[name]['problem']}" for name in problems)])


def _row(facts: Mapping[str, Any], name: str, unit: str, scale: float) -> dict[str, str]:
    """Return the cells of a row, by the titles of their columns."""
    row = {"": TITLES[name], unit: f"{median(facts['values']) * scale:.1f}"}
    for reference, ratio in facts["ratios"].items():
        quartiles = f" ({ratio['low']:.2f}–{ratio['high']:.2f})" if len(row) == 2 and ratio["n"] > 1 else ""
        row[f"of {TITLES[reference]}"] = f"{ratio['median']:.2f}{quartiles}"
    row["losses"] = f"{'differ by' if name in EXEMPT else 'equal to'} {facts['loss_difference']:.0e}"
    if facts["footprint"]:
        row["host ms"] = f"{median(facts['host']) * 1e3:.1f}"
        row |= {title: f"{value:,}" for title, value in facts["footprint"].items()}
    return row


def write(settings: Settings, device: torch.device, cases: Mapping[str, Facts]) -> None:
    """Write the cases, by their titles, and what their figures depend on."""
    conditions = {
        "cpu": devices.processor(),
        "gpu": devices.name(device) if devices.is_accelerator(device) else None,
        "ranks": comm.world_size(),
        "threads_per_rank": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    results = {"settings": asdict(settings), "conditions": conditions, "cases": cases}
    Path(settings.out).write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwritten to {settings.out}", flush=True)
