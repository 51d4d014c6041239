"""What a data set is: something that hands out batches.

`images, labels = data[[3, 1, 4]]`: uint8 [3, channels, height, width] and int64 [3]. Pixels stay as stored
until they are on the device (see `feed.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardtrain.job.config import Images
from shardtrain.job.data.sampler import side_in


class Batches(Protocol):
    random: bool = False
    """Whether loading an image draws from torch's random numbers, as for a random crop."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]: ...

    def at(self, side: int) -> Batches:
        """The same images for batches of `side` pixels, if they are cut to size anyway; else as they are."""
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


class Repeated(Batches):
    """`count` images that repeat the few that `few` holds."""

    def __init__(self, few: Arrays, count: int) -> None:
        self.few, self.count = few, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.few[[index % len(self.few) for index in indices]]


class Some(Batches):
    """`count` images of `whole`, evenly spaced: of a set in the order of its classes, some of each."""

    def __init__(self, whole: Batches, count: int) -> None:
        self.whole, self.count, self.random = whole, count, whole.random

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.whole[[index * len(self.whole) // self.count for index in indices]]

    def at(self, side: int) -> Some:
        return Some(self.whole.at(side), self.count)


class Augmented(Batches):
    """Images that `change` makes others each time, drawing from torch's random numbers."""

    random = True

    def __init__(self, data: Batches, change: Callable[[Tensor], Tensor]) -> None:
        """change: uint8 [channels, height, width] to the same."""
        self.data, self.change = data, change

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = self.data[indices]
        return torch.stack([self.change(image) for image in images]), labels

    def at(self, side: int) -> Augmented:
        return Augmented(self.data.at(side), self.change)


def eval_size(config: Images) -> int:
    """Pixels of a side in evaluation."""
    return config.eval_size or config.image_size


def sides(config: Images) -> set[int]:
    """Every size of images that a model is given."""
    growing = range(config.grow.epochs) if config.grow else ()
    grown = {side_in(epoch, config.grow, config.image_size) for epoch in growing}
    return {config.image_size, eval_size(config)} | grown
