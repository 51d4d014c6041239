"""Other ways to compute a step than by accumulating: as virtual ranks, or as one CUDA graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor

from shardtrain import capture, clip_grad_norm_, introspect, no_sync, replay
from shardtrain.config.errors import UserError, reading
from shardtrain.data import Batch, Share
from shardtrain.job.build import Job
from shardtrain.job.losses import CrossEntropy
from shardtrain.job.step import accumulate, weight_of

Computed = list[tuple[Tensor, Tensor]]  # loss and outputs of each micro-batch
_refusals_of_capture = partial(reading, "train.capture=true", "leave it out", ValueError)


class VirtualRanks:
    """The gradients of this rank's virtual ranks in a step.

    In every ``replay_every``-th step a neighbour checks this rank by a replay. In the first step this rank
    checks itself: its first virtual rank, computed again, must have the same bits.
    """

    def __init__(self, job: Job, replay_every: int, compute: Callable[..., Tensor]) -> None:
        """compute: computes a virtual rank's micro-batch, and returns its loss. ``counts``: in the report."""
        self._job = job
        self._ranks = introspect(job.model).virtual_ranks
        self._every = replay_every
        self._compute = compute

    def __call__(self, step: int, batches: Iterator[Batch], checked: bool) -> None:
        """Compute the gradients of ``batches``, one per virtual rank, in ``step``."""
        is_due = bool(self._every) and step % self._every == 0
        is_first = step == self._job.first_step + 1
        own = zip(self._ranks, batches, strict=False)
        if not (checked and (is_due or is_first)):
            for number, batch in own:
                self._compute(step, number, batch, counts=True)
            return
        loaded = dict(own)
        unseen = {*self._ranks}

        def compute(number: int) -> Tensor:
            batch = loaded[number] if number in loaded else self._batch_of(step, number)
            counts = number in unseen  # each image once
            unseen.discard(number)
            return self._compute(step, number, batch, counts=counts)

        replay(self._job.model, compute, step=step, neighbour=is_due)

    def _batch_of(self, step: int, number: int) -> Batch:
        """Return the micro-batch of any virtual rank in ``step``."""
        feed = self._job.train
        size = feed.share.batch_size
        virtual = feed.share.virtual
        [batch] = feed.of(Share(size, 1, number, virtual, virtual), step - 1)
        return batch


class CapturedSteps:
    """Steps replayed as one CUDA graph: all micro-batches, clipping and the update. See `shardtrain.capture`.

    Two things are outside the graph: the moving average, since its weight depends on the number of the step,
    and the weight of all images if classes have weights, since a collective sums it. Raises UserError if the
    step cannot be captured.
    """

    def __init__(self, job: Job, max_norm: float | None) -> None:
        self._job = job
        self._max_norm = max_norm or math.inf
        if job.scaler.is_enabled():
            raise UserError(
                "train.capture=true: parallel.precision=fp16 has the host decide on updates; choose bf16"
            )
        for group in job.optimizer.param_groups:
            if group.get("fused") and "capturable" in group:  # its counts of steps are on the device already
                group["capturable"] = True
        with _refusals_of_capture():
            self._run = capture(self._compute, job.model, job.optimizer)

    def __call__(self, batches: Sequence[Batch]) -> tuple[Tensor, Computed]:
        """Compute the step of ``batches``; return the gradients' norm, 0-dim, and what each computed."""
        job = self._job
        weight = None
        if isinstance(job.loss, CrossEntropy) and job.loss.weight is not None:
            weight = weight_of(job.model, job.loss, batches)
        with _refusals_of_capture():
            norm, results = self._run(weight, *((batch.images, batch.labels) for batch in batches))
        return norm, results

    def _compute(self, weight: Tensor | None, *batches: tuple[Tensor, Tensor]) -> tuple[Tensor, Computed]:
        """Compute what the graph records. ``weight``: of all images; returns what `__call__` does."""
        job = self._job
        loss = job.loss
        if weight is not None:
            assert isinstance(loss, CrossEntropy)
            loss = partial(loss.over, weight)
        results = accumulate(job.model, loss, batches, partial(no_sync, job.model))
        norm = clip_grad_norm_(job.model, self._max_norm)
        job.optimizer.step()
        return norm, results

    def release(self) -> str:
        """Delete the graph, for which the end of a process group would wait for ever.

        Return how many steps were replayed, and why others were not.
        """
        self._run.release()
        return self._run.summary
