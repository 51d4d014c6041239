"""Read photographs of any size from folders, and crop them to squares when they are needed.

Folders are like ImageNet's, `root/train/<class>/<image>` and `root/val/<class>/<image>`. This file is
imported only when needed, since torchvision's transforms take a second to import.
"""

from __future__ import annotations

import io
import os.path
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from shardtrain.job.config import ImageFolder
from shardtrain.job.data.feed import Batches, DataSet
from shardtrain.job.errors import UserError, WorkerError, not_valid, path_of, plain_file, reading
from shardtrain.job.inference import Inference, mode_of, transform_of
from shardtrain.job.preprocessing import Preprocessing

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Unreadable(WorkerError):
    """Report an image that cannot be read."""


def opened_image(source: Files, index: int, mode: str = "RGB") -> Image.Image:
    """Return an image of ``source`` in Pillow's ``mode``, of 8 bits per channel. Raises Unreadable."""
    try:
        image: Image.Image = Image.open(io.BytesIO(source.content(index)))
        # `convert` would cut grey values at 255.
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"its values are of mode {image.mode}, expected 8 or 16 bits per channel")
        return image.convert(mode)
    except Exception as error:  # decoders raise exceptions of many kinds
        reason = str(error).partition(" <")[0]  # Pillow adds the address of the bytes
        raise Unreadable(f"cannot read the image {source.paths[index]}: {reason}") from None


class Pictures(Batches):
    """Hold one part of a data set, cropped to squares. Random crops use torch's random numbers."""

    def __init__(self, source: Files, crop: v2.Transform, random: bool = False) -> None:
        self.source = source
        self.random = random
        self.labels: Tensor = torch.tensor(source.labels, dtype=torch.int64)
        self.transform = v2.Compose([crop, v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*map(self._read, indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def _read(self, index: int) -> tuple[Tensor, int]:
        return self.transform(opened_image(self.source, index)), self.source.labels[index]

    def path(self, index: int) -> str | None:
        return self.source.paths[index]


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


class Prepared(Batches):
    """Hold images of files as a run's model gets them, one by one; labels are their numbers."""

    def __init__(self, paths: Sequence[str], inference: Inference) -> None:
        self.source = Files(paths, [])
        self.mode = mode_of(inference)
        self.transform = transform_of(inference)

    def __len__(self) -> int:
        return len(self.source.paths)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = [self.transform(opened_image(self.source, index, self.mode)) for index in indices]
        return torch.stack(images), torch.tensor(indices)

    def path(self, index: int) -> str | None:
        return self.source.paths[index]


class Files(NamedTuple):
    """Hold images by their paths, with their labels."""

    paths: Sequence[str]
    labels: Sequence[int]

    def content(self, index: int) -> bytes:
        return plain_file(Path(self.paths[index])).read_bytes()


NO_FILES = Files((), ())


def image_folder(config: ImageFolder, *, all_held_out: bool = False) -> DataSet:
    """Open the images of `root/train` and `root/val`, or all to score, of the classes of a run."""
    if all_held_out:
        return photographs(config, config.classes or (), NO_FILES, _to_score(config))
    train, classes = _in_folders(config, "train")
    val = None
    val_classes = classes
    if not config.validation or os.path.exists(path_of("data.root", config.root) / "val"):
        val, val_classes = _in_folders(config, "val")
    if classes != val_classes:
        names = {"train": set(classes), "val": set(val_classes)}
        lacking = {part: sorted(set.union(*names.values()) - own)[:5] for part, own in names.items()}
        said = " and ".join(f"{part} has no {', '.join(lacks)}" for part, lacks in lacking.items() if lacks)
        raise UserError(f"data.root={config.root}: {said}; both need a folder of each class")
    return photographs(config, classes, train, val)


def _to_score(config: ImageFolder) -> Files:
    """Return the images of `root/val/<class>`, or without `val` of `root/<class>`, by the labels of a run."""
    root = path_of("data.root", config.root)
    part = "val" if (root / "val").is_dir() else "."
    files, names = _in_folders(config, part)
    classes = config.classes or ()
    for name in names:
        if name not in classes:
            raise not_valid(f"data.root={config.root}: the run has no class {name}", name, classes)
    return Files(files.paths, [classes.index(names[label]) for label in files.labels])


def images_in(root: Path) -> list[str]:
    """Return the paths of all images in ``root`` and its folders, in order. Raises UserError without it."""
    if not root.is_dir():
        raise UserError(f"data.root={root}: there is no such folder")
    return [str(path) for path in sorted(root.rglob("*")) if path.is_file() and _is_image(root, str(path))]


def _in_folders(config: ImageFolder, part: str) -> tuple[Files, list[str]]:
    """Return the images of one part, and the names of its classes."""
    root = path_of("data.root", config.root)
    inside = ", ".join(sorted(entry.name for entry in root.glob("*"))[:5]) or "nothing"
    instead = ", or data.validation=0.2 to hold some of train out" if part == "val" else ""
    expected = f"expected {part}/<class>/<image> in {root.absolute()}{instead}, found {inside}"
    with reading(f"data.root={config.root}", expected):
        found = _Folders(str(root / part), is_valid_file=partial(_is_image, root / part))
    return Files([path for path, _ in found.samples], found.targets), found.classes


def photographs(
    config: ImageFolder, classes: Sequence[str], train: Files, val: Files | None, test: Files | None = None
) -> DataSet:
    """Return the data set of images in files. Without ``val`` the training images take its place."""
    how = {"interpolation": v2.InterpolationMode(config.interpolation), "antialias": True}
    random = v2.RandomResizedCrop(config.image_size, scale=(config.crop_area, 1.0), **how)
    resize = config.resize or round(config.side_in_eval * 256 / 224)
    centre = v2.Compose([v2.Resize(resize, **how), v2.CenterCrop(config.side_in_eval)])
    as_val = Pictures(train, centre)
    return DataSet(
        train=Pictures(train, random, random=True),
        val=as_val if val is None else Pictures(val, centre),
        train_as_val=as_val,
        name=f"{config.name} {config.root}",
        test=None if test is None else Pictures(test, centre),
        preprocessing=Preprocessing(
            classes=tuple(classes),
            channels=3,
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            image_size=config.side_in_eval,
            resize=resize,
            interpolation=config.interpolation,
        ),
    )
