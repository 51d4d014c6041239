"""The measurement: in each round every runner once, in an order that rotates, with a barrier before each.

A runner's time is that of the slowest rank. A runner that raises, on whichever rank, leaves the measurement
on all of them, with its reason; the others go on. What has been measured is kept in `Track`s that the caller
holds, so that a Ctrl-C loses no more than the round under way.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import NamedTuple, Protocol

import torch

from shardtrain import comm
from shardtrain.job.schema import UserError

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


# From seconds to ratios: plain arithmetic on lists, so that it can be checked by hand.
#
# A ratio is taken within a round, where both contenders met the same machine, and the median is taken over
# rounds. Three rounds in which A takes 2, 3, 8 s and B takes 1, 2, 4 s give the ratios 2, 1.5, 2: median 2.

# Rounding starts at 1e-7 and grows with every update: 5e-5 within 5 steps of a ResNet on 4 ranks, 3e-3 within
# 16. Training without communication is off by more than 5e-4 within the 5 steps (suite and tiny).
# bf16 rounds to 4e-3 at every operation, and contenders keep different layers in fp32: there the losses
# tell a gross mistake from none, and no more.
EARLY_STEPS, LATE = 5, 5e-2
EARLY = {"fp32": 2e-4, "bf16": 2e-2}


class Spread(NamedTuple):
    """The median of ``n`` values and the quartiles about it."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """At least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> Spread:
    """Of the rounds that both have finished."""
    return spread([own / other for own, other in zip(seconds, reference, strict=False)])


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def loss_difference(losses: Sequence[float], right: Sequence[float]) -> float:
    """The largest difference at any step, as a fraction of the right loss; NaN never passes for equal."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, right, strict=False)]
    if any(math.isnan(difference) for difference in differences):
        return math.inf
    return max(differences, default=0.0)


def losses_agree(losses: Sequence[float], right: Sequence[float], precision: str = "fp32") -> bool:
    """Equal but for rounding: strictly in the first steps, loosely once rounding has grown."""
    early = loss_difference(losses[:EARLY_STEPS], right[:EARLY_STEPS])
    return early <= EARLY[precision] and loss_difference(losses, right) <= LATE


# Whose losses count as right, and who is not ranked because of others.

# Trusted in this order to have the right losses. It never trains alone: each rank has data of its own.
JUDGES = ("ddp", "zero1", "fsdp2", "fsdp1", "fsdp2_no_reshard")
EXEMPT = ("no_communication",)


class Trained(Protocol):
    """What a contender's training has come to."""

    losses: list[float]
    failure: str | None


def judge_of(found: Mapping[str, Trained]) -> str | None:
    """The most trusted of those that have not failed."""
    return next((name for name in JUDGES if name in found and found[name].failure is None), None)


def difference(name: str, found: Mapping[str, Trained]) -> float | None:
    """Of the losses of ``name`` from the judge's, as a fraction of these; None if nobody judges."""
    judge = judge_of(found)
    return None if judge is None else loss_difference(found[name].losses, found[judge].losses)


def objection(name: str, found: Mapping[str, Trained], precision: str) -> str | None:
    """Why the losses of ``name`` are wrong, if they are."""
    judge = judge_of(found)
    if judge is None or name in EXEMPT or losses_agree(found[name].losses, found[judge].losses, precision):
        return None
    return f"losses differ from {judge}'s by up to {difference(name, found):.1e} of their value"


# Progress of a long measurement: a bar on a terminal, otherwise a line now and then; rank 0 alone.

WIDTH = 24  # characters of the bar
MOST_ROUNDS = 20  # between two lines


class Progress:
    """``tick()`` after each of ``rounds`` rounds; about ``lines`` lines where there is no terminal."""

    def __init__(self, title: str, rounds: int, speaks: bool, lines: int = 5) -> None:
        self.title, self.rounds, self.speaks = title, rounds, speaks
        self.every = max(1, min(rounds // lines, MOST_ROUNDS))
        self.done = 0
        self.started = time.perf_counter()
        self.bar = sys.stdout.isatty()

    def tick(self) -> None:
        self.done += 1
        if not self.speaks:
            return
        if self.bar:
            filled = WIDTH * self.done // self.rounds
            drawn = "█" * filled + "·" * (WIDTH - filled)
            end = "\r\x1b[K" if self.done == self.rounds else ""
            print(f"\r\x1b[K{drawn} {self._report()}", end=end, flush=True)
        elif self.done % self.every == 0 or self.done == self.rounds:
            print(self._report(), flush=True)

    def _report(self) -> str:
        left = (time.perf_counter() - self.started) / self.done * (self.rounds - self.done)
        return f"{self.title}  round {self.done}/{self.rounds}  {left:.0f} s left"
