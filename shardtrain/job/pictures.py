"""Draw pictures as uint8 arrays [height, width, 3].

Plots need Matplotlib, which is optional: without it functions return a text that says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.utils import make_grid

Picture = np.ndarray[Any, Any]

MISSING = 'no picture: matplotlib is not installed (pip install "shardtrain[pictures]")'

TILE = 64  # pixels; smaller images are enlarged to at least this size
GAP = 4
COLUMNS = 8


def plot(draw: Callable[[Any], None], inches: tuple[float, float], dpi: int = 110) -> Picture | str:
    """Return a new Matplotlib figure drawn by ``draw``, or a text that says why there is none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    canvas: Any = FigureCanvasAgg(figure)
    draw(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[:, :, :3]


def grid(images: Tensor, mean: Tensor, std: Tensor) -> Picture:
    """Return one picture of all images, `COLUMNS` per row.

    ``images``: float [n, channels, height, width], normalised by ``mean`` and ``std`` [channels, 1, 1]. The
    brightest value becomes white, since data sets differ in range.
    """
    pixels = (images.float().cpu() * std.cpu() + mean.cpu()).clamp(min=0)[:, :3]
    pixels = pixels / pixels.max().clamp(min=1)
    tiles = F.interpolate(pixels, scale_factor=max(1, -(-TILE // pixels.shape[-1])))
    page = make_grid(tiles, COLUMNS, GAP, pad_value=1.0)
    return np.asarray((255 * page).round().to(torch.uint8).permute(1, 2, 0))
