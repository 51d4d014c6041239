"""Draw the two pictures of `docs/why-shard.md`: memory per rank, and the two collectives.

    python docs/course/why_shard.py FOLDER

It writes ``memory.svg`` and ``collectives.svg``. All numbers are computed here: nothing is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

RANKS = 4
# bytes per parameter in fp32 under Adam, and the stage of ZeRO from which each is sharded
STATE = {"optimizer state": (8, 1), "gradients": (4, 2), "parameters": (4, 3)}
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")
COLORS = {"parameters": "#0969da", "gradients": "#bc4c00", "optimizer state": "#8250df"}
DARK = "#24292f"
LIGHT = "#57606a"
# of each rank's own data, a gradient of four elements
GRADIENTS = [[4, 0, 8, 1], [0, 4, 8, 3], [4, 4, 0, 5], [0, 4, 4, 7]]
# one color per rank, light ones for values that a rank holds and does not own
RANK_COLORS = ("#0969da", "#1a7f37", "#8250df", "#bc4c00")


def text(x: float, y: float, words: object, **style: object) -> str:
    look = {"font-size": 13, "fill": LIGHT} | {key.replace("_", "-"): value for key, value in style.items()}
    attributes = " ".join(f'{key}="{value}"' for key, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" {attributes}>{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, label: object = "") -> str:
    stroke = "#d0d7de" if fill == "#ffffff" else fill
    size = f'width="{width:g}" height="{height:g}"'
    shape = f'<rect x="{x:g}" y="{y:g}" {size} rx="3" fill="{fill}" stroke="{stroke}"/>'
    middle = text(x + width / 2, y + height / 2 + 4.5, label, fill="#ffffff", text_anchor="middle")
    return shape + (middle if label != "" else "")


def arrow(x: float, y: float, label: str) -> str:
    line = f'<path d="M{x:g} {y:g}h70m-7 -6l7 6l-7 6" stroke="{DARK}" stroke-width="2" fill="none"/>'
    return line + text(x + 35, y - 12, label, text_anchor="middle", fill=DARK, font_size=12)


def document(width: int, height: int, title: str, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
    font = 'font-family="Helvetica, Arial, sans-serif" role="img"'
    paper = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de"/>'
    return "\n".join([f'{head} height="{height}" {font} aria-label="{title}">', paper, *parts, "</svg>\n"])


def memory() -> str:
    """Return bars of one model's bytes per parameter on each rank, a bar for each stage of ZeRO."""
    title = f"Bytes per parameter that each of {RANKS} ranks holds (fp32, Adam)"
    parts = [text(20, 30, title, fill=DARK, font_size=15, font_weight="bold")]
    for stage, name in enumerate(STAGES):
        y = 52 + 42 * stage
        x = 135.0
        total = 0.0
        parts.append(text(20, y + 20, name, fill=DARK))
        for kind, color in COLORS.items():
            size, sharded_from = STATE[kind]
            share = size / RANKS if stage >= sharded_from else size
            parts.append(box(x, y, 32 * share - 2, 30, color, f"{share:g}"))
            x += 32 * share
            total += share
        parts.append(text(x + 8, y + 20, f"{total:g} bytes", fill=DARK, font_weight="bold"))
    for number, (kind, color) in enumerate(COLORS.items()):
        parts += [box(135 + 150 * number, 226, 14, 14, color), text(155 + 150 * number, 238, kind)]
    return document(740, 256, title, parts)


def vectors(left: float, title: str, values: Sequence[Sequence[object]], owned: bool) -> list[str]:
    """Return a table with a row per rank and a box per element; an empty value is not in memory."""
    parts = [text(left, 62, title, fill=DARK, font_size=13)]
    for rank, row in enumerate(values):
        for column, value in enumerate(row):
            color = RANK_COLORS[column] if owned else "#57606a"
            fill = "#ffffff" if value == "" else color
            parts.append(box(left + 42 * column, 76 + 36 * rank, 38, 28, fill, value))
    return parts


def collectives() -> str:
    """Return four ranks' vectors before a reduce-scatter, after it, and after an all-gather."""
    title = "all-reduce = reduce-scatter + all-gather"
    parts = [text(20, 30, title, fill=DARK, font_size=15, font_weight="bold")]
    parts += [text(20, 95 + 36 * rank, f"rank {rank}") for rank in range(RANKS)]
    means = [f"{sum(column) / RANKS:g}" for column in zip(*GRADIENTS, strict=True)]
    shards = [[""] * RANKS for _ in range(RANKS)]
    for rank, mean in enumerate(means):
        shards[rank][rank] = mean
    parts += vectors(75, "a gradient of each rank's data", GRADIENTS, owned=False)
    parts += [
        arrow(258, 140, "reduce-"),
        text(293, 160, "scatter", text_anchor="middle", fill=DARK, font_size=12),
    ]
    parts += vectors(345, "each owner has its mean", shards, owned=True)
    parts += [arrow(528, 140, "all-gather")]
    parts += vectors(615, "every rank has all means", [means] * RANKS, owned=True)
    notes = {
        75: "rank r sends element c to rank c",
        345: "(4 + 0 + 4 + 0) / 4 = 2, …",
        615: "rank r sends its element to all",
    }
    parts += [text(x, 240, note, font_size=12) for x, note in notes.items()]
    return document(805, 256, title, parts)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.svg").write_text(memory())
    (folder / "collectives.svg").write_text(collectives())
