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

MOST_CLASSES = 200  # of which pairs of label and prediction are counted


class Scores(NamedTuple):
    loss: float  # mean cross-entropy, without label smoothing
    acc1: float  # percent
    acc5: float  # percent; of fewer than five classes, all are right


class Evaluation(NamedTuple):
    scores: Scores
    # int64 [classes, classes] on the CPU: images of class i taken for j; None of many classes
    confusion: Tensor | None
    ema: Scores | None = None  # of the weights' moving average

    @property
    def acc1(self) -> float:
        """The accuracy by which a run is judged: the average's, where one is kept."""
        return (self.ema or self.scores).acc1

    def scalars(self) -> dict[str, float]:
        """Return the scores by TensorBoard tag."""
        scalars = dict(zip(tags.VAL, self.scores, strict=True))
        return scalars | dict(zip(tags.VAL_EMA, self.ema or (), strict=False))


def evaluate(
    model: nn.Module, feed: Iterable[Batch], *, ema: Ema | None = None, flip: bool = False
) -> Evaluation:
    """Evaluate a sharded model, and its moving average. Collective; leaves the model in training mode.

    ``feed`` shows this rank images r, r + N, r + 2N, … of N ranks, as `data.EvalFeed` does.
    ``flip``: an image's logits are the mean of its own and of its mirror image's.
    """
    evaluation = _evaluate(model, feed, flip)
    if ema is None:
        return evaluation
    with ema.swapped():
        return evaluation._replace(ema=_evaluate(model, feed, flip).scores)


def _evaluate(model: nn.Module, feed: Iterable[Batch], flip: bool) -> Evaluation:
    average_buffers(model)  # BatchNorm's running statistics are each rank's own until here
    model.eval()
    try:
        with torch.no_grad():
            answers = [_answers(model, batch, flip) for batch in feed]
    finally:
        model.train()
    (classes, *_), *parts = zip(*answers, strict=True)
    losses, labels, guesses = map(torch.cat, parts)
    confusion = None
    if classes <= MOST_CLASSES:
        counts = torch.bincount(labels * classes + guesses[:, 0], minlength=classes * classes)
        confusion = comm.all_reduce(counts).view(classes, classes).cpu()
    return Evaluation(_scores(losses, labels, guesses), confusion)


def _answers(model: nn.Module, batch: Batch, flip: bool) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return the number of classes; losses, labels and the five best guesses of the images that count."""
    logits = model(batch.images).float()
    if flip:
        logits = (logits + model(batch.images.flip(3)).float()) / 2
    logits, labels = logits[: batch.valid], batch.labels[: batch.valid]
    losses = F.cross_entropy(logits, labels, reduction="none")
    classes = logits.shape[1]
    return classes, losses, labels, logits.topk(min(5, classes), dim=1).indices


def _scores(losses: Tensor, labels: Tensor, guesses: Tensor) -> Scores:
    right = guesses == labels[:, None]
    parts = (losses.double().sum(), right[:, 0].sum(), right.sum(), torch.tensor(len(labels)))
    sums = torch.stack([part.to(losses.device, torch.float64) for part in parts])
    loss, first, fifth, count = comm.all_reduce(sums).tolist()
    return Scores(loss / count, 100 * first / count, 100 * fifth / count)
