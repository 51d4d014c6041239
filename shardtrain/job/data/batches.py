"""Data sets: what hands out batches of images and labels.

`images, labels = data[[3, 1, 4]]`: uint8 [3, channels, height, width] and int64 [3]. Pixels stay as stored
until they are on the device (see `feed.py`).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Batches(Protocol):
    random: bool = False
    """Whether loading an image draws from torch's random numbers, as for a random crop."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...

    def at(self, side: int) -> Batches:
        """Return the same images for batches of ``side`` pixels, if they are cut to size anyway."""
        return self


class DataSet(NamedTuple):
    train: Batches
    val: Batches
    name: str
    classes: int
    channels: int
    mean: tuple[float, ...]  # per channel, in stored pixel values
    std: tuple[float, ...]


class Arrays(Batches):
    """Images held in memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        """images: uint8 [count, channels, height, width]; labels: int64 [count]."""
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.images[indices], self.labels[indices]


class OfLength(Batches):
    """The first ``count`` images of a repeated ``source``, or ``count`` evenly spaced ones of a larger one.

    Evenly spaced, they come from every class, since data sets on disk are sorted by class.
    """

    def __init__(self, source: Batches, count: int) -> None:
        self.source, self.count, self.random = source, count, source.random

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = len(self.source)
        if self.count > images:
            return self.source[[index % images for index in indices]]
        return self.source[[index * images // self.count for index in indices]]

    def at(self, side: int) -> OfLength:
        return OfLength(self.source.at(side), self.count)
