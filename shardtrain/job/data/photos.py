"""Photographs of any size, wherever they come from: decoded and cut to squares when they are needed."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from shardtrain.job.config import Photos
from shardtrain.job.data.batches import Batches, DataSet
from shardtrain.job.schema import UserError

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)

MOST_IN_A_ROW = 10  # unreadable images; more mean that something else is wrong


class Source(Protocol):
    """Encoded images, by number."""

    @property
    def labels(self) -> Sequence[int]: ...

    def __getitem__(self, index: int) -> bytes: ...

    def name(self, index: int) -> str:
        """Return where the image is, for messages."""
        ...


class Unreadable(UserError):
    """An image that cannot be read. A worker's comes with a traceback in its text, which is left out."""

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition("Unreadable: ")[2].strip())


class Pictures(Batches):
    """One part of a data set, cut to squares; random crops depend on torch's random numbers."""

    random = True

    def __init__(self, source: Source, crop: Callable[[int], Any], side: int, *, skip: bool) -> None:
        """crop: the transform to `side` pixels. skip: the next image takes the place of an unreadable one."""
        self.source, self.crop, self.side, self.skip = source, crop, side, skip
        self.transform = v2.Compose([crop(side), v2.PILToTensor()])
        self.reported: set[int] = set()  # unreadable images that this process has reported

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        pairs = [self._read(index) for index in indices]
        images = torch.stack([self.transform(image) for image, _ in pairs])
        return images, torch.tensor([label for _, label in pairs])

    def at(self, side: int) -> Pictures:
        if side == self.side:
            return self
        other = Pictures(self.source, self.crop, side, skip=self.skip)
        other.reported = self.reported
        return other

    def _read(self, wanted: int) -> tuple[Image.Image, int]:
        """Return the image and its label; those of the next readable one, if others may be skipped."""
        problem = ""
        for index in range(wanted, wanted + (MOST_IN_A_ROW if self.skip else 1)):
            index %= len(self)
            try:
                image = Image.open(io.BytesIO(self.source[index])).convert("RGB")
            except Exception as error:  # decoders raise what they like
                problem = f"cannot read the image {self.source.name(index)}: {error}"
                self._report(index, problem)
            else:
                return image, int(self.source.labels[index])
        if self.skip:
            raise Unreadable(f"{problem}; nor the {MOST_IN_A_ROW - 1} before it: are the files whole?")
        raise Unreadable(f"{problem}; data.corrupt=skip takes the next one instead")

    def _report(self, index: int, problem: str) -> None:
        if self.skip and index not in self.reported:
            self.reported.add(index)
            logging.getLogger("shardtrain").warning(
                "%s; the next one takes its place (%d so far)", problem, len(self.reported)
            )


def pictures(config: Photos, train: Source, val: Source, classes: int) -> DataSet:
    """Return the data set of two sources: random crops to train on, centre crops to evaluate."""
    skip = config.corrupt == "skip"
    random, centre = partial(_random_crop, config.crop_area), partial(_centre_crop, config.resize)
    return DataSet(
        train=Pictures(train, random, config.image_size, skip=skip),
        val=Pictures(val, centre, config.side_in_eval, skip=skip),
        name=f"{config.name} {config.root}",
        classes=classes,
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _random_crop(area: float, side: int) -> v2.Transform:
    return v2.RandomResizedCrop(side, scale=(area, 1.0), antialias=True)


def _centre_crop(resize: int, side: int) -> v2.Transform:
    return v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(side)])
