"""From seconds to ratios: plain arithmetic on lists, so that it can be checked by hand.

A ratio is taken within a round, where both contenders met the same machine, and the median is taken over
rounds. Three rounds in which A takes 2, 3, 8 s and B takes 1, 2, 4 s give the ratios 2, 1.5, 2: median 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import quantiles
from typing import NamedTuple

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
