"""Augment batches of images on their device, and single images where they are loaded.

`shardtrain.data.TrainFeed` says how an augmentation is called. The random numbers of an image come from
the seed and its position in the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from shardtrain.config.errors import UserError


class Affine:
    """A small rotation, zoom and shift of each image. It suits digits, which must not be mirrored."""

    draws = 4

    def __init__(self, rotate: float, zoom: float, shift: float) -> None:
        """Set the largest changes in either direction.

        rotate: degrees. zoom: fraction. shift: fraction of the side. Raises ValueError outside their ranges.
        """
        if not (0 <= rotate <= 180 and 0 <= zoom < 1 and 0 <= shift <= 1):
            raise ValueError(f"rotate={rotate}, zoom={zoom}, shift={shift}: expected 0–180, 0–1 and 0–1")
        self.rotate = math.radians(rotate)
        self.zoom = zoom
        self.shift = shift

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Change images, float32 [batch, channels, height, width]. uniform: float32 [batch, 4]."""
        angle, zoom, right, down = (2 * uniform - 1).unbind(1)
        cos = torch.cos(angle * self.rotate)
        sin = torch.sin(angle * self.rotate)
        scale = 1 + zoom * self.zoom
        # grid_sample's coordinates run from -1 to 1, so a side is 2 long.
        rows = [
            torch.stack([cos * scale, -sin * scale, right * 2 * self.shift], 1),
            torch.stack([sin * scale, cos * scale, down * 2 * self.shift], 1),
        ]
        grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


FLIP = 2  # the draw that decides whether an image is mirrored


class Photo:
    """Crops and mirror images, changed colours and shapes, and erased boxes. It suits photographs.

    First a policy of torchvision changes each image, as uint8, where it is loaded (`image`), since its
    transforms draw from torch's random numbers once per call. The other changes are array operations on the
    whole batch: they pad and crop back to size, mirror half of the images, and fill a box in some images with
    zeros (the mean).
    """

    draws = 8

    def __init__(self, pad: int, policy: str = "none", erase: float = 0.0, flip: str = "random") -> None:
        """Choose the changes.

        pad: pixels on each side before the crop. policy: none, trivial (TrivialAugment, wide), rand
        (RandAugment: two operations of magnitude 9), cifar10 (AutoAugment's policy for it).
        erase: the fraction of images that lose a box of 2 to 33 % of their area. flip: none or random. Raises
        ValueError for other values.
        """
        if pad < 0 or not 0 <= erase <= 1:
            raise ValueError(f"pad={pad}, erase={erase}: expected at least 0, and 0 to 1")
        if flip not in ("none", "random"):
            raise ValueError(f"flip={flip}: expected none or random; augment=resnet9 alternates")
        self.pad = pad
        self.erase = erase
        self.flip = flip
        # uint8 [channels, height, width] to the same, drawing from torch's random numbers; None: nothing.
        self.image = policy_named(policy)

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """Change images, float32 [batch, channels, height, width]. uniform: float32 [batch, 8]."""
        draws = uniform[:, :3]
        if self.flip == "none":
            draws = torch.cat([draws[:, :FLIP], torch.zeros_like(draws[:, FLIP:])], 1)
        cropped = crop_flip(images, draws, self.pad)
        return erased(cropped, uniform[:, 3:], self.erase) if self.erase else cropped


def policy_named(name: str) -> Callable[[Tensor], Tensor] | None:
    """Return torchvision's policy, whose import takes a second. Raises ValueError for an unknown name."""
    if name == "none":
        return None
    from torchvision.transforms import v2

    policies: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "trivial": lambda: v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR),
        "rand": lambda: v2.RandAugment(2, 9, interpolation=v2.InterpolationMode.BILINEAR),
        "cifar10": lambda: v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
    }
    if name not in policies:
        raise ValueError(f"policy={name} (valid: none, {', '.join(policies)})")
    policy = policies[name]()

    def change(image: Tensor) -> Tensor:
        if len(image) not in (1, 3):  # some of its changes cannot take them
            raise ValueError(f"policy={name}: an image has {len(image)} channels, expected 1 or 3")
        return policy(image)

    return change


def crop_flip(images: Tensor, uniform: Tensor, pad: int, border: str = "constant") -> Tensor:
    """Return random crops of images with a border of `pad` pixels, half of them mirrored.

    uniform: float32 [batch, 3]: top, left, mirrored.
    """
    batch, _, height, width = images.shape
    if border == "reflect" and pad >= min(height, width):
        raise UserError(f"augment.pad={pad}: images of {height}×{width} pixels reflect less")
    top, left = (uniform[:, :2] * (2 * pad + 1)).long().unbind(1)
    rows = top[:, None] + torch.arange(height, device=images.device)
    columns = left[:, None] + torch.arange(width, device=images.device)
    columns = torch.where(uniform[:, FLIP:] < 0.5, columns, columns.flip(1))
    padded = F.pad(images, [pad] * 4, border) if pad else images
    image = torch.arange(batch, device=images.device)[:, None, None]
    picked = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


def erased(images: Tensor, uniform: Tensor, part: float) -> Tensor:
    """Fill a random box with zeros (the mean) in the fraction `part` of the images (random erasing).

    Area (2 to 33 %) and ratio of height to width (0.3 to 3.3) are drawn as in torchvision's RandomErasing.
    That draws again if a box is too long for the image; here the box is cut to the image's side.
    uniform: float32 [batch, 5]: erased at all, area, ratio, top, left.
    """
    height, width = images.shape[2:]
    area = (0.02 + 0.31 * uniform[:, 1]) * height * width
    ratio = torch.exp(math.log(0.3) + math.log(3.3 / 0.3) * uniform[:, 2])
    inside = (uniform[:, 0] < part)[:, None, None]
    boxes = (((area * ratio).sqrt(), height, 3), ((area / ratio).sqrt(), width, 4))
    for axis, (length, side, draw) in enumerate(boxes):
        length = length.round().clamp(max=side)
        start = (uniform[:, draw] * (side - length + 1)).floor()
        at = torch.arange(side, device=images.device)
        within = (at >= start[:, None]) & (at < (start + length)[:, None])
        inside = inside & (within[:, None, :] if axis else within[:, :, None])
    return images.masked_fill(inside[:, None], 0.0)
