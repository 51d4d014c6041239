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
from shardtrain.job.errors import UserError

# Runs the timed work of a round. If it returns a scalar (a loss), its mean over ranks is recorded.
Runner = Callable[[int], torch.Tensor | None]
Result = TypeVar("Result")

PROGRESS_S = 2.0  # seconds between two lines of progress


@dataclass
class Samples:
    """Hold one runner's measurements."""

    values: list[float] = field(default_factory=list)  # one per timed round, such as seconds
    losses: list[float] = field(default_factory=list)  # one per round
    failure: str | None = None
    host: list[float] = field(default_factory=list)  # seconds until all work of a timed round was launched
    footprint: dict[str, int] = field(default_factory=dict)  # what it takes on an accelerator


def interleave(
    runners: Mapping[str, Runner],
    samples: Mapping[str, Samples],
    device: torch.device,
    warmup: int,
    rounds: int,
    title: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run the runners that have not failed in each round, and add seconds and losses to ``samples``.

    ``warmup`` rounds come before the ``rounds`` that are timed. Without a ``title`` no progress is shown.
    """
    total = warmup + rounds
    started = shown = time.perf_counter()
    for number in range(total):
        order = deque(name for name in runners if samples[name].failure is None)
        order.rotate(-number)
        done = {name: _run(runners[name], number, samples[name], device, clock) for name in order}
        for name, outcome in done.items():
            if outcome is not None:
                seconds, host, loss = outcome
                samples[name].losses.append(loss)
                samples[name].values += [seconds] if number >= warmup else []
                samples[name].host += [host] if number >= warmup else []
        now, done_rounds = time.perf_counter(), number + 1
        if title and comm.rank() == 0 and (now - shown > PROGRESS_S or done_rounds == total):
            shown, left = now, (now - started) / done_rounds * (total - done_rounds)
            print(f"{title}  round {done_rounds}/{total}  {left:.0f} s left", flush=True)


def attempt(work: Callable[[], Result], samples: Samples, device: torch.device) -> Result | None:
    """Return ``work()``, or None if it raised on any rank. Collective.

    ``samples.failure`` is then the error of the first such rank, on every rank. Raises UserError, which is
    the same on every rank.
    """
    result, reason = None, ""
    try:
        result = work()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0][:300]
    samples.failure = next(filter(None, comm.gather_texts(reason, comm.plain_transport())), None)
    return result if samples.failure is None else None


def _run(
    runner: Runner, number: int, samples: Samples, device: torch.device, clock: Callable[[], float]
) -> tuple[float, ...] | None:
    """Return the slowest rank's seconds and host seconds, and the mean loss; None if the runner failed."""

    def timed() -> tuple[float, ...]:
        start = clock()
        loss = runner(number)
        host = clock() - start
        synchronize(device)
        return clock() - start, host, 0.0 if loss is None else loss.item()

    synchronize(device)
    comm.barrier()
    outcome = attempt(timed, samples, device)
    if outcome is None:
        return None
    *slowest, loss = torch.tensor(outcome, dtype=torch.float64, device=device).split(1)
    seconds = [comm.all_reduce(each, "max").item() for each in slowest]
    return *seconds, comm.all_reduce(loss).item() / comm.world_size()
