"""Decode photographs of any size and crop them to squares when they are needed; open sets of them.

Sets are files in folders like ImageNet's, `root/train/<class>/<image>` and `root/val/<class>/<image>`, those
of Hugging Face's `datasets` (an extra), and WebDataset's tar files. This file is imported only when needed,
since torchvision's transforms take a second to import.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from shardtrain import comm
from shardtrain.job.config import HuggingFace, ImageFolder, Photos, WebDataset
from shardtrain.job.data.feed import Batches, DataSet
from shardtrain.job.dist_env import together
from shardtrain.job.errors import UserError, not_valid, path_of, plain_file, reading

IMAGENET_MEAN, IMAGENET_STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
MOST_DIGITS = 8  # of a class's number in a tar file
MOST_CLASSES = 1 << 16  # unless there are more images, or the data set names its classes
Index = np.ndarray[Any, np.dtype[np.int64]]  # [images, 3]: first byte, bytes, label


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

    def __init__(self, source: Source, crop: Callable[[int], Any], side: int, random: bool = False) -> None:
        """crop: the transform to `side` pixels."""
        self.source, self.crop, self.side, self.random = source, crop, side, random
        self.transform = v2.Compose([crop(side), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*map(self._read, indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def at(self, side: int) -> Pictures:
        return self if side == self.side else Pictures(self.source, self.crop, side, self.random)

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


def pictures(config: Photos, train: Source, val: Source, classes: int | None = None) -> DataSet:
    """Return the data set of two sources: random crops to train on, centre crops to evaluate.

    ``classes``: how many the data set names. Raises UserError for a label that is no number of a class.
    """
    bound = classes or max(MOST_CLASSES, len(train.labels))
    for source in (train, val):
        for index, label in enumerate(source.labels):
            if type(label) is not int or not 0 <= label < bound:
                image = f"{config.name} {config.root}: the image {source.name(index)} has the label {label!r}"
                raise UserError(f"{image}, expected the number of a class, 0 to {bound - 1}")
    how = {"interpolation": v2.InterpolationMode(config.interpolation), "antialias": True}
    random = partial(v2.RandomResizedCrop, scale=(config.crop_area, 1.0), **how)
    centre = partial(_centre_crop, config.resize, **how)
    as_val = Pictures(train, centre, config.side_in_eval)
    return DataSet(
        train=Pictures(train, random, config.image_size, random=True),
        val=as_val if val is train else Pictures(val, centre, config.side_in_eval),
        train_as_val=as_val,
        name=f"{config.name} {config.root}",
        classes=classes or 1 + max(*train.labels, *val.labels),
        channels=3,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
    )


def _centre_crop(resize: int | None, side: int, **how: Any) -> v2.Transform:
    return v2.Compose([v2.Resize(resize or round(side * 256 / 224), **how), v2.CenterCrop(side)])


class Files:
    """Read the images of `root/train` or `root/val`."""

    def __init__(self, config: ImageFolder, part: str) -> None:
        root = path_of("data.root", config.root)
        inside = ", ".join(sorted(entry.name for entry in root.glob("*"))[:5]) or "nothing"
        instead = ", or data.validation=0.2 to hold some of train out" if part == "val" else ""
        expected = f"expected {part}/<class>/<image> in {root.absolute()}{instead}, found {inside}"
        with reading(f"data.root={config.root}", expected):
            found = datasets.ImageFolder(str(root / part))
        self.classes, self.labels = found.classes, found.targets
        self.paths: list[str] = [path for path, _ in found.samples]

    def __getitem__(self, index: int) -> bytes:
        return plain_file(Path(self.paths[index])).read_bytes()

    def name(self, index: int) -> str:
        return self.paths[index]


def image_folder(config: ImageFolder) -> DataSet:
    train = val = Files(config, "train")
    if not config.validation or path_of("data.root", config.root).joinpath("val").exists():
        val = Files(config, "val")
    if train.classes != val.classes:
        names = {"train": set(train.classes), "val": set(val.classes)}
        lacking = {part: sorted(set.union(*names.values()) - own)[:5] for part, own in names.items()}
        said = " and ".join(f"{part} has no {', '.join(lacks)}" for part, lacks in lacking.items() if lacks)
        raise UserError(f"data.root={config.root}: {said}; both need a folder of each class")
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
    with reading("data=huggingface", "pip install 'shardtrain[huggingface]'", ImportError):
        import datasets
    root = path_of("data.root", config.root)
    saved = (root / "dataset_dict.json").is_file()
    with reading(f"data.root={config.root}", "expected what Hugging Face's datasets can load"):
        found: Any = datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(config.root)
    train, val = (Rows(found, config, key, datasets.Image(decode=False)) for key in ("train", "val"))
    names, others = (
        getattr(found[p].features[config.label], "names", None) for p in (config.train, config.val)
    )
    if names != others:
        raise UserError(
            f"data.root={config.root}: {config.train} has the classes {names}, {config.val} {others}"
        )
    return pictures(config, train, val, names and len(names))


class Shards:
    """Read the images of several tar files ("shards") with `<key>.jpg` and `<key>.cls` side by side.

    An index has the byte at which each image begins. So images are read from the tar file in any order, and a
    rank's images are a function of the seed and the step, as with every other data set. The `webdataset`
    package streams shards through a shuffle buffer instead. That is faster on disks and remote storage, but
    can neither continue exactly nor give the same batches to another number of ranks.
    """

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        together(lambda: [_index(path) for path in paths[comm.rank() :: comm.world_size()]])
        indexes = [_index(path) for path in paths]  # most of them just made by other ranks
        whole = np.concatenate(indexes)
        self.ends = np.cumsum([len(index) for index in indexes])
        self.first, self.size = whole[:, 0], whole[:, 1]
        self.labels: list[int] = whole[:, 2].tolist()

    def __getitem__(self, index: int) -> bytes:
        with self._path(index).open("rb") as file:
            file.seek(self.first[index])
            return file.read(self.size[index])

    def name(self, index: int) -> str:
        return f"of {self.size[index]} bytes from byte {self.first[index]} of {self._path(index)}"

    def _path(self, index: int) -> Path:
        return self.paths[int(np.searchsorted(self.ends, index, side="right"))]


def web_dataset(config: WebDataset) -> DataSet:
    train, val = map(Shards, together(lambda: [_find(config, key) for key in ("train", "val")]))
    return pictures(config, train, val)


def _find(config: WebDataset, key: str) -> list[Path]:
    pattern = getattr(config, key)
    with reading(f"data.{key}={pattern}", f"expected a pattern of tar files in data.root={config.root}"):
        found = sorted(map(plain_file, path_of("data.root", config.root).glob(pattern)))
    if not found:
        raise UserError(f"data.{key}={pattern}: no such file in data.root={config.root}; expected tar files")
    return found


def _index(shard: Path) -> Index:
    """Return the index of a shard that an earlier run kept, or make it from the headers, and keep it.

    A kept index counts if it is complete, and has the shard's size and time.
    """
    state = shard.stat()
    stamp = np.array([[state.st_size, state.st_mtime_ns, 0]], dtype=np.int64)
    digest = hashlib.blake2b(os.fsencode(shard.absolute()), digest_size=16).hexdigest()
    kept = _cache() / f"{digest}.npy"
    with contextlib.suppress(UserError), reading(str(kept), "made again"):
        found: Index = np.load(plain_file(kept), allow_pickle=False)
        if np.array_equal(found[:1], stamp) and len(found) > 1:
            return found[1:]
    index = np.array(list(_scan(shard)), dtype=np.int64)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            np.save(Path(folder, kept.name), np.concatenate([stamp, index]), allow_pickle=False)
            os.replace(Path(folder, kept.name), kept)
    return index


def _cache() -> Path:
    """Return the folder of indexes, which is the user's: that of the data set is perhaps not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "shardtrain")


def _scan(shard: Path) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, size in bytes and label of each image, ordered by the key's first appearance."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    with reading(str(shard), "expected an uncompressed tar file"), tarfile.open(shard, "r:") as tar:
        for member in tar:
            folder, _, name = member.name.rpartition("/")
            stem, _, kind = name.partition(".")
            key = f"{folder}/{stem}"
            if f".{kind.lower()}" in IMG_EXTENSIONS:
                images[key] = member.offset_data, member.size
            elif kind == "cls":
                file = tar.extractfile(member)
                text = file.read(MOST_DIGITS + 2).decode(errors="replace").strip() if file else ""
                if not (text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS):
                    found = f"{member.name} holds {text[:20]!r}"
                    raise UserError(f"{shard}: {found}, expected the number of a class")
                labels[key] = int(text)
    for key in images.keys() ^ labels.keys():
        lacks = "label (.cls)" if key in images else "image (.jpg, .png, …)"
        raise UserError(f"{shard}: {key.lstrip('/')} has no {lacks}")
    if not images:
        raise UserError(f"{shard}: no images in it; expected <key>.jpg and <key>.cls side by side")
    yield from ((*extent, labels[key]) for key, extent in images.items())
