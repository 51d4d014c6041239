"""Compute a step's micro-batches as virtual ranks, with a replay by a neighbour where one is due."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from shardtrain import replay, virtual_rank
from shardtrain.job.data import Batch, Share

if TYPE_CHECKING:
    from shardtrain.train.trainer import Trainer


class VirtualRanks:
    """The gradients of this rank's virtual ranks, for a `Trainer`.

    In every `train.replay_every`-th step a neighbour checks this rank by a replay. In the first step this
    rank checks itself: its first virtual rank, computed again, must have the same bits.
    """

    def __init__(self, trainer: Trainer, ranks: range) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._every = trainer.config.train.replay_every

    def __call__(self, step: int, batches: Iterator[Batch], checked: bool) -> None:
        """Compute the gradients of ``batches``, one per virtual rank, in ``step``."""
        trainer = self._trainer
        is_due = bool(self._every) and step % self._every == 0
        is_first = step == trainer.job.first_step + 1
        if not (checked and (is_due or is_first)):
            for number, batch in zip(self._ranks, batches, strict=False):
                self._compute(step, number, batch)
            return
        own = dict(zip(self._ranks, batches, strict=False))
        unseen = {*self._ranks}

        def compute(number: int) -> Tensor:
            batch = own.get(number) or self.batch_of(step, number)
            counts = number in unseen  # each image once
            unseen.discard(number)
            return self._compute(step, number, batch, counts=counts)

        replay(trainer.model, compute, step=step, neighbour=is_due)

    def _compute(self, step: int, number: int, batch: Batch, *, counts: bool = True) -> Tensor:
        trainer = self._trainer
        with virtual_rank(trainer.model, number):
            trainer.seed(step, number)
            loss, outputs = trainer.forward_backward(batch)
        if counts:
            trainer.metrics.add(batch, loss, outputs)
        return loss

    def batch_of(self, step: int, number: int) -> Batch:
        """Return the micro-batch of any virtual rank in ``step``."""
        feed = self._trainer.job.train
        size = feed.share.batch_size
        virtual = feed.share.virtual
        [batch] = feed.of(Share(size, 1, number, virtual, virtual), step - 1)
        return batch
