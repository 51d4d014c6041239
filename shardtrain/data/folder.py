"""Images in folders, `root/train/<class>/<image>` and `root/val/<class>/<image>`, decoded when needed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from shardtrain.config import ImageFolder
from shardtrain.data.sets import Batches, DataSet, eval_size
from shardtrain.errors import UserError

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


class Folder(Batches):
    """One of the two parts, cut to squares; random crops depend on torch's random numbers."""

    random = True

    def __init__(self, files: datasets.ImageFolder, crop: Callable[[int], Any], side: int) -> None:
        """crop: the transform to `side` pixels."""
        self.files, self.crop, self.side = files, crop, side
        self.transform = v2.Compose([v2.RGB(), crop(side), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        pairs = [self.files[index] for index in indices]
        images = torch.stack([self.transform(image) for image, _ in pairs])
        return images, torch.tensor([label for _, label in pairs])

    def at(self, side: int) -> Folder:
        return self if side == self.side else Folder(self.files, self.crop, side)


def image_folder(config: ImageFolder) -> DataSet:
    train, centre = crops(config)
    parts = [
        Folder(_files(config, "train"), train, config.image_size),
        Folder(_files(config, "val"), centre, eval_size(config)),
    ]
    names = parts[0].files.classes
    if parts[1].files.classes != names:
        odd = sorted(set(names) ^ set(parts[1].files.classes))
        raise UserError(f"data.root={config.root}: train and val differ in the classes {', '.join(odd[:5])}")
    return DataSet(
        train=parts[0],
        val=parts[1],
        name=f"imagefolder {config.root}",
        classes=len(names),
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def crops(config: ImageFolder) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """From a side in pixels to the random crop of training, and to the centre crop of evaluation."""
    if config.crop_area > 1:
        raise UserError(f"data.crop_area={config.crop_area}: expected at most 1")
    if config.resize < eval_size(config):
        wanted = "image_size" if config.eval_size is None else "eval_size"
        raise UserError(f"data.resize={config.resize}: expected at least data.{wanted}={eval_size(config)}")
    return partial(_random_crop, config.crop_area), partial(_centre_crop, config.resize)


def _random_crop(area: float, side: int) -> v2.Transform:
    return v2.RandomResizedCrop(side, scale=(area, 1.0), antialias=True)


def _centre_crop(resize: int, side: int) -> v2.Transform:
    return v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(side)])


def _files(config: ImageFolder, part: str) -> datasets.ImageFolder:
    path = Path(config.root).expanduser() / part
    if not path.is_dir():
        raise UserError(
            f"data.root={config.root}: there is no folder {path.absolute()}; "
            f"expected {part}/<class>/<image> in it"
        )
    try:
        return datasets.ImageFolder(str(path))
    except FileNotFoundError as error:  # a class without images
        raise UserError(f"data.root={config.root}: {error}") from None
