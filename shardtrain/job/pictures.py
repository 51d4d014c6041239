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

# A page of images is 340 pixels wide, or a multiple. TensorBoard drops pixels of wider pages to show them in
# about 340: text is hard to read if it drops some rows only.
COLUMNS = 4
TILE = 80  # pixels, of an image; larger images take the next multiple
GAP = 4
LINE = 14  # of text below an image
FONT = 11

DARK = (8, 48, 107)  # the colour of a cell that has all images of its row
MOST_NAME = 24  # characters of a class's name


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
    most = label.sort(descending=True)
    names = [classes[int(number)] for number in most.indices[:2]]
    percentages = [f"{share:.0%}" for share in most.values[:2].tolist()]
    if percentages[0] == "100%":
        return names[0]
    return "\n".join(map(" ".join, zip(percentages, names, strict=True)))


def grid(images: Tensor, mean: Tensor, std: Tensor, captions: Sequence[str]) -> Picture:
    """Return one picture of all images, each above its caption, `COLUMNS` per row.

    ``images``: float [n, channels, height, width], normalised by ``mean`` and ``std`` [channels, 1, 1]. The
    brightest value becomes white, since data sets differ in range.
    """
    pixels = (images.float().cpu() * std.cpu() + mean.cpu()).clamp(min=0)
    pixels = pixels[:, : 3 if pixels.shape[1] >= 3 else 1].expand(-1, 3, -1, -1)
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
