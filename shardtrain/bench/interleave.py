"""The measurement: in each round every runner once, in an order that rotates, with a barrier before each.

A runner's time is that of the slowest rank. A runner that raises, on whichever rank, leaves the measurement
on all of them, with its reason; the others go on. The caller holds the `Samples`, so that Ctrl-C loses no
more than the round under way.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from shardtrain import comm
from shardtrain.device import synchronize
from shardtrain.job.schema import UserError

# Does the timed work of a round; the scalar that it returns, a loss, is recorded as the mean over ranks.
Runner = Callable[[int], torch.Tensor]
Result = TypeVar("Result")

WIDTH = 24  # characters of the progress bar
MOST_ROUNDS = 20  # between two lines of progress


@dataclass
class Samples:
    """What one runner has measured: a value (seconds, say) for every timed round, a loss for every round."""

    values: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failure: str | None = None


def interleave(
    runners: Mapping[str, Runner],
    samples: Mapping[str, Samples],
    device: torch.device,
    *,
    warmup: int,
    rounds: int,
    title: str = "",
    lines: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run each round's runners that have not failed, and add seconds and losses to ``samples``.

    Args:
        warmup: rounds before the ``rounds`` that are timed.
        title: what is measured, if progress is to be shown; in about ``lines`` lines.
        clock: returns seconds.
    """
    for number in _shown(warmup + rounds, title, lines):
        order = deque(name for name in runners if samples[name].failure is None)
        order.rotate(-number)
        done = {name: _run(runners[name], number, samples[name], device, clock) for name in order}
        for name, outcome in done.items():
            if outcome is not None:
                seconds, loss = outcome
                samples[name].losses.append(loss)
                samples[name].values += [seconds] if number >= warmup else []


def attempt(work: Callable[[], Result], samples: Samples, device: torch.device) -> Result | None:
    """Return what ``work()`` returns, or None if it raised on any rank.

    ``samples.failure`` is then what the first such rank raised, on every rank. A mistake of the user's is the
    same on every rank, and comes through. Collective.
    """
    result, reason = None, ""
    try:
        result = work()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0][:300]
    world = comm.world_size()
    failed = torch.tensor(world - comm.rank() if reason else 0, device=device)
    first = world - int(comm.all_reduce(failed, "max").item())
    if first == world:
        return result
    samples.failure = comm.broadcast_text(reason, comm.plain_transport(), device, src=first)
    return None


def _run(
    runner: Runner, number: int, samples: Samples, device: torch.device, clock: Callable[[], float]
) -> tuple[float, float] | None:
    """Return the seconds of the slowest rank and the mean loss, or None if the runner failed."""

    def timed() -> tuple[float, float]:
        start = clock()
        loss = runner(number)
        synchronize(device)
        return clock() - start, loss.item()

    synchronize(device)
    comm.barrier()
    outcome = attempt(timed, samples, device)
    if outcome is None:
        return None
    seconds, loss = (torch.tensor(value, dtype=torch.float64, device=device) for value in outcome)
    return comm.all_reduce(seconds, "max").item(), comm.all_reduce(loss).item() / comm.world_size()


def _shown(rounds: int, title: str, lines: int) -> Iterator[int]:
    """Yield the number of every round; show progress on rank 0, as a bar on a terminal, else as lines."""
    every = max(1, min(rounds // lines, MOST_ROUNDS))
    started = time.perf_counter()
    for done in range(1, rounds + 1):
        yield done - 1
        if not title or comm.rank() > 0:
            continue
        left = (time.perf_counter() - started) / done * (rounds - done)
        text = f"{title}  round {done}/{rounds}  {left:.0f} s left"
        if sys.stdout.isatty():
            bar = ("█" * (WIDTH * done // rounds)).ljust(WIDTH, "·")
            print(f"\r\x1b[K{bar} {text}", end="\r\x1b[K" if done == rounds else "", flush=True)
        elif done % every == 0 or done == rounds:
            print(text, flush=True)
