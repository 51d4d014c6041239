"""Decode photographs of any size and crop them to squares when they are needed; open sets of them.

Sets are files in folders like ImageNet's, `root/train/<class>/<image>` and `root/val/<class>/<image>`, those
of Hugging Face's `datasets` (an extra), and tar files (`tars`). This file is imported only when needed, since
torchvision's transforms take a second to import.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.transforms import v2

from shardtrain.job.config import HuggingFace, ImageFolder, Photos
from shardtrain.job.data.batches import Batches, DataSet
from shardtrain.job.schema import UserError, not_valid, path_of, plain_file, reading

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)


class Source(Protocol):
    """Read encoded images by index."""

    labels: list[int]

    def __getitem__(self, index: int) -> bytes: ...

    def name(self, index: int) -> str:
        """Return the image's place, for messages."""
        ...


class Unreadable(UserError):
    """Report an image that cannot be read, without the traceback that a worker adds to the text."""

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition("Unreadable: ")[2].strip())


class Pictures(Batches):
    """Hold one part of a data set, cropped to squares. Random crops use torch's random numbers."""

    random = True

    def __init__(self, source: Source, crop: Callable[[int], Any], side: int) -> None:
        """crop: the transform to `side` pixels."""
        self.source, self.crop, self.side = source, crop, side
        self.transform = v2.Compose([crop(side), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*map(self._read, indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def at(self, side: int) -> Pictures:
        return self if side == self.side else Pictures(self.source, self.crop, side)

    def cut_as(self, other: Batches) -> Pictures:
        assert isinstance(other, Pictures)
        return Pictures(self.source, other.crop, other.side)

    def _read(self, index: int) -> tuple[Tensor, int]:
        try:
            image: Image.Image = Image.open(io.BytesIO(self.source[index]))
            if image.mode.startswith("I;16"):  # grey, whose values `convert` would cut at 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("RGB")
        except Exception as error:  # decoders raise exceptions of many kinds
            reason = str(error).partition(" <")[0]  # Pillow adds the address of the bytes
            raise Unreadable(f"cannot read the image {self.source.name(index)}: {reason}") from None
        return self.transform(image), self.source.labels[index]


def pictures(config: Photos, train: Source, val: Source, classes: int | None = None) -> DataSet:
    """Return the data set of two sources: random crops to train on, centre crops to evaluate."""
    random = partial(v2.RandomResizedCrop, scale=(config.crop_area, 1.0), antialias=True)
    centre = partial(_centre_crop, config.resize)
    parts = Pictures(train, random, config.image_size), Pictures(val, centre, config.side_in_eval)
    classes = classes or 1 + max(*train.labels, *val.labels)
    return DataSet(*parts, f"{config.name} {config.root}", classes, 3, IMAGENET_MEAN, IMAGENET_STD)


def _centre_crop(resize: int | None, side: int) -> v2.Transform:
    return v2.Compose([v2.Resize(resize or round(side * 256 / 224), antialias=True), v2.CenterCrop(side)])


class Files:
    """Read the images of `root/train` or `root/val`."""

    def __init__(self, config: ImageFolder, part: str) -> None:
        root = path_of("data.root", config.root)
        inside = ", ".join(sorted(entry.name for entry in root.glob("*"))[:5]) or "nothing"
        expected = f"expected {part}/<class>/<image> in {root.absolute()}, found {inside}"
        with reading(f"data.root={config.root}", expected):
            found = datasets.ImageFolder(str(root / part))
        self.classes, self.labels = found.classes, found.targets
        self.paths: list[str] = [path for path, _ in found.samples]

    def __getitem__(self, index: int) -> bytes:
        return plain_file(Path(self.paths[index])).read_bytes()

    def name(self, index: int) -> str:
        return self.paths[index]


def image_folder(config: ImageFolder) -> DataSet:
    train, val = Files(config, "train"), Files(config, "val")
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(f"data.root={config.root}: train and val differ in the classes {', '.join(odd[:5])}")
    return pictures(config, train, val, len(train.classes))


class Rows:
    """Read one split of Hugging Face's `datasets`. Images stay encoded, since `Pictures` decodes all."""

    def __init__(self, found: Any, config: HuggingFace, key: str, undecoded: Any) -> None:
        name = getattr(config, key)
        if name not in found:
            raise not_valid(f"data.{key}={name}: {config.root} has no such split", name, found)
        split = found[name]
        for column in ("image", "label"):
            wanted, valid = getattr(config, column), list(split.features)
            if wanted not in valid:
                raise not_valid(f"data.{column}={wanted}: {config.root} has no such column", wanted, valid)
        self.split, self.image = split.cast_column(config.image, undecoded), config.image
        self.labels: list[int] = list(split[config.label])
        self.where = f"the split {name} of {config.root}"

    def __getitem__(self, index: int) -> bytes:
        image = self.split[index][self.image]
        content: bytes | None = image["bytes"]
        return Path(image["path"]).read_bytes() if content is None else content

    def name(self, index: int) -> str:
        return f"{index} of {self.where}"


def hugging_face(config: HuggingFace) -> DataSet:
    try:
        import datasets
    except ImportError:
        raise UserError("data=huggingface needs its package: pip install 'shardtrain[huggingface]'") from None
    root = path_of("data.root", config.root)
    saved = (root / "dataset_dict.json").is_file()
    with reading(f"data.root={config.root}", "expected what Hugging Face's datasets can load"):
        found: Any = datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(config.root)
    train, val = (Rows(found, config, key, datasets.Image(decode=False)) for key in ("train", "val"))
    kind = found[config.train].features[config.label]
    return pictures(config, train, val, getattr(kind, "num_classes", None))
