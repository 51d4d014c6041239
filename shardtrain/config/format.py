"""Numbers and tables formatted for people, for all rooms of the program, of which this is the lowest."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

MIB = 2**20


def write_any_text() -> None:
    """Have stdout write what its encoding lacks, such as ``×`` in ASCII, as an escape sequence."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def counted(number: int, word: str) -> str:
    """Return a text such as ``1 rank``, ``1,024 ranks`` or ``2 micro-batches``."""
    ending = "" if number == 1 else "es" if word.endswith("ch") else "s"
    return f"{number:,} {word}{ending}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines with aligned columns: the first flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines


def first_of(problems: Sequence[str]) -> str:
    """Return the first five of perhaps hundreds of problems, in one line."""
    more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
