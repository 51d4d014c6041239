"""Pictures as uint8 arrays [height, width, 3].

Plots need Matplotlib, which is optional: without it functions return a text that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.utils import make_grid

Picture = np.ndarray[Any, Any]

MISSING = 'no picture: matplotlib is not installed (pip install "shardtrain[bench]")'

TILE = 64  # pixels that an image is enlarged to, at least
LINE = 12  # pixels of a caption
GAP = 4
COLUMNS = 8
MOST_CLASSES = 40  # whose numbers fit into a confusion matrix


def plot(draw: Callable[[Any], None], inches: tuple[float, float], dpi: int = 110) -> Picture | str:
    """Return what ``draw`` puts onto a new Matplotlib figure, or why there is no picture."""
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


def save(path: Path, picture: Picture) -> None:
    """Write ``picture`` as PNG, and make its folder if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)


def grid(images: Tensor, captions: Sequence[str], mean: Tensor, std: Tensor) -> Picture:
    """Lay out images with a caption under each, `COLUMNS` in a row.

    ``images``: float [n, channels, height, width], normalised by ``mean`` and ``std`` [channels, 1, 1]. The
    brightest value becomes white, because data sets differ in their range.
    """
    pixels = (images.float().cpu() * std.cpu() + mean.cpu()).clamp(min=0)[:, :3]
    pixels = pixels / pixels.max().clamp(min=1)
    tiles = F.interpolate(pixels, scale_factor=max(1, -(-TILE // pixels.shape[-1])))
    height, width = tiles.shape[-2:]
    page = make_grid(F.pad(tiles, (0, 0, 0, LINE), value=1.0), COLUMNS, GAP, pad_value=1.0)
    sheet = Image.fromarray((255 * page).round().to(torch.uint8).permute(1, 2, 0).numpy())
    pen = ImageDraw.Draw(sheet)
    for index, caption in enumerate(captions):
        row, column = divmod(index, COLUMNS)
        at = GAP + column * (width + GAP), GAP + row * (height + LINE + GAP) + height
        pen.text(at, caption, fill="black")
    return np.asarray(sheet)


def confusion(counts: Tensor) -> Picture | str:
    """Draw ``counts[label, prediction]`` as a matrix of colours, each row adding up to 1."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(subplot_kw={"xlabel": "predicted", "ylabel": "label"})
        shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).numpy()
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=2)  # never so dark that a number cannot be read
        axes.set_title(
            f"{100 * counts.trace() / counts.sum():.2f} % of {counts.sum():.0f} right", fontsize=10
        )
        if len(counts) <= MOST_CLASSES:
            axes.set(xticks=range(len(counts)), yticks=range(len(counts)))
            for label, prediction in counts.nonzero().tolist():
                number = f"{counts[label, prediction]:.0f}"
                axes.text(prediction, label, number, ha="center", va="center", fontsize=8)

    side = 2 + 0.28 * min(len(counts), MOST_CLASSES)
    return plot(draw, (side, side))
