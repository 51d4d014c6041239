"""Loss and accuracy over the held-out images, each counted exactly once whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardtrain import average_buffers, comm
from shardtrain.data import Batch


class Scores(NamedTuple):
    loss: float  # mean cross-entropy, without label smoothing
    acc1: float  # percent
    acc5: float  # percent; of fewer than five classes, all are right


def evaluate(model: nn.Module, feed: Iterable[Batch]) -> Scores:
    """Scores of a sharded model. Collective; leaves the model in training mode."""
    average_buffers(model)  # BatchNorm's running statistics are each rank's own until here
    model.eval()
    try:
        with torch.no_grad():
            sums = torch.stack([_sums(model(batch.images), batch) for batch in feed]).sum(0)
    finally:
        model.train()
    loss, first, fifth, count = comm.all_reduce(sums).tolist()
    return Scores(loss / count, 100 * first / count, 100 * fifth / count)


def _sums(logits: Tensor, batch: Batch) -> Tensor:
    """float64 [4]: summed loss, right at first guess, right within five guesses, images."""
    logits, labels = logits[: batch.valid].float(), batch.labels[: batch.valid]
    loss = F.cross_entropy(logits, labels, reduction="sum")
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices
    right = guesses == labels[:, None]
    count = torch.tensor(batch.valid, device=logits.device)
    return torch.stack([part.double() for part in (loss, right[:, :1].sum(), right.sum(), count)])
