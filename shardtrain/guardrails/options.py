"""How optimizers and averages have stepped, in lines of class and options that ranks compare in a forward.

Ranks whose learning rates differ would train one model by several rules. So the first forward after a step
posts the options that have changed since the step before, one line each, and a digest of all.
"""

from __future__ import annotations

import numbers
import zlib
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

_NOT_COMPARED = ("params", "param_names")
_PLAIN = (numbers.Number, str, type(None))  # NumPy's numbers, too
_LONGEST = 60  # characters of a line that the guard's errors show


class Steps:
    """The steps of optimizers and averages since the last forward. Numbers are compared bit by bit."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}  # of this step's optimizers
        self._before: dict[str, None] = {}  # of the last step's
        self._classes: dict[str, None] = {}

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that ``optimizer`` steps, with the options that it has now."""
        self._classes[type(optimizer).__name__] = None
        self._lines.update(dict.fromkeys(_lines_of(optimizer)))

    def note_average(self, weight: float) -> None:
        """Note that averages of the weights take the present ones, by ``weight``."""
        self._classes["Ema"] = None
        self._lines[f"Ema with weight={weight}"] = None

    def take(self) -> list[str]:
        """Return what to post of the steps since the last call: new lines, and a summary."""
        if not self._classes:
            return []
        new = [_shortened(line) for line in self._lines if line not in self._before]
        digest = zlib.crc32("\n".join(self._lines).encode())
        summary = f"{' and '.join(self._classes)}, other options as before ({digest:08x})"
        self._before = self._lines
        self._lines = {}
        self._classes = {}
        return [*new, _shortened(summary)]


def _lines_of(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield a line for each option, with its values in all groups, such as ``SGD with lr=0.1, 0.01``."""
    name = type(optimizer).__name__
    groups = optimizer.param_groups
    for key in dict.fromkeys(chain.from_iterable(groups)):
        if key not in _NOT_COMPARED:
            values = [_text(group.get(key)) for group in groups]
            same = values[0] if len({*values}) == 1 else ", ".join(values)
            yield f"{name} with {key}={same}"


def _text(value: Any) -> str:
    """Return ``value`` as a text that is the same on all ranks; of other objects than numbers their class."""
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, str) else str(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return str(value.item())  # on an accelerator the host would wait for it in each step
    return type(value).__name__


def _shortened(line: str) -> str:
    """Return ``line``, or its beginning after a digest of all of it."""
    return line if len(line) <= _LONGEST else f"{zlib.crc32(line.encode()):08x} {line[: _LONGEST - 12]} ..."
