"""Run one optimizer step. The training loop, the planner, the doctor and the benchmark share it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import clip_grad_norm_, no_sync
from shardtrain.job.build import Job, Loss
from shardtrain.optim import Ema, GradScaler

Phase = Callable[[str], AbstractContextManager[object]]
Observer = Callable[[Tensor, Tensor, Tensor, Tensor], object]  # of images, loss, logits, labels


def accumulate(
    model: Callable[[Tensor], Tensor],
    loss: Loss,
    batches: Iterator[Sequence[Any]],
    count: int,
    no_sync: Callable[[], AbstractContextManager[object]],
    *,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    phase: Phase = contextlib.nullcontext,
    observe: Observer = lambda *_: None,
) -> None:
    """Accumulate the gradients of the mean loss over the next ``count`` micro-batches.

    Args:
        model: from images [batch, channels, height, width] to logits [batch, classes].
        batches: yields images, labels, and further items, which are ignored.
        no_sync: a context in which backward reduces nothing; the last micro-batch runs outside it.
        scale: multiplies the loss before backward, as `GradScaler.scale` does.
        phase: called with ``data``, ``forward`` and ``backward``; each runs inside the context returned.
        observe: called after each micro-batch.
    """
    for micro in range(1, count + 1):
        with contextlib.nullcontext() if micro == count else no_sync():
            with phase("data"):
                images, labels, *_ = next(batches)
            with phase("forward"):
                logits = model(images)
                value = loss(logits, labels)
            with phase("backward"):
                scale(value / count).backward()  # type: ignore[no-untyped-call]
            observe(images, value, logits, labels)


class Step(NamedTuple):
    """Run the training program's step: gradients of some micro-batches, clipping, and the update."""

    model: nn.Module  # sharded
    loss: Loss
    optimizer: torch.optim.Optimizer
    max_norm: float | None
    ema: Ema | None = None
    scaler: GradScaler = GradScaler(enabled=False)

    @classmethod
    def of(cls, job: Job, max_norm: float | None) -> Step:
        """Return the step of ``job``."""
        return cls(job.model, job.loss, job.optimizer, max_norm, job.ema, job.scaler)

    def gradients(
        self,
        batches: Iterator[Sequence[Any]],
        count: int,
        phase: Phase = contextlib.nullcontext,
        observe: Observer = lambda *_: None,
    ) -> Tensor:
        """Reduce and clip the gradients of ``count`` micro-batches; return the norm before that, 0-dim."""
        accumulate(
            self.model,
            self.loss,
            batches,
            count,
            lambda: no_sync(self.model),
            scale=self.scaler.scale,
            phase=phase,
            observe=observe,
        )
        self.scaler.unscale_(self.optimizer)
        return clip_grad_norm_(self.model, self.max_norm or math.inf)  # inf measures and does not clip

    def update(self, step: int | None = None) -> None:
        """Update the parameters, and the moving average as after step number ``step``."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update(self.ema.every if step is None else step)

    def __call__(self, batches: Sequence[Sequence[Any]]) -> None:
        """Run the whole step over ``batches``, and clear the gradients."""
        self.gradients(iter(batches), len(batches))
        self.update()
        self.optimizer.zero_grad()
