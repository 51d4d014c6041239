"""Pictures as uint8 arrays [height, width, 3], drawn by Pillow, which torchvision needs, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

Picture = np.ndarray[Any, Any]

# TensorBoard drops pixels of wider pages to show them in about 340: text is hard to read if it drops some
# rows only. So a page of images has this width, or a multiple.
PAGE = 340
COLUMNS = 4
TILE = 80  # pixels, of an image; larger images take the next multiple
GAP = 4
LINE = 14  # of text below an image
FONT = 11

DARK = (8, 48, 107)  # the colour of a cell that has all images of its row


def pixels_of(figure: Any) -> Picture:
    """Return what a figure of Matplotlib shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[:, :, :3]


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
    sets differ in range.
    """
    pixels = images[:, : 3 if images.shape[1] >= 3 else 1].float().cpu().clamp(min=0).expand(-1, 3, -1, -1)
    pixels = (255 * pixels / pixels.max().clamp(min=1)).round().to(torch.uint8)
    scale = math.ceil(pixels.shape[-1] / TILE)
    tile = scale * TILE
    gap = scale * GAP
    line = scale * LINE
    height = tile + gap + line * (1 + max(text.count("\n") for text in captions))
    rows = math.ceil(len(images) / COLUMNS)
    page = Image.new("RGB", (gap + COLUMNS * (tile + gap), gap + rows * height), "white")
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(scale * FONT)
    for number, (image, text) in enumerate(zip(F.interpolate(pixels, tile), captions, strict=True)):
        row, column = divmod(number, COLUMNS)
        left = gap + column * (tile + gap)
        top = gap + row * height
        page.paste(Image.fromarray(np.asarray(image.permute(1, 2, 0))), (left, top))
        top += tile
        for part in text.split("\n"):
            pen.text((left, top), _fitting(part, tile, font), "black", font)
            top += line
    return np.array(page)


def _fitting(text: str, width: int, font: Any) -> str:
    """Return ``text``, shortened to ``width`` pixels."""
    short = text
    while short and font.getlength(short) > width:
        short = short[:-2] + "…"
    return short


def confusion(counts: Tensor, names: Sequence[str]) -> Picture:
    """Return a picture of a confusion matrix, int64 [classes, classes]: a row per label, a column per answer.

    A cell is the darker, the larger its part of the row's images. Columns are in the order of the rows.
    """
    font = ImageFont.load_default(FONT)
    names = [_fitting(name, PAGE // 3, font) for name in names]
    margin = 2 * GAP + max(round(font.getlength(name)) for name in names)
    cell = max(26, (PAGE - margin - GAP) // len(names))  # pixels, for four digits
    side = cell * len(names) + GAP
    top = 2 * LINE
    page = Image.new("RGB", (max(PAGE, margin + side), top + side), "white")
    pen = ImageDraw.Draw(page)
    pen.text((margin, LINE), "answer (rows: label)", "grey", font, anchor="ld")
    parts = counts / counts.sum(1, keepdim=True).clamp(min=1)
    for row, name in enumerate(names):
        pen.text((margin - GAP, top + cell // 2), name, "black", font, anchor="rm")
        column = margin + cell * row + cell // 2
        pen.text((column, 2 * LINE), _fitting(name, cell, font), "black", font, anchor="md")
        left = margin
        for count, part in zip(counts[row].tolist(), parts[row].tolist(), strict=True):
            shade = tuple(round(255 + part * (tone - 255)) for tone in DARK)
            pen.rectangle((left, top, left + cell - 1, top + cell - 1), shade, "lightgrey")
            colour = "white" if part > 0.5 else "black"
            pen.text((left + cell // 2, top + cell // 2), str(count or ""), colour, font, anchor="mm")
            left += cell
        top += cell
    return np.asarray(page)
