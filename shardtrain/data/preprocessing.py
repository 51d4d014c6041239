"""How a run's images become the model's input: one record, which everything that prepares images has.

The data set makes it (`data/sets.py`), and the card beside `model.weights` may change it. The feeds
normalise by it, `config.yaml` gets its values, and an export writes it (`job/inference.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardtrain.config.errors import UserError
from shardtrain.config.schema import key

if TYPE_CHECKING:
    from shardtrain.config.config import Images


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """What turns an image into the model's input in evaluation, and its answer into a name."""

    classes: tuple[str, ...]  # names, by label
    channels: int
    mean: tuple[float, ...] = key(at_least=0, at_most=1)  # per channel, of pixels from 0 to 1
    std: tuple[float, ...] = key(above=0, at_most=1)
    image_size: int  # pixels per side of what the model gets
    resize: int | None  # pixels of the shorter side before the crop; None: the whole image becomes a square
    interpolation: str = key(choices=("bilinear", "bicubic"))

    @classmethod
    def of_arrays(
        cls,
        classes: tuple[str, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        image_size: int,
        resize: int | None = None,
    ) -> Preprocessing:
        """Return how images that are stored as arrays are prepared. An ``image_size`` of 0 is left open."""
        how: dict[str, Any] = {"mean": mean, "std": std, "image_size": image_size, "resize": resize}
        return cls(classes=classes, channels=len(mean), interpolation="bilinear", **how)

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not all(0 <= value <= 1 for value in values):
                raise UserError(f"{name}={[*values]}: expected values of pixels from 0 to 1")


def numbered(count: int) -> tuple[str, ...]:
    """Return names for classes that have none: their labels."""
    return tuple(map(str, range(count)))


def as_configured(found: Preprocessing, keys: Images, name: str) -> Preprocessing:
    """Return what the data set ``name`` says of its images, with the values of `data.mean`, `std`, `classes`.

    Raises UserError for a wrong number of values, and for names of classes that have others.
    """
    mean = _per_channel("mean", keys.mean, found.channels) or found.mean
    std = _per_channel("std", keys.std, found.channels) or found.std
    return replace(found, mean=mean, std=std, classes=_names(keys.classes, found.classes, name))


def _per_channel(name: str, values: tuple[float, ...] | None, channels: int) -> tuple[float, ...]:
    if values is None:
        return ()
    if len(values) not in (1, channels):
        raise UserError(f"data.{name}={[*values]}: expected one value, or {channels}, one per channel")
    return values * (channels // len(values))


def _names(given: tuple[str, ...] | None, own: tuple[str, ...], name: str) -> tuple[str, ...]:
    if given is None:
        return own
    what = f"data.classes=[{','.join(given)}]"
    if len(given) != len(own) or len(set(given)) < len(given):
        raise UserError(f"{what}: expected {len(own)} different names, one for each class")
    if given != own != numbered(len(given)):
        raise UserError(f"{what}: the classes of {name} have names: {', '.join(own)}")
    return given
