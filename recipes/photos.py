"""Read photographs of any size from folders, and crop them to squares when they are needed.

Folders are like ImageNet's, `root/train/<class>/<image>` and `root/val/<class>/<image>`. This file is
imported only when needed, since torchvision's transforms take a second to import.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFile
from torch import Tensor
from torchvision.transforms import v2

from shardtrain.config.config import ImageFolder
from shardtrain.config.errors import Unreadable, UserError, not_valid, path_of, plain_file, reading
from shardtrain.config.format import counted
from shardtrain.data.feed import Batches, DataSet
from shardtrain.data.preprocessing import Preprocessing
from shardtrain.job.inference import Inference, mode_of, transform_of

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
MOST_KINDS = 5  # kinds of files in a message
LOOKED_AT = 256  # images whose kind is looked at before they are used
GREYS = 16  # of those the ones of 16 bits whose values are looked at
USUAL_BITS = 15  # of the largest value of a 16-bit grey image


def opened_image(source: Files, index: int, mode: str = "RGB") -> Image.Image:
    """Return an image of ``source`` in Pillow's ``mode``, of 8 bits per channel. Raises Unreadable."""
    try:
        content = plain_file(Path(source.paths[index])).read_bytes()
        image: Image.Image = Image.open(io.BytesIO(content))
        # `convert` would cut grey values at 255.
        if _has_16_bits(image):
            image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        if image.mode in ("I", "F"):
            raise ValueError(f"its values are of mode {image.mode}, expected 8 or 16 bits per channel")
        return image.convert(mode)
    except Exception as error:  # decoders raise exceptions of many kinds
        reason = str(error).partition(" <")[0]  # Pillow adds the address of the bytes
        raise Unreadable(f"cannot read the image {source.paths[index]}: {reason}") from None


def _has_16_bits(image: Image.Image) -> bool:
    """Return whether an image has grey values of 16 bits. Pillow scales those of PGM files to 16 bits."""
    return image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))


def warnings_of_grey(*parts: Files) -> list[str]:
    """Return a warning if 16-bit grey images, of which a few are looked at, are dark for want of bits."""
    highest = [*itertools.chain.from_iterable(map(_highest_values, parts))]
    dark = [value for value in highest if 0 < value.bit_length() < USUAL_BITS]
    if not dark:
        return []
    bits = max(dark).bit_length()
    return [
        f"warning: {len(dark)} of {len(highest)} 16-bit grey images that were looked at have values up to "
        f"{max(dark)}, which is {bits} bits, and become dark or black, since the upper 8 of 16 bits are "
        f"used: multiply their values by {1 << (16 - bits)}"
    ]


