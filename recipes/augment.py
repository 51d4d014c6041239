"""Augmentations of a batch on its device.

An augmentation says how many random numbers an image takes (`draws`) and is called with the images and
these numbers, uniform in [0, 1). Whoever draws them decides what they depend on: the training program
derives them from the seed and the image's place in the run, so it does not matter how many ranks share it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


class Affine:
    """Rotates, zooms and shifts each image a little; suits digits, which no flip may touch."""

    draws = 4

    def __init__(self, rotate: float, zoom: float, shift: float) -> None:
        """rotate: degrees, zoom: fraction, shift: fraction of the side; each the largest, either way."""
        if not (0 <= rotate <= 180 and 0 <= zoom < 1 and 0 <= shift <= 1):
            raise ValueError(f"rotate={rotate}, zoom={zoom}, shift={shift}: expected 0–180, 0–1 and 0–1")
        self.rotate, self.zoom, self.shift = math.radians(rotate), zoom, shift

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """images: float32 [batch, channels, height, width]; uniform: float32 [batch, 4]."""
        angle, zoom, right, down = (2 * uniform - 1).unbind(1)
        cos, sin = torch.cos(angle * self.rotate), torch.sin(angle * self.rotate)
        scale = 1 + zoom * self.zoom
        # grid_sample's coordinates run from -1 to 1, so a side is 2 long.
        rows = [
            torch.stack([cos * scale, -sin * scale, right * 2 * self.shift], 1),
            torch.stack([sin * scale, cos * scale, down * 2 * self.shift], 1),
        ]
        grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


class CropFlip:
    """Pads with zeros (the mean), crops back to size, and mirrors every second image; suits photographs."""

    draws = 3

    def __init__(self, pad: int) -> None:
        """pad: pixels on each side before the crop."""
        if pad < 0:
            raise ValueError(f"pad={pad}: expected at least 0")
        self.pad = pad

    def __call__(self, images: Tensor, uniform: Tensor) -> Tensor:
        """images: float32 [batch, channels, height, width]; uniform: float32 [batch, 3]."""
        batch, _, height, width = images.shape
        top, left = (uniform[:, :2] * (2 * self.pad + 1)).long().unbind(1)
        rows = top[:, None] + torch.arange(height, device=images.device)
        columns = left[:, None] + torch.arange(width, device=images.device)
        columns = torch.where(uniform[:, 2:] < 0.5, columns, columns.flip(1))
        padded = F.pad(images, [self.pad] * 4)
        image = torch.arange(batch, device=images.device)[:, None, None]
        picked = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
        return picked.permute(0, 3, 1, 2).contiguous()
