"""Images for people, as uint8 arrays [height, width, 3].

Batches are laid out by Pillow, which torchvision and TensorBoard bring along. Plots need Matplotlib, which is
optional: without it there are none, and `plot` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

Picture = np.ndarray[Any, Any]

MISSING = 'no picture: matplotlib is not installed (pip install "shardtrain[bench]")'

TILE = 64  # pixels that an image is enlarged to, at least
LINE = 12  # pixels of a caption
GAP = 4
COLUMNS = 8
MOST_CLASSES = 40  # whose numbers fit into a confusion matrix


def plot(draw: Callable[[Any], None], inches: tuple[float, float], dpi: int = 110) -> Picture | str:
    """What ``draw`` puts onto a new Matplotlib figure, or why there is no picture."""
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
    """As PNG; a missing folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture).save(path)


def grid(images: Tensor, captions: Sequence[str], mean: Tensor, std: Tensor) -> Picture:
    """Images with a caption under each, `COLUMNS` in a row.

    ``images``: float [n, channels, height, width], normalised by ``mean`` and ``std`` [channels, 1, 1]. The
    brightest value becomes white: data sets differ in their range.
    """
    values = (images.float().cpu() * std.cpu() + mean.cpu()).clamp(min=0)
    pixels = (values * (255 / values.max().clamp(min=1))).round().to(torch.uint8)
    pixels = pixels.expand(-1, 3, -1, -1) if pixels.shape[1] == 1 else pixels[:, :3]
    scale = max(1, -(-TILE // pixels.shape[-1]))
    height, width = pixels.shape[-2] * scale, pixels.shape[-1] * scale
    columns = min(COLUMNS, len(captions))
    rows = -(-len(captions) // columns)
    size = (columns * (width + GAP) + GAP, rows * (height + LINE + GAP) + GAP)
    page = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(page)
    for index, (tile, caption) in enumerate(zip(pixels, captions, strict=True)):
        row, column = divmod(index, columns)
        left, top = GAP + column * (width + GAP), GAP + row * (height + LINE + GAP)
        image = Image.fromarray(tile.permute(1, 2, 0).contiguous().numpy())
        page.paste(image.resize((width, height), Image.Resampling.NEAREST), (left, top))
        pen.text((left, top + height), caption, fill="black")
    return np.asarray(page)


def confusion(counts: Tensor) -> Picture | str:
    """``counts[label, prediction]`` as a matrix of colours, a row adding up to 1; or why there is none."""
    classes = len(counts)
    shares = (counts.double() / counts.sum(1, keepdim=True).clamp(min=1)).numpy()

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set_xlabel("taken for")
        axes.set_ylabel("is")
        right = 100 * counts.diagonal().sum().item() / max(1, int(counts.sum()))
        axes.set_title(f"{right:.2f} % of {int(counts.sum())} right", fontsize=10)
        if classes <= MOST_CLASSES:
            axes.set_xticks(range(classes))
            axes.set_yticks(range(classes))
            for label, prediction in counts.nonzero().tolist():
                color = "white" if shares[label, prediction] > 0.5 else "black"
                number = str(int(counts[label, prediction]))
                axes.text(prediction, label, number, ha="center", va="center", color=color, fontsize=8)

    side = 2 + 0.28 * min(classes, MOST_CLASSES)
    return plot(draw, (side, side))
