"""Evaluation of a model on the held-out images, each counted exactly once whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardtrain import average_buffers, comm
from shardtrain.job import tags
from shardtrain.job.data import Batch
from shardtrain.optim.ema import Ema


class Scores(NamedTuple):
    loss: float  # mean cross-entropy, without label smoothing
    acc1: float  # percent
    acc5: float  # percent; of fewer than five classes, all are right; told of where there are more than ten


class Evaluation(NamedTuple):
    scores: Scores
    ema: Scores | None = None  # of the weights' moving average

    @property
    def judged(self) -> Scores:
        """The scores by which a run is judged: the average's, where one is kept."""
        return self.ema or self.scores

    def scalars(self) -> dict[str, float]:
        """Return the scores by TensorBoard tag."""
        scalars = dict(zip(tags.VAL, self.scores, strict=True))
        return scalars | dict(zip(tags.VAL_EMA, self.ema or (), strict=False))


class Views(NamedTuple):
    """The variants of an image whose logits are averaged into its own."""

    flip: bool = False  # its mirror image, too
    shift: int = 0  # pixels; both moved up and left, and down and right by these, which count half in all

    def of(self, images: Tensor) -> list[tuple[Tensor, float]]:
        """Return batches like ``images``, float32 [batch, channels, height, width], and their weights."""
        views = [(images, 1.0)]
        if self.shift:
            height, width = images.shape[2:]
            padded = F.pad(images, [self.shift] * 4, mode="reflect")
            ends = padded[..., :height, :width], padded[..., -height:, -width:]
            views = [(images, 0.5), *((moved, 0.25) for moved in ends)]
        if self.flip:
            views = [(each, weight / 2) for view, weight in views for each in (view, view.flip(3))]
        return views


ONE_VIEW = Views()


def evaluate(
    model: nn.Module, feed: Iterable[Batch], *, ema: Ema | None = None, views: Views = ONE_VIEW
) -> Evaluation:
    """Evaluate a sharded model, and its moving average. Collective; leaves the model in training mode.

    ``feed`` shows this rank images r, r + N, r + 2N, … of N ranks, as `data.EvalFeed` does.
    """
    scores = _evaluate(model, feed, views)
    if ema is None:
        return Evaluation(scores)
    with ema.swapped():
        return Evaluation(scores, _evaluate(model, feed, views))


def _evaluate(model: nn.Module, feed: Iterable[Batch], views: Views) -> Scores:
    average_buffers(model)  # BatchNorm's running statistics are each rank's own until here
    model.eval()
    try:
        with torch.no_grad():
            sums = torch.stack([_sums(model, batch, views) for batch in feed]).sum(0)
    finally:
        model.train()
    loss, first, fifth, count = comm.all_reduce(sums).tolist()
    return Scores(loss / count, 100 * first / count, 100 * fifth / count)


def _sums(model: nn.Module, batch: Batch, views: Views) -> Tensor:
    """Return float64 [4]: summed loss, images right by the first guess, by one of five, and images in all."""
    logits = torch.stack([model(view).float() * weight for view, weight in views.of(batch.images)]).sum(0)
    logits, labels = logits[: batch.valid], batch.labels[: batch.valid]
    losses = F.cross_entropy(logits, labels, reduction="none")
    right = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
    parts = (losses.double().sum(), right[:, 0].sum(), right.sum(), torch.tensor(len(labels)))
    return torch.stack([part.to(logits.device, torch.float64) for part in parts])
