"""The measurement: in each round every runner once, in an order that rotates, with a barrier before each.

A runner's time is that of the slowest rank. A runner that raises, on whichever rank, leaves the measurement
on all of them, with its reason; the others go on. What has been measured is kept in `Track`s that the caller
holds, so that a Ctrl-C loses no more than the round under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardtrain import comm
from shardtrain.errors import UserError

# Does the timed work; the scalar it returns, a loss, is recorded as the mean over ranks.
Runner = Callable[[int], torch.Tensor]


@dataclass
class Track:
    """What one runner has done: ``losses`` of every round, ``seconds`` of the timed ones."""

    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failure: str | None = None


def interleave(
    runners: Mapping[str, Runner],
    tracks: Mapping[str, Track],
    device: torch.device,
    *,
    warmup: int,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run each round's runners that have not failed, adding to ``tracks``; ``tick()`` after each round.

    ``warmup``: rounds before the ``rounds`` that are timed. ``clock()``: seconds.
    """
    for number in range(warmup + rounds):
        done: dict[str, tuple[float, float]] = {}
        for name in rotated([name for name in runners if tracks[name].failure is None], number):
            outcome = _run(runners[name], number, device, clock)
            if isinstance(outcome, str):
                tracks[name].failure = outcome
            else:
                done[name] = outcome
        for name, (seconds, loss) in done.items():
            tracks[name].losses.append(loss)
            if number >= warmup:
                tracks[name].seconds.append(seconds)
        tick()


def rotated(names: Sequence[str], by: int) -> list[str]:
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


def attempt(work: Callable[[], object], device: torch.device) -> str | None:
    """Do ``work`` on every rank; the first failing rank's reason, on every rank, if it failed on any.

    A mistake of the user's is no failure of the work's: it is the same on every rank, and comes through.
    """
    reason = None
    try:
        work()
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().split("\n", 1)[0][:300]
    return _agreed(reason, device)


def _run(
    runner: Runner, number: int, device: torch.device, clock: Callable[[], float]
) -> tuple[float, float] | str:
    """Seconds of the slowest rank and the mean loss, or why it failed."""
    found: list[tuple[float, float]] = []

    def work() -> None:
        start = clock()
        loss = runner(number)
        synchronize(device)
        found.append((clock() - start, loss.item()))

    synchronize(device)
    comm.barrier()
    reason = attempt(work, device)
    if reason is not None:
        return reason
    seconds, loss = found[0]
    slowest = comm.all_reduce(torch.tensor(seconds, dtype=torch.float64, device=device), "max")
    total = comm.all_reduce(torch.tensor(loss, dtype=torch.float64, device=device))
    return slowest.item(), total.item() / comm.world_size()


def _agreed(reason: str | None, device: torch.device) -> str | None:
    world = comm.world_size()
    place = world - comm.rank() if reason is not None else 0
    highest = int(comm.all_reduce(torch.tensor(place, device=device), "max").item())
    if highest == 0:
        return None
    return comm.broadcast_text(reason or "", comm.plain_transport(), device, src=world - highest)


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
