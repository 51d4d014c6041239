"""Images in folders, `root/train/<class>/<image>` and `root/val/<class>/<image>`, decoded when needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from shardtrain.config import ImageFolder
from shardtrain.data.sets import DataSet
from shardtrain.errors import UserError

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


class Folder:
    """One of the two parts, cut to `config.image_size`; random crops depend on torch's random numbers."""

    random = True

    def __init__(self, path: Path, transform: Callable[[Any], Tensor]) -> None:
        self.files = datasets.ImageFolder(str(path))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        pairs = [self.files[index] for index in indices]
        images = torch.stack([self.transform(image) for image, _ in pairs])
        return images, torch.tensor([label for _, label in pairs])


def image_folder(config: ImageFolder) -> DataSet:
    if config.crop_area > 1:
        raise UserError(f"data.crop_area={config.crop_area}: expected at most 1")
    if config.resize < config.image_size:
        raise UserError(f"data.resize={config.resize}: expected at least data.image_size={config.image_size}")
    train = v2.RandomResizedCrop(config.image_size, scale=(config.crop_area, 1.0), antialias=True)
    centre = v2.Compose([v2.Resize(config.resize, antialias=True), v2.CenterCrop(config.image_size)])
    parts = [_part(config, "train", train), _part(config, "val", centre)]
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


def _part(config: ImageFolder, part: str, crop: Callable[[Any], Any]) -> Folder:
    path = Path(config.root).expanduser() / part
    if not path.is_dir():
        raise UserError(
            f"data.root={config.root}: there is no folder {path.absolute()}; "
            f"expected {part}/<class>/<image> in it"
        )
    try:
        return Folder(path, v2.Compose([v2.RGB(), crop, v2.PILToTensor()]))
    except FileNotFoundError as error:  # a class without images
        raise UserError(f"data.root={config.root}: {error}") from None
