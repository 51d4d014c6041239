"""Run one optimizer step. The training loop, the planner, the doctor and the benchmark share it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import clip_grad_norm_, introspect, no_sync, virtual_rank
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
    virtual: Callable[[int], AbstractContextManager[object]] | None = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
    phase: Phase = contextlib.nullcontext,
    observe: Observer = lambda *_: None,
) -> None:
    """Accumulate the gradients of the mean loss over the next ``count`` micro-batches.

    Args:
        model: from images [batch, channels, height, width] to logits [batch, classes].
        batches: yields images, labels, and further items, which are ignored.
        no_sync: a context in which backward reduces nothing; the last micro-batch runs outside it.
        virtual: instead of ``no_sync``, a context for each micro-batch's number. The mean is then taken over
            the gradients, and the loss is not scaled.
        scale: multiplies the loss before backward, as `GradScaler.scale` does.
        phase: called with ``data``, ``forward`` and ``backward``; each runs inside the context returned.
        observe: called after each micro-batch.
    """
    for micro in range(count):
        last = micro == count - 1
        with virtual(micro) if virtual else contextlib.nullcontext() if last else no_sync():
            with phase("data"):
                images, labels, *_ = next(batches)
            with phase("forward"):
                logits = model(images)
                value = loss(logits, labels)
            with phase("backward"):
                scale(value if virtual else value / count).backward()  # type: ignore[no-untyped-call]
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
        seed: Callable[[int], object] = lambda rank: None,
    ) -> Tensor:
        """Reduce and clip the gradients of ``count`` micro-batches; return the norm before that, 0-dim.

        ``seed`` is called with the number of each virtual rank, before its micro-batch.
        """
        ranks = introspect(self.model).virtual_ranks

        @contextlib.contextmanager
        def virtual(micro: int) -> Iterator[None]:
            with virtual_rank(self.model, ranks[micro]):
                seed(ranks[micro])
                yield

        accumulate(
            self.model,
            self.loss,
            batches,
            count,
            lambda: no_sync(self.model),
            virtual=virtual if ranks else None,
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
