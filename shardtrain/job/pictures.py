"""Pictures as uint8 arrays [height, width, 3], drawn by torchvision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.utils import draw_bounding_boxes, make_grid

Picture = np.ndarray[Any, Any]

# TensorBoard drops pixels of wider pages to show them in about 340: text is hard to read if it drops some
# rows only. So a page of images has this width, or a multiple.
PAGE = 340
COLUMNS = 4
TILE = 80  # pixels, of an image; larger images take the next multiple
GAP = 4
LINES = 28  # pixels, for two lines of text below an image


def caption(label: Tensor, classes: Sequence[str]) -> str:
    """Return the name of an image's class; of mixed images two lines, each a name and its percentage.

    ``label``: a class number, int64 [], or what `data.Mix` makes of it: float32 [classes].
    """
    if label.ndim == 0:
        return classes[int(label)]
    shares = [(share, name) for share, name in zip(label.tolist(), classes, strict=False) if share]
    return "\n".join(f"{share:.0%} {name}" for share, name in sorted(shares, reverse=True))


def grid(images: Tensor, captions: Sequence[str]) -> Picture:
    """Return one picture of all images, each above its caption, `COLUMNS` per row.

    ``images``: pixels [n, channels, height, width], from 0 up. The brightest value becomes white, since data
    sets differ in range. What is longer of a caption than its image is wide is cut off.
    """
    pixels = images[:, : 3 if images.shape[1] >= 3 else 1].float().cpu().clamp(min=0).expand(-1, 3, -1, -1)
    pixels = (255 * pixels / pixels.max().clamp(min=1)).round().to(torch.uint8)
    scale = math.ceil(pixels.shape[-1] / TILE)
    white = torch.full((3, LINES, TILE), 255, dtype=torch.uint8)
    around = torch.tensor([[-2, -2, TILE + 1, LINES + 1]])  # a frame that is out of sight; its text is not
    texts = torch.stack([draw_bounding_boxes(white, around, [text], colors="black") for text in captions])
    texts = F.interpolate(texts, scale_factor=scale)
    tiles = torch.cat([F.interpolate(pixels, scale * TILE), texts], dim=2)
    page = make_grid(tiles, COLUMNS, scale * GAP, pad_value=255)
    picture: Picture = page.permute(1, 2, 0).numpy()
    return picture


def confusion(counts: Tensor) -> Picture:
    """Return a picture of a confusion matrix, int64 [classes, classes]: a row per label, a column per answer.

    A cell is the darker, the larger its part of the row's images. Both are in the order of the classes.
    """
    parts = counts / counts.sum(1, keepdim=True).clamp(min=1)
    cells = (255 * (1 - parts)).round().to(torch.uint8)
    side = math.ceil(PAGE / len(cells))
    page = cells.kron(cells.new_ones(side, side))
    picture: Picture = page[:, :, None].expand(-1, -1, 3).numpy()
    return picture