def _highest_values(files: Files) -> list[int]:
    """Return the highest value of each of a few 16-bit grey images."""
    count = len(files.paths)
    highest = list[int]()
    for path in files.paths[:: max(1, count // LOOKED_AT)]:
        # What cannot be read is reported when it is needed.
        with contextlib.suppress(Exception), Image.open(plain_file(Path(path))) as image:
            if _has_16_bits(image):
                highest.append(int(np.asarray(image).max()))
        if len(highest) == GREYS:
            break
    return highest


class Pictures(Batches):
    """One part of a data set, cropped to squares. Random crops use torch's random numbers."""

    def __init__(self, source: Files, crop: v2.Transform, random: bool = False) -> None:
        self.source = source
        self.random = random
        self.labels: Tensor = torch.tensor(source.labels, dtype=torch.int64)
        self.transform = v2.Compose([crop, v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = [self.transform(opened_image(self.source, index)) for index in indices]
        return torch.stack(images), self.labels[indices]


def files_in(root: Path) -> Iterator[str]:
    """Yield the paths of all files in ``root`` and its folders, in order. Raises OSError if it cannot."""

    def refuse(error: OSError) -> None:
        raise error

    for folder, _, names in sorted(os.walk(root, onerror=refuse, followlinks=True)):
        for name in sorted(names):
            yield os.path.join(folder, name)


def readable_endings() -> frozenset[str]:
    """Return the endings of files that Pillow decodes as images, with what is registered in it.

    Neither films nor pages in PostScript, nor formats that it only identifies.
    """
    Image.init()
    endings = []
    for ending, kind in Image.registered_extensions().items():
        opener = Image.OPEN.get(kind, (None,))[0]
        is_stub = isinstance(opener, type) and issubclass(opener, ImageFile.StubImageFile)
        is_picture = Image.MIME.get(kind, "image/").startswith("image/")
        if opener is not None and is_picture and not is_stub:
            endings.append(ending)
    return frozenset(endings)


class Sieve:
    """A test that tells the images in ``root`` from other files, and counts the others by their endings."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.endings = readable_endings()
        self.others: Counter[str] = Counter()

    def __call__(self, path: str) -> bool:
        """Return whether the file ``path`` is an image."""
        if any(name.startswith(".") for name in Path(path).relative_to(self.root).parts):
            return False  # hidden, or in a hidden folder such as `.ipynb_checkpoints`, and not counted
        ending = os.path.splitext(path)[1].lower()
        if ending not in self.endings:
            self.others[ending or "without an ending"] += 1
        return ending in self.endings

    def notes(self, beside: int = 0) -> list[str]:
        """Return a line about the files that are no images, and images ``beside`` the folders of classes."""
        kinds = sorted(self.others.items(), key=lambda item: (-item[1], item[0]))
        said = [f"{count} {kind}" for kind, count in kinds[:MOST_KINDS]]
        if len(self.others) > MOST_KINDS:
            said.append("…")
        parts = []
        if said:
            parts.append(
                f"{counted(self.others.total(), 'file')} that Pillow does not read ({', '.join(said)})"
            )
        if beside:
            parts.append(f"{counted(beside, 'image')} beside the folders of classes")
        return [f"left out of {self.root}: {' and '.join(parts)}"] if parts else []


class Prepared(Batches):
    """Images of files as a run's model gets them, NaN if they cannot be read; labels are their numbers."""

    def __init__(self, paths: Sequence[str], inference: Inference) -> None:
        self.source = Files(paths, [])
        self.mode = mode_of(inference)
        self.transform = transform_of(inference)
        side = inference.image_size
        self._shape = (inference.channels, side, side)

    def __len__(self) -> int:
        return len(self.source.paths)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return torch.stack([self._read(index) for index in indices]), torch.tensor(indices)

    def _read(self, index: int) -> Tensor:
        try:
            return self.transform(opened_image(self.source, index, self.mode))
        except Unreadable:
            return torch.full(self._shape, math.nan)  # so that the others get their answers

    def problem(self, index: int) -> str:
        """Return in one line why an image could not be read."""
        try:
            opened_image(self.source, index, self.mode)
        except Unreadable as error:
            return " ".join(str(error).split())
        return f"cannot read the image {self.source.paths[index]}: it could not be read when it was needed"


class Files(NamedTuple):
    """Images by their paths, with their labels."""

    paths: Sequence[str]
    labels: Sequence[int]


NO_FILES = Files((), ())


def image_folder(config: ImageFolder, *, all_held_out: bool = False) -> DataSet:
    """Open the images of `root/train` and `root/val`, or all to score, of the classes of a run."""
    if all_held_out:
        to_score = _to_score(config)
        held_out = photographs(config, config.classes or (), NO_FILES, to_score.files)
        return held_out._replace(notes=(*held_out.notes, *to_score.notes))
    train = _in_folders(config, "train")
    val = None
    if not config.validation or os.path.exists(path_of("data.root", config.root) / "val"):
        val = _in_folders(config, "val")
    if val is not None and train.classes != val.classes:
        names = {"train": set(train.classes), "val": set(val.classes)}
        lacking = {part: sorted(set.union(*names.values()) - own)[:5] for part, own in names.items()}
        said = " and ".join(f"{part} has no {', '.join(lacks)}" for part, lacks in lacking.items() if lacks)
        raise UserError(f"data.root={config.root}: {said}; both need a folder of each class")
    data = photographs(config, train.classes, train.files, None if val is None else val.files)
    return data._replace(notes=(*data.notes, *train.notes, *(() if val is None else val.notes)))


def _to_score(config: ImageFolder) -> Part:
    """Return the images of `root/val/<class>`, or without `val` of `root/<class>`, by the labels of a run."""
    root = path_of("data.root", config.root)
    part = "val" if (root / "val").is_dir() else "."
    whole = _in_folders(config, part)
    classes = config.classes or ()
    for name in whole.classes:
        if name not in classes:
            raise not_valid(f"data.root={config.root}: the run has no class {name}", name, classes)
    labels = [classes.index(whole.classes[label]) for label in whole.files.labels]
    return whole._replace(files=Files(whole.files.paths, labels))


def images_in(root: Path) -> tuple[list[str], list[str]]:
    """Return the paths of images below ``root``, in order, and lines about other files. Raises UserError."""
    if not root.is_dir():
        raise UserError(f"data.root={root}: there is no such folder")
    is_image = Sieve(root)
    with reading(f"data.root={root}", "expected folders that can be read"):
        paths = [path for path in files_in(root) if os.path.isfile(path) and is_image(path)]
    return paths, is_image.notes()


class Part(NamedTuple):
    """The images of one part, the names of its classes, and lines about other files."""

    files: Files
    classes: list[str]
    notes: list[str]


def _in_folders(config: ImageFolder, part: str) -> Part:
    """Return the images of one part, in folders of their classes."""
    root = path_of("data.root", config.root)
    if not root.is_dir():
        raise UserError(f"data.root={config.root}: there is no such folder; it would be {root.absolute()}")
    if not (root / part).is_dir() and (root.absolute().parent / part).is_dir():
        raise UserError(
            f"data.root={config.root}: there is no {part} in it, but beside it: "
            f"did you mean data.root={root.parent}?"
        )
    inside = ", ".join(sorted(entry.name for entry in root.glob("*"))[:5]) or "nothing"
    instead = ", or data.validation=0.2 to hold some of train out" if part == "val" else ""
    expected = f"expected {part}/<class>/<image> in {root.absolute()}{instead}, found {inside}"
    with reading(f"data.root={config.root}", expected):
        is_image = Sieve(root / part)
        entries = sorted((root / part).iterdir())
        folders = [path for path in entries if path.is_dir() and not path.name.startswith(".")]
        if not folders:
            raise ValueError(f"no folder of a class in {root / part}")
        paths = list[str]()
        labels = list[int]()
        for label, place in enumerate(folders):
            own = [path for path in files_in(place) if is_image(path)]
            if not own:
                raise ValueError(f"no image in {place}")
            paths += own
            labels += [label] * len(own)
        beside = [path for path in entries if path.is_file() and is_image(str(path))]
    return Part(Files(paths, labels), [path.name for path in folders], is_image.notes(len(beside)))


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
        notes=tuple(warnings_of_grey(*filter(None, (train, val, test)))),
    )
