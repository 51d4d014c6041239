"""The losses, and the weights of a step's images by their classes.

torch's weighted cross-entropy divides by the weights of the images that it gets. So the loss of a step, the
mean over ranks and micro-batches, depends on how the step is divided. Two classes, of weights 1 and 3, and
losses 1 and 3 of their images::

    one batch of [a a a b]            (1 + 1 + 1 + 3 · 3) / (1 + 1 + 1 + 3) = 2.00
    two micro-batches [a a] [a b]     ((1 + 1) / (1 + 1) + (1 + 3 · 3) / (1 + 3)) / 2 = 1.75

Here the sum over each micro-batch is divided by the weights of all the step's images, so both are 2.00.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardtrain import comm
from shardtrain.config.errors import UserError, reason_with_line
from shardtrain.data.feed import Batches, DataSet
from shardtrain.launch.ranks import together

# Logits [batch, classes] and labels → the mean over the images of a micro-batch. Labels are class numbers,
# int64 [batch], or what `data.Mix` makes of them: soft, float32 [batch, classes].
Loss = Callable[[Tensor, Tensor], Tensor]

CHUNK = 256  # images that are read at once for their labels


class CrossEntropy(nn.Module):
    """Cross-entropy in which all images count alike, or each by the weight of its class.

    A soft label has the mean weight of its classes. Outputs of the model beyond the data set's classes have
    weight 1; they matter to label smoothing alone.
    """

    weight: Tensor | None  # float32 [classes]

    def __init__(self, weight: Tensor | None = None, smoothing: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.smoothing = smoothing

    def weight_of(self, labels: Tensor) -> Tensor:
        """Return the sum of the images' weights: float64, 0-dim."""
        if self.weight is None:
            return torch.tensor(len(labels), dtype=torch.float64)
        if labels.ndim == 1:
            return self.weight[labels].double().sum()
        columns = F.pad(self.weight, (0, labels.shape[1] - len(self.weight)), value=1.0)
        return (labels @ columns).double().sum()

    def total(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum over the images: float64, so that it depends on no batch size, 0-dim."""
        weight = self.weight
        if weight is not None:
            weight = F.pad(weight, (0, logits.shape[1] - len(weight)), value=1.0)
        smoothing = self.smoothing
        losses = F.cross_entropy(logits.float(), labels, weight, reduction="none", label_smoothing=smoothing)
        return losses.double().sum()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted mean over the images of one batch, as torch's."""
        if self.weight is None:
            return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
        return self.over(self.weight_of(labels), logits, labels)

    def over(self, weight: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted sum over the images, divided by ``weight``: float32, 0-dim."""
        return (self.total(logits, labels) / weight).float()


def sum_and_weight(loss: Loss, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of ``loss`` over the images, none at all included, and what divides it for the mean."""
    if isinstance(loss, CrossEntropy):
        return loss.total(logits, labels), loss.weight_of(labels)
    images = torch.tensor(float(len(labels)))
    if not len(labels):  # the mean over no image is not a number
        return images, images
    return loss(logits, labels) * len(labels), images  # of a user's loss only the mean is known


def rehearse_loss(
    loss: Loss, classes: Sequence[str], shape: tuple[int, int], *, soft: bool, device: torch.device
) -> None:
    """Call a user's ``loss`` once on random logits of ``shape``, as training and evaluations call it.

    ``soft``: labels are what mixing makes of them. Raises UserError if the loss fails, or does not return
    a mean that has gradients.
    """
    if isinstance(loss, CrossEntropy):
        return
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None:
        raise UserError(
            f"train.loss: {type(loss).__name__} divides by the weights of each micro-batch's images, so that "
            "a step's loss depends on how ranks divide it; train.class_weights=[…] with "
            "train.loss=cross_entropy does not"
        )
    images, columns = shape
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(images) % len(classes)
    if soft:
        labels = F.one_hot(labels, columns).float()
    kind = f"{str(labels.dtype).removeprefix('torch.')} {[*labels.shape]}"
    called = f"train.loss, called with logits {[*shape]} and labels {kind}"
    try:
        value = loss(noise.to(device).requires_grad_(), labels.to(device))
    except Exception as error:  # a user's loss raises anything
        raise UserError(f"{called}: {reason_with_line(error)}") from error
    expected = "expected the mean over the images: a tensor without dimensions, with gradients"
    if not isinstance(value, Tensor):
        raise UserError(f"{called}: returned a {type(value).__name__}; {expected}")
    if value.ndim or not value.requires_grad:
        gradients = "with" if value.requires_grad else "without"
        raise UserError(f"{called}: returned {[*value.shape]} {gradients} gradients; {expected}")


def weights_of(asked: str | Sequence[float] | None, images: DataSet) -> Tensor | None:
    """Return the weight of each class, float32 [classes], as `train.class_weights` says. Collective.

    Balanced, a class of n of all N images has weight N / (n · classes), so that the mean over all images is
    1, and all classes weigh alike. Classes without images have weight 1.
    """
    if asked is None:
        return None
    if asked == "balanced" and not len(images.train):
        raise UserError(
            "train.class_weights=balanced needs the training images; train.class_weights=null scores the "
            "loss without weights, and train.class_weights=[…] with those"
        )
    classes = len(images.classes)
    if not isinstance(asked, str):
        if len(asked) != classes:
            raise UserError(
                f"train.class_weights={[*asked]}: expected {classes} weights, one per class: "
                + ", ".join(images.classes[:20])
            )
        return torch.tensor(asked)
    counts = class_counts(images.train, classes)
    present = counts > 0
    balanced = counts.sum() / (counts * present.sum())
    return torch.where(present, balanced, 1.0).float()


def given_weights(loss: Loss) -> list[float] | None:
    """Return the weights of classes in ``loss``; None if `train.class_weights` has none."""
    weight = loss.weight if isinstance(loss, CrossEntropy) else None
    return None if weight is None else weight.tolist()


def class_counts(images: Batches, classes: int) -> Tensor:
    """Return the number of images of each class: float64 [classes]. Collective."""
    if images.labels is not None:
        return images.labels.bincount(minlength=classes).double()
    # Without a list of labels each image is read once, on one of the ranks.
    counts = torch.zeros(classes, dtype=torch.int64)

    def read() -> None:
        for part in torch.arange(comm.rank(), len(images), comm.world_size()).split(CHUNK):
            counts.add_(torch.bincount(images[part.tolist()][1], minlength=classes))

    together(read)
    total: Tensor = comm.all_reduce(counts)
    return total.double()
