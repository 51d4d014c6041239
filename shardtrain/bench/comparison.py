"""From what contenders have measured to what is said of them: plain arithmetic, to be checked by hand.

A ratio is taken within a round, where both contenders met the same machine, and the median is taken over
rounds. Three rounds in which A takes 2, 3, 8 s and B takes 1, 2, 4 s give the ratios 2, 1.5, 2: median 2.
Only contenders whose losses are right are compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.interleave import Samples

# Rounding starts at 1e-7 and grows with every update: 5e-5 within 5 steps of a ResNet on 4 ranks, 3e-3 within
# 16. Training without communication is off by more than 5e-4 within the 5 steps (suite and tiny).
# bf16 rounds to 4e-3 at every operation, and contenders keep different layers in fp32: there the losses
# tell a gross mistake from none, and no more.
EARLY_STEPS, LATE = 5, 5e-2
EARLY = {"fp32": 2e-4, "bf16": 2e-2}

# Trusted in this order to have the right losses. An exempt contender trains alone, on each rank's own data.
JUDGES = ("ddp", "zero1", "fsdp2", "fsdp1", "fsdp2_no_reshard")
EXEMPT = ("no_communication",)


@dataclass(frozen=True)
class Spread:
    """The median of ``n`` values and the quartiles about it."""

    median: float
    low: float
    high: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Return the spread of at least one value."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high, len(values))


def ratios(values: Sequence[float], reference: Sequence[float]) -> Spread | None:
    """Return the spread of the ratios in rounds that both have finished; None if there is none."""
    each = [own / other for own, other in zip(values, reference, strict=False)]
    return spread(each) if each else None


def loss_difference(losses: Sequence[float], right: Sequence[float]) -> float:
    """Return the largest difference at any step, as a fraction of the right loss; infinity for NaN."""
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, right, strict=False)]
    return math.inf if any(map(math.isnan, differences)) else max(differences, default=0.0)


def losses_agree(losses: Sequence[float], right: Sequence[float], precision: str = "fp32") -> bool:
    """Return whether losses are equal but for rounding: strictly in early steps, loosely in later ones."""
    early = loss_difference(losses[:EARLY_STEPS], right[:EARLY_STEPS])
    return early <= EARLY[precision] and loss_difference(losses, right) <= LATE


@dataclass(frozen=True)
class Verdict:
    """What is said of one contender. ``status``: ok, wrong (other losses than the judge's) or failed."""

    status: str
    reason: str | None = None
    value: Spread | None = None
    ratio: Spread | None = None  # to the reference
    loss_difference: float | None = None  # relative to the judge's losses


@dataclass
class Comparison:
    """What the contenders of one measurement have done so far; ``reference`` is one of them."""

    reference: str
    precision: str = "fp32"
    samples: dict[str, Samples] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return max((len(samples.values) for samples in self.samples.values()), default=0)

    @property
    def judge(self) -> str | None:
        """The most trusted contender that has not failed: its losses count as right."""
        done = [name for name, samples in self.samples.items() if samples.failure is None]
        return next((name for name in JUDGES if name in done), None)

    def verdicts(self) -> dict[str, Verdict]:
        return {name: self._verdict(name) for name in self.samples}

    def ranked(self) -> dict[str, Verdict]:
        """Return the verdicts of those that are right, least first."""
        right = {name: verdict for name, verdict in self.verdicts().items() if verdict.value is not None}
        return dict(sorted(right.items(), key=lambda item: (item[1].ratio or item[1].value).median))  # type: ignore[union-attr]

    def ratios_to(self, reference: str) -> dict[str, Spread]:
        """Return the ratios of those that are right, least first; none if the reference is not right."""
        verdicts = Comparison(reference, self.precision, self.samples).ranked()
        return {name: verdict.ratio for name, verdict in verdicts.items() if verdict.ratio is not None}

    def bars(self) -> dict[str, Spread]:
        """Return by title what a chart shows."""
        return {TITLES[name]: ratio for name, ratio in self.ratios_to(self.reference).items()}

    def left_out(self) -> list[str]:
        """Return a line for each contender that is not ranked, and one for what could not be compared."""
        ranked, lines = self.ranked(), []
        if ranked and self.reference not in ranked:
            lines.append(f"No ratios: {TITLES[self.reference]} has no right answers to compare with.")
        if ranked and self.judge is None:
            lines.append("Losses were not compared: no peer is among the contenders.")
        for name, verdict in self.verdicts().items():
            if name not in ranked:
                lines.append(f"{TITLES[name]}: {verdict.status}, not ranked: {verdict.reason}")
        return lines

    def _verdict(self, name: str) -> Verdict:
        own, judge = self.samples[name], self.judge
        if own.failure is not None or not own.values:
            return Verdict("failed", own.failure or "interrupted before its first timed round")
        difference = None
        if judge is not None:
            right = self.samples[judge].losses
            difference = loss_difference(own.losses, right)
            if name not in EXEMPT and not losses_agree(own.losses, right, self.precision):
                reason = f"losses differ from {judge}'s by up to {difference:.1e} of their value"
                return Verdict("wrong", reason, loss_difference=difference)
        if name == self.reference:
            base = own
        else:
            known = self.reference in self.samples and self._verdict(self.reference).status == "ok"
            base = self.samples[self.reference] if known else Samples()
        return Verdict("ok", None, spread(own.values), ratios(own.values, base.values), difference)
