"""Read WebDataset's format: tar files ("shards") with `<key>.jpg` and `<key>.cls` side by side.

An index has the byte at which each image begins. So images are read from the tar file in any order, and a
rank's images are a function of the seed and the step, as with every other data set. The `webdataset` package
streams shards through a shuffle buffer instead. That is faster on disks and remote storage, but can neither
continue exactly nor give the same batches to another number of ranks.

The index is made by reading the headers once. It is kept beside its shard as `NAME.tar.index` if the folder
is writable.
"""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torchvision.datasets.folder import IMG_EXTENSIONS

from shardtrain import comm
from shardtrain.job.config import WebDataset
from shardtrain.job.data.batches import DataSet
from shardtrain.job.data.photos import pictures
from shardtrain.job.dist_env import together
from shardtrain.job.schema import UserError, path_of, plain_file, reading

MOST_DIGITS = 8  # of a class's number
Index = NDArray[np.int64]  # [images, 3]: first byte, bytes, label


class Shards:
    """Read the images of several tar files, one file after another."""

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
    """Return the index kept beside the shard if size and time match; otherwise read the headers."""
    kept = shard.with_name(f"{shard.name}.index")
    state = shard.stat()
    stamp = np.array([[state.st_size, state.st_mtime_ns, 0]], dtype=np.int64)
    with contextlib.suppress(UserError), reading(str(kept), "made again"):
        found: Index = np.load(plain_file(kept), allow_pickle=False)
        if np.array_equal(found[:1], stamp) and len(found) > 1:
            return found[1:]
    index = np.array(list(_scan(shard)), dtype=np.int64)
    # Several ranks may write at once: each writes its own file, and the last one stays.
    temporary = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            np.save(file, np.concatenate([stamp, index]), allow_pickle=False)
        os.replace(temporary, kept)
    except OSError:  # the folder is not writable: the next start reads the headers again
        temporary.unlink(missing_ok=True)
    return index


def _scan(shard: Path) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, bytes and label of each image, in the order of the keys' first appearance."""
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
