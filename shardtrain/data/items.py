"""Data sets of users: each item is checked, and images of any size are brought to squares.

A data set is not read before training, so a wrong item may come at any step, in a loader's worker. Each
message names the item, what it is and what was expected.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from shardtrain.config.errors import UserError, WorkerError
from shardtrain.data.feed import Batches, digest_of

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)  # dtypes of class numbers
MODES = ("L", "LA", "RGB", "RGBA", "CMYK")  # of Pillow's images, with 8 bits per channel


class Expected(NamedTuple):
    """What all items of a data set have in common."""

    shape: tuple[int, ...]  # channels, height, width
    classes: int | None = None  # None: not known yet


class Items(Batches):
    """A user's data set: each item an image, uint8 [channels, height, width] or Pillow's, and a label."""

    random = True  # it may draw from torch's random numbers

    def __init__(self, items: Any, name: str, side: int = 0, expected: Expected | None = None) -> None:
        """Raise UserError unless ``items`` can be indexed and have a length above 0.

        name: what messages begin with. side: pixels of the squares that images are cropped to, after their
        shorter side is resized to it; 0: they stay as they are. expected: None at the first look.
        """
        indexed = hasattr(items, "__getitem__") and hasattr(items, "__len__")
        if not indexed or isinstance(items, Mapping | str):
            kind = type(items).__name__
            raise UserError(f"{name} is a {kind}, expected a data set with items[i] and len(items)")
        if len(items) == 0:
            raise UserError(f"{name} is empty")
        self.items = items
        self.name = name
        self.side = side
        self.expected = expected
        self.labels = None
        targets = _targets(items)
        classes = 0 if expected is None or expected.classes is None else expected.classes
        if targets is not None and targets.ndim == 1 and targets.dtype in WHOLE:
            is_class = (targets >= 0) & (targets < classes)
            self.labels = targets.long() if is_class.all() else None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        images, labels = zip(*map(self.read, indices), strict=True)
        return torch.stack(images), torch.tensor(labels)

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return an image, uint8 [channels, height, width], and its label. Raises WorkerError."""
        item = self.pair(index, "(image, label)")
        image = self._pixels(item[0], f"{self.name}: image {index} is")
        label = self._label(item[1], f"{self.name}: the label of image {index} is")
        return image, label

    def pair(self, index: int, expected: str) -> Any:
        """Return an item. Raises WorkerError unless it is a pair."""
        item = self.items[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise WorkerError(f"{self.name}: item {index} is a {type(item).__name__}, expected {expected}")
        return item

    def _pixels(self, image: Any, subject: str) -> Tensor:
        pixels: Tensor
        if isinstance(image, Image.Image):
            if image.mode not in MODES:
                raise WorkerError(
                    f'{subject} of mode {image.mode}; image.convert("RGB") gives 8 bits per channel'
                )
            pixels = torch.from_numpy(np.atleast_3d(np.array(self._square(image)))).permute(2, 0, 1)
        elif isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3:
            pixels = self._square(image)
        else:
            kind = type(image).__name__
            if hasattr(image, "dtype"):
                kind = f"{image.dtype} {list(image.shape)}"
            raise WorkerError(
                f"{subject} {kind}, expected uint8 [channels, height, width] or an image of Pillow"
            )
        shape = tuple(pixels.shape)
        if self.expected is not None and shape != self.expected.shape:
            usual = self.expected.shape
            way_out = 'image.convert("RGB") gives three channels'
            if shape[0] == usual[0]:
                way_out = "data.image_size=N resizes and crops all to N×N"
            raise WorkerError(
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
            raise WorkerError(f"{subject} {label!r}, expected the number of a class") from None
        classes = None if self.expected is None else self.expected.classes
        if number < 0 or (classes is not None and number >= classes):
            last = " or more" if classes is None else f" to {classes - 1}"
            raise WorkerError(
                f"{subject} {number}, expected 0{last}; an attribute `classes` of the training set names all"
            )
        return number


class Pairs(Items):
    """A data set of inputs and targets: each a tensor, an array or a number, of one shape and dtype."""

    def __init__(self, items: Any, name: str, like: Pairs | None = None) -> None:
        """like: items are as the first one of these; None: as the first one here. name: as of `Items`."""
        super().__init__(items, name)
        self.labels = _targets(items)
        self.kinds: str = "" if like is None else like.kinds  # dtypes and shapes; "": not known yet
        self.kinds = self.kinds or _kinds(self.tensors(0))

    def __getitem__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = zip(*map(self.tensors, indices), strict=True)
        return torch.stack(inputs), torch.stack(targets)

    def summary(self) -> str:
        """Return by what ranks and resumed runs compare data."""
        return f"{len(self)} items, digest of targets {digest_of(self.labels) or 'not known'}"

    def tensors(self, index: int) -> list[Tensor]:
        """Return an input and its target. Raises WorkerError if they are not as those of the first item."""
        pair = self.pair(index, "(input, target)")
        try:
            tensors = [*map(torch.as_tensor, pair)]
        except (TypeError, ValueError, RuntimeError) as error:
            raise WorkerError(f"{self.name}: item {index}: {error}; expected tensors") from None
        if self.kinds not in ("", kinds := _kinds(tensors)):
            raise WorkerError(
                f"{self.name}: item {index} is {kinds}, the first of the training set {self.kinds}; pad or "
                "cut all to one shape"
            )
        return tensors


def _kinds(tensors: Sequence[Tensor]) -> str:
    return " and ".join(f"{str(each.dtype).removeprefix('torch.')} {[*each.shape]}" for each in tensors)


def _targets(items: Any) -> Tensor | None:
    """Return the targets of a user's data set that has them in memory, as torchvision's; None of another."""
    if isinstance(items, Subset):
        whole = _targets(items.dataset)
        return None if whole is None else whole[torch.as_tensor([*items.indices])]
    targets = items.tensors[-1] if isinstance(items, TensorDataset) else getattr(items, "targets", None)
    if getattr(items, "target_transform", None) is not None:
        return None
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # they are no numbers
        if targets is not None and len(targets) == len(items):
            return torch.as_tensor(targets).detach().cpu()
    return None
