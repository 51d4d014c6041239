"""Draw the rooms of the package, and the way of a parameter and of a gradient through it.

    python docs/course/house.py docs/pictures

It writes ``house.svg``. Rooms, what they do and what they import are read from the package itself. A test
runs a step on two ranks, and requires that it makes the calls of `PARAMETER` and of `GRADIENT` in this order.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import NamedTuple

from why_shard import COLORS, DARK, LIGHT, box, document, text

import shardtrain


class FunctionCall(NamedTuple):
    """A function that a step calls, and what it does there."""

    file: str
    function: str
    does: str


# One step, from rest to rest, of a parameter whose unit is released after forward.
PARAMETER = (
    FunctionCall("engine/hooks.py", "Engine.adopt_changes", "at rest: a local shard"),
    FunctionCall("engine/driver.py", "Driver.begin_call", "its module is called"),
    FunctionCall("engine/schedule.py", "Schedule.enter", "decides to gather it"),
    FunctionCall("engine/unit.py", "Unit.gather", "starts the all-gather"),
    FunctionCall("comm/channel.py", "Channel.gather", "guards and counts it"),
    FunctionCall("engine/unit.py", "Unit.show", "waits: the whole parameter"),
    FunctionCall("engine/driver.py", "Driver.end_call", "its module returns"),
    FunctionCall("engine/schedule.py", "Schedule.leave", "decides what stays"),
    FunctionCall("engine/unit.py", "Unit.hide", "shows the shard again"),
    FunctionCall("engine/driver.py", "Driver._reach", "backward needs it again"),
    FunctionCall("engine/unit.py", "Unit.release", "frees the full vector"),
)
GRADIENT = (
    FunctionCall("engine/schedule.py", "Schedule._complete", "all of a unit's are there"),
    FunctionCall("engine/gradient.py", "Reduction.take", "takes them from autograd"),
    FunctionCall("engine/gradient.py", "Sum.add", "lays them out in one vector"),
    FunctionCall("engine/gradient.py", "Reduction.reduce", "marks those that are absent"),
    FunctionCall("comm/channel.py", "Channel.reduce", "starts the reduce-scatter"),
    FunctionCall("engine/schedule.py", "Schedule.end_backward", "waits for all reductions"),
    FunctionCall("engine/gradient.py", "Sum.means", "this rank's interval"),
    FunctionCall("engine/gradient.py", "give", "tells absent ones apart"),
    FunctionCall("engine/segment.py", "ShardedParam.set_grad", "sets .grad of the shard"),
    FunctionCall("guardrails/optimizers.py", "Optimizers.before_step", "an optimizer may step"),
)
ROW = 30  # pixels
# Rooms in the colors of the parts that the documents call so.
ENGINE = ("layout", "device", "comm", "pieces", "engine", "torch_private", "errors")


class Room(NamedTuple):
    """A folder or file of the package: what it does, and which other ones it imports from."""

    name: str
    does: str
    imports: frozenset[str]


def rooms(package: Path) -> list[Room]:
    """Return the rooms of ``package``: each after all those that it imports from."""
    files: dict[str, list[Path]] = {}
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).parts[0].removesuffix(".py")
        if name not in ("__init__", "public", "configs", "recipes"):
            files.setdefault(name, []).append(file)
    imports = {name: imported(name, inside, files) for name, inside in files.items()}
    ordered: list[Room] = []
    while imports:
        lowest = [name for name, others in imports.items() if not others & imports.keys()]
        for name in sorted(lowest):
            place = package / name
            first = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
            ordered.append(Room(name, in_short(ast.get_docstring(ast.parse(first)) or ""), imports.pop(name)))
    return ordered


def in_short(docstring: str) -> str:
    """Return the beginning of a docstring's first line, without what it adds."""
    line = docstring.split("\n")[0].replace("``torch.distributed``", "torch")
    short = re.split(r"\.(?: |$)|:|`{2}", line)[0]
    return short if len(short) < 60 else short.partition(",")[0]


def imported(room: str, inside: list[Path], names: dict[str, list[Path]]) -> frozenset[str]:
    """Return which other rooms the files of ``room`` import from; what is loaded at first use is left out."""
    modules = set[str]()
    for file in inside:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "shardtrain":
                modules.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardtrain."):
                modules.add(str(node.module).split(".")[1])
    lazily = {"collectives"} if room == "comm" else set()
    return frozenset(modules & names.keys() - {room} - lazily)


def way(left: int, title: str, calls: tuple[FunctionCall, ...], color: str) -> list[str]:
    """Return a column of boxes, one per call, from top to bottom."""
    parts = [text(left, 62, title, fill=DARK, font_weight="bold")]
    for number, call in enumerate(calls):
        y = 76 + 44 * number
        parts.append(box(left, y, 210, 26, color, call.function))
        parts.append(text(left + 220, y + 11, call.does, font_size=12, fill=DARK))
        parts.append(text(left + 220, y + 25, call.file, font_size=11))
        if number:
            parts.append(f'<path d="M{left + 105} {y - 18}v14m-4 -5l4 5l4 -5" stroke="{LIGHT}" fill="none"/>')
    return parts


def house() -> str:
    """Return the picture: the rooms on the left, each below those it imports, and two ways beside."""
    title = "The rooms of shardtrain, and one step through the engine"
    parts = [text(20, 30, title, fill=DARK, font_size=15, font_weight="bold")]
    parts.append(text(20, 62, "rooms: each imports only from those above it", fill=DARK, font_weight="bold"))
    drawn = rooms(Path(shardtrain.__file__).parent)
    for number, room in enumerate(drawn):
        y = 76 + ROW * number
        color = COLORS["parameters"] if room.name in ENGINE else LIGHT
        parts.append(box(20, y, 120, 24, color, room.name))
        parts.append(text(150, y + 16, room.does, font_size=12))
    parts += way(540, "a parameter, in one step", PARAMETER, COLORS["parameters"])
    parts += way(950, "its gradient, in backward", GRADIENT, COLORS["gradients"])
    return document(1360, 86 + max(ROW * len(drawn), 44 * len(PARAMETER)), title, parts)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "outputs")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "house.svg").write_text(house())
