"""Draw pictures as uint8 arrays [height, width, 3].

Plots need Matplotlib, which is optional: without it functions return a text that says so. A confusion matrix
is drawn by Pillow, which torchvision needs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.utils import make_grid

Picture = np.ndarray[Any, Any]

MISSING = 'no picture: matplotlib is not installed (pip install "shardtrain[pictures]")'

TILE = 64  # pixels; smaller images are enlarged to at least this size
GAP = 4
COLUMNS = 8

DARK = (8, 48, 107)  # the colour of a cell that has all images of its row
MOST_NAME = 24  # characters of a class's name


def plot(draw: Callable[[Any], None], inches: tuple[float, float], dpi: int = 110) -> Picture | str:
    """Return a new Matplotlib figure drawn by ``draw``, or a text that says why there is none."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    figure = Figure(figsize=inches, dpi=dpi, layout="constrained")
    draw(figure)
    return pixels_of(FigureCanvasAgg(figure))


def pixels_of(canvas: Any) -> Picture:
    """Return what is drawn on a canvas of Matplotlib's Agg."""
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


def confusion(counts: Tensor, names: Sequence[str]) -> Picture:
    """Return a picture of a confusion matrix, int64 [classes, classes]: a row per label, a column per answer.

    A cell is the darker, the larger its part of the row's images.
    """
    cell = max(26, 60 - 2 * len(names))  # pixels
    font = ImageFont.load_default(13)
    small = ImageFont.load_default(9)
    names = [name if len(name) <= MOST_NAME else f"{name[: MOST_NAME - 1]}…" for name in names]
    margin = 34 + max(round(font.getlength(name)) for name in names)
    side = margin + cell * len(names) + 8
    page = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(page)
    parts = counts / counts.sum(1, keepdim=True).clamp(min=1)
    for row, name in enumerate(names):
        middle = margin + cell * row + cell // 2
        draw.text((margin - 6, middle), name, "black", font, anchor="rm")
        for column, count in enumerate(counts[row].tolist()):
            part = float(parts[row, column])
            left = margin + cell * column
            top = margin + cell * row
            box = (left, top, left + cell - 1, top + cell - 1)
            draw.rectangle(box, tuple(round(255 + part * (tone - 255)) for tone in DARK), "lightgrey")
            if count:
                at = (left + cell // 2, top + cell // 2)
                colour = "white" if part > 0.5 else "black"
                draw.text(at, str(count), colour, font if count < 1000 else small, anchor="mm")
    draw.text((margin, 10), "answer", "grey", font, anchor="lm")
    # Columns' names and the title of the rows read upwards: they are drawn on a page that is turned.
    turned = page.rotate(-90)
    draw = ImageDraw.Draw(turned)
    for column, name in enumerate(names):
        draw.text((side - margin + 6, margin + cell * column + cell // 2), name, "black", font, anchor="lm")
    draw.text((8 + cell * len(names), 10), "label", "grey", font, anchor="rm")
    return np.asarray(turned.rotate(90))
