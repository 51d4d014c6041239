"""What a training step minimises: a mean over the images of a micro-batch.

Labels are class numbers, int64 [batch], or what `data.mixing` makes of them: soft, float32 [batch, classes].
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]  # logits [batch, classes], labels → mean


class BinaryCrossEntropy:
    """Asks of each class by itself whether it is in the image; the mean over images and classes.

    Smoothing by 0.1 turns the answers 1 and 0 of 10 classes into 0.91 and 0.01.
    """

    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        soft = F.one_hot(labels, logits.shape[1]) if labels.ndim == 1 else labels
        answers = soft.to(logits.dtype) * (1 - self.smoothing) + self.smoothing / logits.shape[1]
        return F.binary_cross_entropy_with_logits(logits, answers)


def loss_of(name: str, smoothing: float) -> Loss:
    """The loss that `train.loss` names."""
    return BinaryCrossEntropy(smoothing) if name == "bce" else nn.CrossEntropyLoss(label_smoothing=smoothing)
