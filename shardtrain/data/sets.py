"""The data sets by name: arrays, digits, CIFAR and fake ones here, others by their ``_target_``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.resources
import io
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor

from shardtrain.config.config import Cifar, Data, Digits, Fake, Npz, OwnData
from shardtrain.config.errors import UserError, path_of, plain_file, reading
from shardtrain.config.format import first_of
from shardtrain.config.target import find_target, instantiate
from shardtrain.data.feed import Arrays, Chosen, DataSet, of_length
from shardtrain.data.items import Expected, Items
from shardtrain.data.preprocessing import Preprocessing, as_configured, numbered
from shardtrain.data.sampler import generator
from shardtrain.launch.ranks import on_rank_0

FAKE_CLASSES = 10  # of random labels
SAMPLE = 256  # images of a user's data set that give mean and standard deviation
# Mean and standard deviation of the training images, per channel.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
}


def load(config: Data, allow: Sequence[str] = (), *, all_held_out: bool = False) -> DataSet:
    """Return the data set that the configuration names. ``allow``: packages of `data._target_`.

    With ``all_held_out`` all are scored: `data.validation` divides none, and files need no part to train on.
    """
    data = _read(config, allow, all_held_out)
    limit = config.limit
    own = data.preprocessing
    if own.image_size == 0:
        own = dataclasses.replace(own, image_size=data.side)
    data = data._replace(preprocessing=as_configured(own, config, data.name))
    if config.validation and not all_held_out:
        data = with_validation(data, config.validation, config.split)
    data = data._replace(notes=(*data.notes, *class_notes(data)))
    if limit is None:
        return data
    names = ("val", "test") if all_held_out else ("train", "train_as_val", "val", "test")
    parts = {name: getattr(data, name) for name in names}
    some: dict[str, Any] = {
        name: part and of_length(part, min(limit, len(part))) for name, part in parts.items()
    }
    return data._replace(**some)


def class_notes(data: DataSet) -> list[str]:
    """Return warnings of a class that is a missing label, and of classes without an image to train on."""
    notes = []
    if missing := [name for name in data.classes if name.strip().lower() == "nan"]:
        notes.append(f"warning: {missing[0]} is a class, perhaps of labels that are missing")
    absent = [name for name, count in data.counts.get("train", {}).items() if not count]
    if len(data.train) and absent:
        notes.append(f"warning: no training image of {first_of(absent)}")
    return notes


def stratified(labels: Tensor, split: int) -> Tensor:
    """Return a random order of images whose every beginning has about the same fraction of each class.

    The order depends on ``split`` alone. Image i of the n images of a class, in random order, is at the
    fraction (i + 1/2) / n of the whole order.
    """
    order = torch.randperm(len(labels), generator=generator("validation", split))
    fractions = torch.empty(len(labels), dtype=torch.float64)
    for label in labels.unique():
        own = order[labels[order] == label]
        fractions[own] = (torch.arange(len(own), dtype=torch.float64) + 0.5) / len(own)
    return order[fractions[order].argsort(stable=True)]


def with_validation(data: DataSet, amount: float, split: int) -> DataSet:
    """Use ``amount`` (fraction or number) of the training images for validation, and ``data.val`` to test.

    The choice depends on the data and on ``split`` alone. It has about the same fraction of each class, if
    labels are known before images are loaded. Raises UserError for another amount.
    """
    images = len(data.train)
    count = round(amount if amount >= 1 else amount * images)
    if data.test is not None:
        raise UserError(f"data.validation={amount:g}: {data.name} has a validation part; set it to 0")
    if not 0 < count < images or (amount > 1 and count != amount):
        raise UserError(f"data.validation={amount:g}: expected a fraction, or fewer than {images} images")
    if data.train.labels is None:
        order = torch.randperm(images, generator=generator("validation", split))
    else:
        order = stratified(data.train.labels, split)
    chosen = order[:count].sort().values
    rest = order[count:].sort().values
    as_val = data.train_as_val or data.train
    train = Chosen(data.train, rest)
    val = Chosen(as_val, chosen)
    test = None if data.val is as_val else data.val  # there may be nothing but training images
    return data._replace(train=train, val=val, test=test, train_as_val=Chosen(as_val, rest))


def _read(config: Data, allow: Sequence[str], all_held_out: bool) -> DataSet:
    match config:
        case OwnData():
            return _own(config, allow)
        case Digits():  # `digits.md` has their source and licence
            packed = importlib.resources.files(__package__).joinpath("digits.npz").read_bytes()
            return _arrays(config, io.BytesIO(packed), "digits")
        case Npz():
            path = path_of("data.root", config.root)
            expected = "expected an .npz with train_images, train_labels and val_… or test_…"
            with reading(f"data.root={config.root}", expected), plain_file(path).open("rb") as file:
                return _arrays(config, file, f"arrays {config.root}")
        case Cifar():
            return _cifar(config)
        case Fake():
            return _fake(config)
        case _:
            how = {"all_held_out": True} if all_held_out else {}
            opened: DataSet = find_target(config._target_, "data", DataSet, allow)(config, **how)
            return opened


def _own(config: OwnData, allow: Sequence[str]) -> DataSet:
    """Open what the user's function returns: a `DataSet`, or a pair of torch's, the second perhaps None."""
    key = f"data._target_={config._target_}"
    # `image_size` is a key of all data sets, and here also a keyword, if the function has it.
    sized = {"image_size": config.image_size} if config.image_size else {}
    parts = instantiate({"_target_": config._target_, **config.keywords, **sized}, "data", tuple, allow)
    if isinstance(parts, DataSet):
        if not isinstance(parts.classes, tuple):
            raise UserError(f"{key}: classes is {parts.classes!r}, expected a tuple of names, by label")
        return parts
    if len(parts) != 2 or (parts[1] is None and not config.validation):
        raise UserError(
            f"{key}: expected a training set and a validation set; None for the second needs "
            "data.validation=FRACTION"
        )
    names = f"{key}: the training set", f"{key}: the validation set"
    classes = getattr(parts[0], "classes", None)
    if not isinstance(classes, list | tuple | None):
        raise UserError(f"{names[0]} has classes={classes!r}, expected a list of names, by label")
    side = config.image_size
    with torch.random.fork_rng(devices=[]):  # the same random changes on every rank
        torch.default_generator.manual_seed(0)
        image, _ = Items(parts[0], names[0], side).read(0)
        expected = Expected(tuple(image.shape), None if classes is None else len(classes))
        train = Items(parts[0], names[0], side, expected)
        some = of_length(train, min(len(train), SAMPLE))
        images, labels = some[[*range(len(some))]]
    if classes is None:
        classes = numbered(1 + int(labels.max()))
        train = Items(parts[0], names[0], side, expected._replace(classes=len(classes)))
        known = labels if len(some) == len(train) else train.labels
        with reading(names[0], "an attribute `classes` of it names all", ValueError):
            _require_all(known, len(classes))
    mean, std = statistics(images)
    return DataSet(
        train=train,
        val=train if parts[1] is None else Items(parts[1], names[1], side, train.expected),
        name=config._target_,
        preprocessing=Preprocessing.of_arrays(
            tuple(map(str, classes)), mean, std, config.side_in_eval, side or None
        ),
    )


def statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 images [count, channels, height, width].

    They are of pixels from 0 to 1. Sums of whole numbers, so neither threads nor machines change them. A
    standard deviation of 0 becomes that of one step of a pixel.
    """
    values = images.transpose(0, 1).flatten(1).long()
    count = values.shape[1]
    mean = values.sum(1).double() / count
    variance = (values.square().sum(1).double() / count - mean.square()).clamp(min=0)
    deviation = variance.sqrt()
    return _of_one(mean), _of_one(torch.where(deviation < 0.005, 1.0, deviation))


