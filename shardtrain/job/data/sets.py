"""The data sets by name: digits, cifar10, cifar100 and fake here, photographs in `photos` and `tars`."""

from __future__ import annotations

import importlib.resources
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shardtrain.job.config import Cifar, Data, Digits, Fake, HuggingFace, ImageFolder, WebDataset
from shardtrain.job.data.batches import Arrays, DataSet, OfLength
from shardtrain.job.data.sampler import generator
from shardtrain.job.dist_env import on_rank_0
from shardtrain.job.schema import UserError


def load(config: Data) -> DataSet:
    """Return the data set that the configuration names."""
    data, limit = _read(config), config.limit
    if limit is None:
        return data
    train, val = (OfLength(part, min(limit, len(part))) for part in (data.train, data.val))
    return data._replace(train=train, val=val)


def _read(config: Data) -> DataSet:
    match config:
        case Digits():
            return _digits()
        case Cifar():
            return _cifar(config)
        case Fake():
            return _fake(config)
    # What reads photographs is imported when it is needed: torchvision's transforms take a second.
    from shardtrain.job.data import photos, tars

    match config:
        case ImageFolder():
            return photos.image_folder(config)
        case WebDataset():
            return tars.web_dataset(config)
        case HuggingFace():
            return photos.hugging_face(config)


def _digits() -> DataSet:
    """Return the embedded handwritten digits; `digits.md` has their source and licence."""
    packed = importlib.resources.files(__package__).joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        images = torch.from_numpy(arrays["images"])[:, None]
        labels = torch.from_numpy(arrays["labels"]).long()
        held_out = torch.from_numpy(arrays["held_out"])
    return DataSet(
        train=Arrays(images[~held_out], labels[~held_out]),
        val=Arrays(images[held_out], labels[held_out]),
        name="digits",
        classes=10,
        channels=1,
        mean=(4.89,),
        std=(6.02,),
    )


def _cifar(config: Cifar) -> DataSet:
    import torchvision

    kind = torchvision.datasets.CIFAR10 if config.name == "cifar10" else torchvision.datasets.CIFAR100
    if config.download:
        on_rank_0(lambda: _fetch(kind, config))
    try:
        parts = [kind(config.root, train=train) for train in (True, False)]
    except RuntimeError:
        raise UserError(
            f"data.root={config.root}: no {config.name} in {Path(config.root).expanduser().absolute()}; "
            f"give the folder that has it, or data.download=true"
        ) from None
    train, val = (
        Arrays(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    return DataSet(
        train=train,
        val=val,
        name=config.name,
        classes=len(parts[0].classes),
        channels=3,
        mean=(125.3, 123.0, 113.9),
        std=(63.0, 62.1, 66.7),
    )


def _fetch(kind: Callable[..., object], config: Cifar) -> None:
    """Download the data set on one rank for all ranks. Several hosts have to share `root`."""
    try:
        kind(config.root, download=True)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"data.download=true: cannot fetch {config.name} to {config.root}: {error}"
        ) from error


def _fake(config: Fake) -> DataSet:
    """Return random images with random labels, a few of them repeated: to measure speed and memory."""
    few = min(256, config.train_images)
    shape = (few, config.channels, config.image_size, config.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator("fake images"))
    labels = torch.randint(0, config.classes, (few,), generator=generator("fake labels"))
    pool = Arrays(images, labels)
    return DataSet(
        train=OfLength(pool, config.train_images),
        val=OfLength(pool, config.val_images),
        name="fake",
        classes=config.classes,
        channels=config.channels,
        mean=(127.5,) * config.channels,
        std=(73.9,) * config.channels,
    )
