"""Define data sets, which return batches of images and labels.

`images, labels = data[[3, 1, 4]]` are uint8 [3, channels, height, width] and int64 [3]. Pixels stay as stored
until they are on the device (see `feed.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Batches(Protocol):
    random: bool = False
    """Whether loading an image draws from torch's random numbers, as for a random crop."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...

    def at(self, side: int) -> Batches:
        """Return the same images cropped to ``side`` pixels, if they are cropped on loading."""
        return self


class DataSet(NamedTuple):
    train: Batches
    val: Batches
    name: str
    classes: int
    channels: int
    mean: tuple[float, ...]  # per channel, in stored pixel values
    std: tuple[float, ...]
    test: Batches | None = None
    train_as_val: Batches | None = None  # the images of `train` cut as those of `val`, where that differs


class Arrays(Batches):
    """Hold images in memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """images: uint8 [count, channels, height, width]; labels: int64 [count]."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


class Chosen(Batches):
    """Select images of a ``source``, in the order of ``indices``, int64 [count]."""

    def __init__(self, source: Batches, indices: Tensor) -> None:
        self.source, self.indices, self.random = source, indices, source.random

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.source[self.indices[indices].tolist()]

    def at(self, side: int) -> Chosen:
        return Chosen(self.source.at(side), self.indices)


def of_length(source: Batches, count: int) -> Chosen:
    """Return ``count`` images of ``source``: repeated if it has fewer, evenly spaced if it has more.

    Evenly spaced images come from every class, even if a data set is sorted by class.
    """
    images, order = len(source), torch.arange(count)
    return Chosen(source, order % images if count > images else order * images // count)