def _of_one(values: Tensor) -> tuple[float, ...]:
    """Return stored pixel values, rounded to hundredths, as values from 0 to 1."""
    return tuple(round(value, 2) / 255 for value in values.tolist())


def _arrays(config: Digits | Npz, file: IO[bytes], title: str) -> DataSet:
    """Read an `.npz` that has MedMNIST's keys. Raises ValueError if anything in it is wrong."""
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, NpzFile):
        raise ValueError("it holds a single array")
    with archive:
        held_out = [name for name in ("val", "test") if f"{name}_images" in archive] or ["test"]
        parts = {name: _part(archive, name) for name in ("train", *held_out)}
    train = parts["train"]
    classes = 1 + int(train.labels.max())
    for name, part in parts.items():
        bound = len(train) if part is train else classes
        low = part.labels.min()
        high = part.labels.max()
        if low < 0 or high >= bound:
            raise ValueError(f"{name}_labels are from {low} to {high}, not 0 to {bound - 1}")
        if part.images.shape[1:] != train.images.shape[1:]:
            raise ValueError(f"{name}_images have another size or other channels than train_images")
    _require_all(train.labels, classes)
    mean, std = statistics(train.images[:: 1 + len(train) // 2048])
    return DataSet(
        train=train,
        val=parts[held_out[0]],
        name=title,
        preprocessing=Preprocessing.of_arrays(numbered(classes), mean, std, config.side_in_eval),
        test=parts["test"] if len(held_out) > 1 else None,
    )


def _require_all(labels: Tensor | None, classes: int) -> None:
    """Raise ValueError if no training image has one of the ``labels``, numbers from 0."""
    if labels is None:
        return
    absent = (labels.bincount(minlength=classes) == 0).nonzero().flatten().tolist()
    if absent:
        raise ValueError(
            f"no training image of class {first_of([*map(str, absent)])} of 0 to {classes - 1}; "
            "each needs some"
        )


def _part(archive: NpzFile, part: str) -> Arrays:
    """Return one part's images, uint8 with channels last, first or none, and labels, [n] or [n, 1]."""
    images, labels = (archive.get(f"{part}_{kind}") for kind in ("images", "labels"))
    if images is None or labels is None:
        raise ValueError(f"no {part}_{'labels' if labels is None else 'images'} among {', '.join(archive)}")
    found_images = f"{part}_images are {images.dtype} {list(images.shape)}"
    if images.ndim == 3:
        images = images[:, None]
    elif images.ndim == 4 and images.shape[3] < min(images.shape[1:3]):
        images = np.moveaxis(images, 3, 1)
    elif images.ndim != 4 or images.shape[1] >= min(images.shape[2:]):
        raise ValueError(f"{found_images}, not [n, height, width] with channels last, first or none")
    if images.dtype != np.uint8:
        raise ValueError(f"{found_images}, not uint8")
    if labels.size != len(labels) or labels.dtype.kind not in "iu" or not len(labels) == len(images) > 0:
        raise ValueError(
            f"{part}_labels are {labels.dtype} {list(labels.shape)}, not the class of each image"
        )
    numbers = torch.from_numpy(labels.reshape(-1).astype(np.int64))
    return Arrays(torch.from_numpy(np.ascontiguousarray(images)), numbers)


def _cifar(config: Cifar) -> DataSet:
    import torchvision

    kind = torchvision.datasets.CIFAR10 if config.name == "cifar10" else torchvision.datasets.CIFAR100
    where = path_of("data.root", config.root).absolute()
    what = f"data.root={config.root}"

    def fetch() -> None:
        with contextlib.suppress(RuntimeError):  # torchvision's for files that are missing or damaged
            kind(config.root)
            return
        print(f"{what}: no {config.name} in {where}; it is fetched", flush=True)
        with reading(what, f"no {config.name} in {where}, and it cannot be fetched"):
            kind(config.root, download=True)

    on_rank_0(fetch)  # several hosts must share `root`
    with reading(what, f"no {config.name} in {where}"):
        parts = [kind(config.root, train=train) for train in (True, False)]
    train, val = (
        Arrays(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))
        for part in parts
    )
    classes = tuple(parts[0].classes)
    mean, std = STATISTICS[config.name]
    how = Preprocessing.of_arrays(classes, mean, std, config.side_in_eval)
    return DataSet(train, val, config.name, how)


def _fake(config: Fake) -> DataSet:
    """Return random images with random labels, a few of them repeated, to measure speed and memory."""
    few = min(256, config.limit)
    shape = (few, config.channels, config.image_size, config.image_size)
    with reading("data=fake", "expected images of a size that fits into memory"):
        images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator("fake images"))
    labels = torch.randint(0, FAKE_CLASSES, (few,), generator=generator("fake labels"))
    pool = Arrays(images, labels)
    train = of_length(pool, config.limit)
    val = of_length(pool, max(1, config.limit // 4))
    mean = (0.5,) * config.channels
    std = (73.9 / 255,) * config.channels
    how = Preprocessing.of_arrays(numbered(FAKE_CLASSES), mean, std, config.side_in_eval)
    return DataSet(train, val, "fake", how)
