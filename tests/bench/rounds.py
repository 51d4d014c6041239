"""Measure runners in rounds: each runner once per round, in a rotating order, with a barrier before each.

A runner's time is that of the slowest rank. A runner that raises on any rank leaves the measurement on all
ranks, with its reason; the others continue. The caller holds the `Samples`, so Ctrl-C loses only the current
round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from shardtrain import comm
from shardtrain.device import synchronize

Runner = Callable[[int], torch.Tensor]  # runs the timed work of a round; returns its loss
Result = TypeVar("Result")


@dataclass
class Samples:
    """One runner's measurements."""

    values: list[float] = field(default_factory=list)  # seconds of the timed rounds; or bytes
    losses: list[float] = field(default_factory=list)  # of all rounds, means over ranks
    failure: str | None = None
    host: list[float] = field(default_factory=list)  # seconds until all work of a timed round was launched
    footprint: dict[str, int] = field(default_factory=dict)  # what it takes on an accelerator


def interleave(
    runners: Mapping[str, Runner],
    samples: Mapping[str, Samples],
    device: torch.device,
    warmup: int,
    rounds: int,
    title: str,
) -> None:
    """Run the runners that have not failed in each round, and add seconds and losses to ``samples``.

    ``warmup`` rounds come before the ``rounds`` that are timed.
    """
    for number in range(warmup + rounds):
        order = deque(name for name in runners if samples[name].failure is None)
        order.rotate(-number)
        for name in order:
            _run(runners[name], number, samples[name], device, timed=number >= warmup)
        if comm.rank() == 0:
            print(f"{title}  round {number + 1}/{warmup + rounds}", flush=True)


def attempt(work: Callable[[], Result], samples: Samples) -> Result | None:
    """Return ``work()``, or None if it raised on any rank. Collective.

    ``samples.failure`` is then the error of the first such rank, on every rank.
    """
    result = None
    reason = ""
    try:
        result = work()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0][:300]
    samples.failure = next(filter(None, comm.gather_texts(reason, comm.plain_transport())), None)
    return result if samples.failure is None else None


def _run(runner: Runner, number: int, samples: Samples, device: torch.device, timed: bool) -> None:
    """Run one round of one runner; add the slowest rank's seconds and the mean loss, unless it fails."""

    def measured() -> tuple[float, float, float]:
        start = time.perf_counter()
        loss = runner(number)
        launched = time.perf_counter()
        synchronize(device)
        return time.perf_counter() - start, launched - start, loss.item()

    synchronize(device)
    comm.barrier()
    outcome = attempt(measured, samples)
    if outcome is None:
        return
    *seconds, loss = torch.tensor(outcome, dtype=torch.float64, device=device).split(1)
    slowest, host = (comm.all_reduce(each, "max").item() for each in seconds)
    samples.losses.append(comm.all_reduce(loss).item() / comm.world_size())
    if timed:
        samples.values.append(slowest)
        samples.host.append(host)
