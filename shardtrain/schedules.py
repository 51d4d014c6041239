"""The learning rate as a function of the step.

Torch has these schedules, too, but as objects that are stepped and saved; here a run that continues at some
step, on any number of ranks, needs no more than the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shardtrain.config import Cosine, Linear, Sched, Step


def lr_factor(sched: Sched, steps: int, steps_per_epoch: int) -> Callable[[int], float]:
    """The learning rate of each step from 0 on, as a fraction of `optim.lr`.

    Linear up over the warm-up (at most half the run), then what the schedule says: constant; a fraction
    less after each of some epochs; in a line, or in half a cosine, down to `final_lr` at the end.
    """
    warmup = min(round(sched.warmup_epochs * steps_per_epoch), steps // 2)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        return _after_warmup(sched, step, min(1.0, (step - warmup) / max(1, steps - warmup)), steps_per_epoch)

    return factor


def _after_warmup(sched: Sched, step: int, progress: float, steps_per_epoch: int) -> float:
    """`progress`: 0 at the end of the warm-up, 1 at the end of the run."""
    if isinstance(sched, Step):
        return math.prod(sched.factor for epoch in sched.epochs if step >= epoch * steps_per_epoch)
    if isinstance(sched, Cosine):
        return sched.final_lr + (1 - sched.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    if isinstance(sched, Linear):
        return sched.final_lr + (1 - sched.final_lr) * (1 - progress)
    return 1.0
