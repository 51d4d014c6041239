"""Photographs of any size, decoded and cut to squares when they are needed; and sets of them.

Sets are files in folders, `root/train/<class>/<image>` and `root/val/<class>/<image>`, like ImageNet's, those
of Hugging Face's `datasets`, an extra, and tar files (`tars`). This is imported when it is needed, because
torchvision's transforms take a second to import.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from shardtrain.job.config import HuggingFace, ImageFolder, Photos
from shardtrain.job.data.batches import Batches, DataSet
from shardtrain.job.schema import UserError, not_valid

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)

MOST_IN_A_ROW = 10  # unreadable images; more mean that something else is wrong


class Source(Protocol):
    """Encoded images, by number."""

    labels: list[int]

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
        images, labels = zip(*map(self._read, indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def at(self, side: int) -> Pictures:
        if side == self.side:
            return self
        other = Pictures(self.source, self.crop, side, skip=self.skip)
        other.reported = self.reported
        return other

    def _read(self, wanted: int) -> tuple[Tensor, int]:
        """Return the image and its label; those of the next readable one, if others may be skipped."""
        problem = ""
        for index in range(wanted, wanted + (MOST_IN_A_ROW if self.skip else 1)):
            index %= len(self)
            try:
                image = Image.open(io.BytesIO(self.source[index])).convert("RGB")
            except Exception as error:  # decoders raise what they like
                problem = f"cannot read the image {self.source.name(index)}: {error}"
                if self.skip and index not in self.reported:
                    self.reported.add(index)
                    logging.getLogger("shardtrain").warning(
                        "%s; the next one takes its place (%d so far)", problem, len(self.reported)
                    )
            else:
                return self.transform(image), self.source.labels[index]
        if self.skip:
            raise Unreadable(f"{problem}; nor the {MOST_IN_A_ROW - 1} before it: are the files whole?")
        raise Unreadable(f"{problem}; data.corrupt=skip takes the next one instead")


def pictures(config: Photos, train: Source, val: Source, classes: int | None = None) -> DataSet:
    """Return the data set of two sources: random crops to train on, centre crops to evaluate."""
    skip = config.corrupt == "skip"
    random = partial(v2.RandomResizedCrop, scale=(config.crop_area, 1.0), antialias=True)
    centre = partial(_centre_crop, config.resize)
    return DataSet(
        train=Pictures(train, random, config.image_size, skip=skip),
        val=Pictures(val, centre, config.side_in_eval, skip=skip),
        name=f"{config.name} {config.root}",
        classes=classes or 1 + max(*train.labels, *val.labels),
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _centre_crop(resize: int, side: int) -> v2.Transform:
    return v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(side)])


class Files:
    """The images of `root/train` or `root/val`."""

    def __init__(self, config: ImageFolder, part: str) -> None:
        root = Path(config.root).expanduser()
        problem = _problem(root, part)
        try:
            found = None if problem else datasets.ImageFolder(str(root / part))
        except FileNotFoundError as error:  # a class without images
            found, problem = None, str(error)
        if found is None:
            raise UserError(f"data.root={config.root}: {problem}")
        self.classes, self.labels = found.classes, found.targets
        self.paths: list[str] = [path for path, _ in found.samples]

    def __getitem__(self, index: int) -> bytes:
        return Path(self.paths[index]).read_bytes()

    def name(self, index: int) -> str:
        return self.paths[index]


def image_folder(config: ImageFolder) -> DataSet:
    train, val = Files(config, "train"), Files(config, "val")
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise UserError(f"data.root={config.root}: train and val differ in the classes {', '.join(odd[:5])}")
    return pictures(config, train, val, len(train.classes))


def _problem(root: Path, part: str) -> str:
    """Say what to do about a part that is missing, or not sorted into classes; "" where all is well."""
    if (root / part).is_dir():
        entries = list((root / part).iterdir())
        if any(entry.is_dir() for entry in entries):
            return ""
        images = sum(map(_is_image, entries))
        return (
            f"{part} holds {images} images, but no folders; sort them into {part}/<class>/<image>, with the "
            "same classes as the other part"
        )
    missing = f"there is no folder {(root / part).absolute()}; expected {part}/<class>/<image> in it"
    if not root.is_dir():
        return missing
    for below in ("ILSVRC/Data/CLS-LOC", "Data/CLS-LOC", "imagenet", "images"):
        if (root / below / part).is_dir():
            return f"{missing}; there is one in data.root={root / below}"
    inside = sorted(root.iterdir())
    for entry in inside:
        if entry.suffix in (".tar", ".zip", ".tgz", ".gz"):
            advice = "has to be unpacked first (tar files of WebDataset: data=webdataset)"
            return f"{missing}; {entry.name} there {advice}"
    if any(_is_image(entry) for folder in inside if folder.is_dir() for entry in folder.iterdir()):
        return f"{missing}; {root} seems to be one part itself: give the folder that has train and val"
    names = ", ".join(entry.name for entry in inside[:5])
    return f"{missing}; " + (f"found there: {names}" if names else "the folder is empty")


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMG_EXTENSIONS


class Rows:
    """One split of Hugging Face's. Images are left encoded, so that one place here decodes them all."""

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
    root = Path(config.root).expanduser()
    saved = (root / "dataset_dict.json").is_file()
    try:
        found: Any = datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(config.root)
    except Exception as error:  # of many kinds: not found, no network, files that it cannot read
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"data.root={config.root}: datasets cannot load it: {reason}") from error
    train, val = (Rows(found, config, key, datasets.Image(decode=False)) for key in ("train", "val"))
    kind = found[config.train].features[config.label]
    return pictures(config, train, val, getattr(kind, "num_classes", None))
