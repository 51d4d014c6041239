"""Read photographs of any size from folders, and crop them to squares when they are needed.

Folders are like ImageNet's, `root/train/<class>/<image>` and `root/val/<class>/<image>`. This file is
imported only when needed, since torchvision's transforms take a second to import.
"""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from shardtrain.job.config import ImageFolder
from shardtrain.job.data.feed import Batches, DataSet
from shardtrain.job.errors import UserError, path_of, plain_file, reading

IMAGENET_MEAN = (123.7, 116.3, 103.5)
IMAGENET_STD = (58.4, 57.1, 57.4)


class Unreadable(UserError):
    """Report an image that cannot be read, without the traceback that a worker adds to the text."""

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition("Unreadable: ")[2].strip())


class Pictures(Batches):
    """Hold one part of a data set, cropped to squares. Random crops use torch's random numbers."""

    def __init__(self, source: Files, crop: v2.Transform, random: bool = False) -> None:
        self.source = source
        self.random = random
        self.transform = v2.Compose([crop, v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*map(self._read, indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def _read(self, index: int) -> tuple[Tensor, int]:
        try:
            image: Image.Image = Image.open(io.BytesIO(self.source[index]))
            # `convert` would cut grey values at 255.
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(f"its values are of mode {image.mode}, expected 8 or 16 bits per channel")
            image = image.convert("RGB")
        except Exception as error:  # decoders raise exceptions of many kinds
            reason = str(error).partition(" <")[0]  # Pillow adds the address of the bytes
            raise Unreadable(f"cannot read the image {self.source.name(index)}: {reason}") from None
        return self.transform(image), self.source.labels[index]


class _Folders(datasets.ImageFolder):  # type: ignore[misc]
    """Find images in folders, but not in hidden ones, such as `.ipynb_checkpoints`."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        names = sorted(path.name for path in Path(directory).iterdir() if path.is_dir())
        classes = [name for name in names if not name.startswith(".")]
        if not classes:
            raise FileNotFoundError(f"no folder of a class in {directory}")
        return classes, {name: number for number, name in enumerate(classes)}


def _is_image(root: Path, path: str) -> bool:
    is_hidden = any(name.startswith(".") for name in Path(path).relative_to(root).parts)
    return datasets.folder.is_image_file(path) and not is_hidden


class Files:
    """Read the images of `root/train` or `root/val`."""

    def __init__(self, config: ImageFolder, part: str) -> None:
        root = path_of("data.root", config.root)
        inside = ", ".join(sorted(entry.name for entry in root.glob("*"))[:5]) or "nothing"
        instead = ", or data.validation=0.2 to hold some of train out" if part == "val" else ""
        expected = f"expected {part}/<class>/<image> in {root.absolute()}{instead}, found {inside}"
        with reading(f"data.root={config.root}", expected):
            found = _Folders(str(root / part), is_valid_file=partial(_is_image, root / part))
        self.classes = found.classes
        self.labels = found.targets
        self.paths: list[str] = [path for path, _ in found.samples]

    def __getitem__(self, index: int) -> bytes:
        return plain_file(Path(self.paths[index])).read_bytes()

    def name(self, index: int) -> str:
        return self.paths[index]


def image_folder(config: ImageFolder) -> DataSet:
    train = Files(config, "train")
    val = train
    if not config.validation or path_of("data.root", config.root).joinpath("val").exists():
        val = Files(config, "val")
    if train.classes != val.classes:
        names = {"train": set(train.classes), "val": set(val.classes)}
        lacking = {part: sorted(set.union(*names.values()) - own)[:5] for part, own in names.items()}
        said = " and ".join(f"{part} has no {', '.join(lacks)}" for part, lacks in lacking.items() if lacks)
        raise UserError(f"data.root={config.root}: {said}; both need a folder of each class")
    how = {"interpolation": v2.InterpolationMode(config.interpolation), "antialias": True}
    random = v2.RandomResizedCrop(config.image_size, scale=(config.crop_area, 1.0), **how)
    centre = _centre_crop(config.resize, config.side_in_eval, **how)
    as_val = Pictures(train, centre)
    return DataSet(
        train=Pictures(train, random, random=True),
        val=as_val if val is train else Pictures(val, centre),
        train_as_val=as_val,
        name=f"{config.name} {config.root}",
        classes=tuple(train.classes),
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _centre_crop(resize: int | None, side: int, **how: Any) -> v2.Transform:
    return v2.Compose([v2.Resize(resize or round(side * 256 / 224), **how), v2.CenterCrop(side)])
