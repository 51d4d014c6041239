"""Data sets of Hugging Face's `datasets`, on disk or on the hub; an extra, and so an own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardtrain.job.config import HuggingFace
from shardtrain.job.data.batches import DataSet
from shardtrain.job.data.photos import pictures
from shardtrain.job.schema import UserError, not_valid


class Rows:
    """One split. Images are left encoded, so that they are decoded, and found corrupt, like all others."""

    def __init__(self, split: Any, name: str, image: str, label: str, undecoded: Any) -> None:
        self.split = split.cast_column(image, undecoded)
        self.what, self.image = name, image
        self.labels: list[int] = list(split[label])

    def __getitem__(self, index: int) -> bytes:
        image = self.split[index][self.image]
        found: bytes | None = image["bytes"]
        return Path(image["path"]).read_bytes() if found is None else found

    def name(self, index: int) -> str:
        return f"{index} of {self.what}"


def hugging_face(config: HuggingFace) -> DataSet:
    try:
        import datasets
    except ImportError:
        raise UserError("data=huggingface needs its package: pip install 'shardtrain[huggingface]'") from None
    found = _load(datasets, config)
    train, val = (_part(datasets, found, config, key) for key in ("train", "val"))
    kind = found[config.train].features[config.label]
    named = isinstance(kind, datasets.ClassLabel)
    classes = kind.num_classes if named else 1 + max(*train.labels, *val.labels)
    return pictures(config, train, val, classes)


def _load(datasets: Any, config: HuggingFace) -> Any:
    root = Path(config.root).expanduser()
    saved = (root / "dataset_dict.json").is_file()
    try:
        return datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(config.root)
    except Exception as error:  # of many kinds: not found, no network, files that it cannot read
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"data.root={config.root}: datasets cannot load it: {reason}") from error


def _part(datasets: Any, found: Any, config: HuggingFace, key: str) -> Rows:
    name = getattr(config, key)
    if name not in found:
        raise not_valid(f"data.{key}={name}: {config.root} has no such split", name, found)
    split = found[name]
    for column in ("image", "label"):
        wanted, valid = getattr(config, column), list(split.features)
        if wanted not in valid:
            raise not_valid(f"data.{column}={wanted}: {config.root} has no such column", wanted, valid)
    what = f"the split {name} of {config.root}"
    return Rows(split, what, config.image, config.label, datasets.Image(decode=False))
