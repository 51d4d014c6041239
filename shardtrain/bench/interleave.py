"""Measure runners in rounds: each runner once per round, in a rotating order, with a barrier before each.

A runner's time is that of the slowest rank. A runner that raises on any rank leaves the measurement on all
ranks, with its reason; the others continue. The caller holds the `Samples`, so Ctrl-C loses only the current
round.

Ratios are computed within a round, in which both contenders had the same conditions, and their median over
rounds. Three rounds in which A takes 2, 3, 8 s and B takes 1, 2, 4 s give the ratios 2, 1.5, 2: median 2.
Only contenders with right losses are compared.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple, TypeVar

import torch

from shardtrain import comm
from shardtrain.bench.contenders import TITLES
from shardtrain.device import synchronize
from shardtrain.job.schema import UserError

# Runs the timed work of a round. If it returns a scalar (a loss), its mean over ranks is recorded.
Runner = Callable[[int], torch.Tensor | None]
Result = TypeVar("Result")

PROGRESS_S = 2.0  # seconds between two lines of progress


class Footprint(NamedTuple):
    """Hold what a contender takes on an accelerator."""

    peak: int  # bytes of tensors
    reserved: int  # bytes, by torch's allocator
    launches: int  # kernels, copies and collectives per step


@dataclass
class Samples:
    """Hold one runner's measurements."""

    values: list[float] = field(default_factory=list)  # one per timed round, such as seconds
    losses: list[float] = field(default_factory=list)  # one per round
    failure: str | None = None
    host: list[float] = field(default_factory=list)  # seconds until all work of a timed round was launched
    footprint: Footprint | None = None


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


# Verdicts, by plain arithmetic.
#
# Rounding differences begin at 1e-7 and grow with every update: 5e-5 within 5 steps of a ResNet on 4 ranks,
# 3e-3 within 16. Training without communication differs by more than 5e-4 within 5 steps (suite and tiny).
# bf16 rounds to 4e-3 at every operation, and contenders keep different layers in fp32. There losses only
# show gross mistakes.
EARLY_STEPS, LATE = 5, 5e-2
EARLY = {"fp32": 2e-4, "bf16": 2e-2}

# Losses must equal those of the first of these that takes part. Exempt ones train on own data, or round.
JUDGES = ("ddp", "fsdp2", "fsdp1", "fsdp2_no_reshard")
EXEMPT = ("no_communication", "shardtrain_int8", "shardtrain_bf16")


@dataclass(frozen=True)
class Spread:
    """Hold the median of ``n`` values and their quartiles."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread | None:
    """Return the spread of ``values``; None if there are none."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0], 1) if values else None
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratios(values: Sequence[float], reference: Sequence[float]) -> Spread | None:
    """Return the spread of the ratios over rounds that both have finished; None if there are none."""
    return spread([own / other for own, other in zip(values, reference, strict=False)])


def loss_difference(losses: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference at any step, as a fraction of the right loss; infinity for NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, right, strict=False)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def losses_agree(losses: Sequence[float], right: Sequence[float], precision: str = "fp32") -> bool:
    """Return whether losses are equal up to rounding: strictly in early steps, loosely in later ones."""
    early = loss_difference(losses[:EARLY_STEPS], right[:EARLY_STEPS])
    return early <= EARLY[precision] and loss_difference(losses, right) <= LATE


class Verdict(NamedTuple):
    """Hold the verdict on one contender. ``status``: ok, wrong (losses differ from the judge's) or failed."""

    status: str
    reason: str | None = None
    loss_difference: float | None = None  # relative to the judge's losses


@dataclass
class Comparison:
    """Compare the contenders of one measurement so far; ``reference`` is one of them."""

    reference: str
    precision: str = "fp32"
    samples: dict[str, Samples] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return max((len(samples.values) for samples in self.samples.values()), default=0)

    @property
    def judge(self) -> str | None:
        """The first of JUDGES that has not failed: its losses count as right."""
        done = [name for name, samples in self.samples.items() if samples.failure is None]
        return next((name for name in JUDGES if name in done), None)

    def verdict(self, name: str) -> Verdict:
        """Return whether a contender failed, or its losses differ from the judge's."""
        own, judge = self.samples[name], self.judge
        if own.failure is not None or not own.values:
            return Verdict("failed", own.failure or "interrupted before its first timed round")
        right = [] if judge is None else self.samples[judge].losses
        difference = loss_difference(own.losses, right)
        if name not in EXEMPT and not losses_agree(own.losses, right, self.precision):
            reason = f"losses differ from {judge}'s by up to {difference:.1e} of their value"
            return Verdict("wrong", reason, difference)
        return Verdict("ok", None, None if judge is None else difference)

    def losses_in_words(self, name: str) -> str:
        difference = self.verdict(name).loss_difference
        if difference is None:
            return "not compared"
        return f"{'differ by' if name in EXEMPT else 'equal to'} {difference:.0e}"

    def right(self) -> dict[str, list[float]]:
        """Return the values of the contenders with right losses."""
        return {name: own.values for name, own in self.samples.items() if self.verdict(name).status == "ok"}

    def ratios_to(self, reference: str) -> dict[str, Spread]:
        """Return the ratios of contenders with right losses, lowest first; none if the reference is wrong."""
        right = self.right()
        spreads = {name: ratios(values, right.get(reference, [])) for name, values in right.items()}
        known = {name: ratio for name, ratio in spreads.items() if ratio is not None}
        return dict(sorted(known.items(), key=lambda item: item[1].median))

    def ranked(self) -> list[str]:
        """Return the names of the contenders with right losses, the fastest or smallest first."""
        right = self.right()
        return list(self.ratios_to(self.reference)) or sorted(right, key=lambda name: median(right[name]))

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return each contender's verdict, ratio to the reference and losses, for bench.json."""
        ratios = self.ratios_to(self.reference)
        return {
            name: {**self.verdict(name)._asdict(), "ratio": ratios.get(name), "losses": own.losses}
            for name, own in self.samples.items()
        }

    def left_out(self) -> list[str]:
        """Return one line per contender that is not ranked, and one if ratios or losses are not compared."""
        ranked, lines = self.ranked(), []
        if ranked and self.reference not in ranked:
            lines.append(f"No ratios: {TITLES[self.reference]} has no right answers to compare with.")
        if ranked and self.judge is None:
            lines.append("Losses were not compared: no peer is among the contenders.")
        for name in self.samples:
            verdict = self.verdict(name)
            if name not in ranked:
                lines.append(f"{TITLES[name]}: {verdict.status}, not ranked: {verdict.reason}")
        return lines
