"""Data sets of users: each item is checked, and images of any size are brought to squares.

A data set is not read before training, so a wrong item may come at any step, in a loader's worker. Each
message names the item, what it is and what was expected.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from shardtrain.config.errors import UserError, WorkerError
from shardtrain.data.feed import Batches

MODES = ("L", "LA", "RGB", "RGBA", "CMYK")  # of Pillow's images, with 8 bits per channel


class WrongItem(WorkerError):
    """An item that is not as documented."""


class Expected(NamedTuple):
    """What all items of a data set have in common."""

    shape: tuple[int, ...]  # channels, height, width
    classes: int | None = None  # None: not known yet


def require_items(items: Any, name: str) -> None:
    """Raise UserError unless ``items`` can be indexed and have a length above 0."""
    indexed = hasattr(items, "__getitem__") and hasattr(items, "__len__")
    if not indexed or isinstance(items, Mapping | str):
        kind = type(items).__name__
        raise UserError(f"{name} is a {kind}, expected a data set with items[i] and len(items)")
    if len(items) == 0:
        raise UserError(f"{name} is empty")


def pair_of(items: Any, index: int, name: str, expected: str) -> tuple[Any, Any]:
    """Return ``items[index]``. Raises WrongItem unless it is a pair."""
    item = items[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise WrongItem(f"{name}: item {index} is a {type(item).__name__}, expected {expected}")
    first, second = item
    return first, second


class Items(Batches):
    """A data set of the user's: ``items[i]`` are an image and its label.

    An image is uint8 [channels, height, width], or of Pillow. It may be drawn from torch's random numbers.
    """

    random = True

    def __init__(self, items: Any, name: str, side: int = 0, expected: Expected | None = None) -> None:
        """Raise UserError unless ``items`` can be indexed and have a length above 0.

        name: what messages begin with. side: pixels of the squares that images are cropped to, after their
        shorter side is resized to it; 0: they stay as they are. expected: None at the first look.
        """
        require_items(items, name)
        self.items = items
        self.name = name
        self.side = side
        self.expected = expected
        self.labels = _known_labels(items, expected)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images = []
        labels = []
        for index in indices:
            image, label = self.read(index)
            images.append(image)
            labels.append(label)
        return torch.stack(images), torch.tensor(labels)

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return an image, uint8 [channels, height, width], and its label. Raises WrongItem."""
        item = pair_of(self.items, index, self.name, "(image, label)")
        image = self._pixels(item[0], f"{self.name}: image {index} is")
        label = self._label(item[1], f"{self.name}: the label of image {index} is")
        return image, label

    def _pixels(self, image: Any, subject: str) -> Tensor:
        """Return an image, uint8 [channels, height, width]."""
        pixels: Tensor
        if isinstance(image, Image.Image):
            if image.mode not in MODES:
                raise WrongItem(
                    f'{subject} of mode {image.mode}; image.convert("RGB") gives 8 bits per channel'
                )
            pixels = torch.from_numpy(np.atleast_3d(np.array(self._square(image)))).permute(2, 0, 1)
        elif isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3:
            pixels = self._square(image)
        else:
            kind = type(image).__name__
            if hasattr(image, "dtype"):
                kind = f"{image.dtype} {list(image.shape)}"
            raise WrongItem(
                f"{subject} {kind}, expected uint8 [channels, height, width] or an image of Pillow"
            )
        shape = tuple(pixels.shape)
        if self.expected is not None and shape != self.expected.shape:
            usual = self.expected.shape
            way_out = 'image.convert("RGB") gives three channels'
            if shape[0] == usual[0]:
                way_out = "data.image_size=N resizes and crops all to N×N"
            raise WrongItem(
                f"{subject} {list(shape)}, image 0 of the training set is {list(usual)}; {way_out}"
            )
        return pixels

    def _square(self, image: Any) -> Any:
        """Resize the shorter side of an image and crop its centre, as of a file in a folder."""
        if not self.side:
            return image
        from torchvision.transforms import v2  # here, since it takes a second to import

        return v2.functional.center_crop(v2.functional.resize(image, [self.side]), [self.side])

    def _label(self, label: Any, subject: str) -> int:
        try:
            number = operator.index(label)
        except TypeError:
            raise WrongItem(f"{subject} {label!r}, expected the number of a class") from None
        classes = None if self.expected is None else self.expected.classes
        if number < 0 or (classes is not None and number >= classes):
            last = " or more" if classes is None else f" to {classes - 1}"
            raise WrongItem(
                f"{subject} {number}, expected 0{last}; an attribute `classes` of the training set names all"
            )
        return number


class Pairs(Batches):
    """A data set of inputs and targets: each a tensor, an array or a number, of one shape and dtype.

    They may be drawn from torch's random numbers.
    """

    random = True

    def __init__(self, items: Any, name: str, like: Pairs | None = None) -> None:
        """like: items are as the first one of these; None: as the first one here. name: as of `Items`."""
        require_items(items, name)
        self.items = items
        self.name = name
        targets = items.tensors[-1] if isinstance(items, TensorDataset) else getattr(items, "targets", None)
        if isinstance(targets, list) and all(type(target) is int for target in targets):
            targets = torch.tensor(targets)
        is_known = isinstance(targets, Tensor | np.ndarray) and len(targets) == len(items)
        self.labels = torch.as_tensor(targets).cpu() if is_known else None
        self.kinds: list[str] = []  # of the first item: dtype and shape of input and target
        self.kinds = [_kind(part) for part in self.read(0)] if like is None else like.kinds

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*map(self.read, indices), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def read(self, index: int) -> tuple[Tensor, Tensor]:
        """Return an input and its target. Raises WrongItem if they are not as those of the first item."""
        parts = pair_of(self.items, index, self.name, "(input, target)")
        tensors = []
        for what, value in zip(("input", "target"), parts, strict=True):
            try:
                tensors.append(torch.as_tensor(value))
            except (TypeError, ValueError, RuntimeError):
                kind = type(value).__name__
                raise WrongItem(
                    f"{self.name}: the {what} of item {index} is a {kind}, expected a tensor"
                ) from None
        kinds = [_kind(tensor) for tensor in tensors]
        if self.kinds and kinds != self.kinds:
            raise WrongItem(
                f"{self.name}: item {index} is {' and '.join(kinds)}, the first of the training set "
                f"{' and '.join(self.kinds)}; pad or cut all to one shape"
            )
        return tensors[0], tensors[1]


def _kind(part: Tensor) -> str:
    return f"{str(part.dtype).removeprefix('torch.')} {[*part.shape]}"


def _known_labels(items: Any, expected: Expected | None) -> Tensor | None:
    """Return the labels in an attribute ``targets``, as torchvision's data sets have; None without it."""
    targets = getattr(items, "targets", None)
    if isinstance(targets, Tensor | np.ndarray):
        targets = targets.tolist()
    changed = getattr(items, "target_transform", None) is not None
    if expected is None or expected.classes is None or changed or not isinstance(targets, list):
        return None
    valid = range(expected.classes)
    if len(targets) != len(items) or not all(type(label) is int and label in valid for label in targets):
        return None
    return torch.tensor(targets)
