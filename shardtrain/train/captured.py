"""Compute a trainer's steps as one CUDA graph: all micro-batches, clipping and the update."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from shardtrain import capture, clip_grad_norm_, no_sync
from shardtrain.job.errors import UserError
from shardtrain.job.losses import CrossEntropy
from shardtrain.job.step import accumulate, weight_of

if TYPE_CHECKING:
    from shardtrain.train.trainer import Trainer


class CapturedSteps(contextlib.AbstractContextManager["CapturedSteps"]):
    """The steps of a `Trainer`, replayed as one CUDA graph. See `shardtrain.capture`.

    Two things are outside the graph: the moving average, since its weight depends on the number of the step,
    and the weight of all images if classes have weights, since a collective sums it. Raises UserError if the
    step cannot be captured.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._max_norm = trainer.config.train.clip_grad_norm or math.inf
        if trainer.job.scaler.is_enabled():
            raise UserError(
                "train.capture=true: parallel.precision=fp16 has the host decide on updates; choose bf16"
            )
        for group in trainer.optimizer.param_groups:
            if group.get("fused") and "capturable" in group:  # its counts of steps are on the device already
                group["capturable"] = True
        with _as_mistake():
            self._run = capture(self._compute, trainer.model, trainer.optimizer)

    def __call__(self, step: int) -> bool:
        """Compute ``step``; return whether its gradients are known to be finite."""
        trainer = self._trainer
        job = trainer.job
        batches = [*trainer.micro_batches(trainer.batches)]
        with trainer.metrics.phase("data"):
            weight = None
            if isinstance(job.loss, CrossEntropy) and job.loss.weight is not None:
                weight = weight_of(job.model, job.loss, batches)
        with trainer.metrics.phase("forward"), _as_mistake():
            inputs = [(batch.images, batch.labels) for batch in batches]
            trainer.norm, results = self._run(weight, *inputs)
        for batch, (loss, outputs) in zip(batches, results, strict=True):
            trainer.metrics.add(batch, loss, outputs)
        if job.ema is not None:
            job.ema.update(step)
        return trainer.finiteness.of(step, trainer.norm)

    def _compute(
        self, weight: Tensor | None, *batches: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the gradients' norm, and loss and outputs of each micro-batch; ``weight``: of all images."""
        trainer = self._trainer
        loss = trainer.loss
        if weight is not None:
            assert isinstance(loss, CrossEntropy)
            loss = partial(loss.over, weight)
        results = accumulate(trainer.model, loss, batches, partial(no_sync, trainer.model))
        norm = clip_grad_norm_(trainer.model, self._max_norm)
        trainer.optimizer.step()
        return norm, results

    def __exit__(self, kind: object, *_: object) -> None:
        """Delete the graph, for which the end of a process group would wait for ever.

        Say how many steps were replayed, and why others were not.
        """
        self._run.release()
        if kind is None:
            self._trainer.monitor.facts({"captured_steps": self._run.summary})
            self._trainer.monitor.say(f"captured steps: {self._run.summary}")


@contextlib.contextmanager
def _as_mistake() -> Iterator[None]:
    """Turn a ValueError of `capture` inside into a UserError."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"train.capture=true: {error}") from error
