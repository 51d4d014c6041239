"""Run a row on ranks, and print what became of it as a table.

Rows of a wrapper that is not ours run in fresh ranks, since it may leave anything behind. A rank that hangs
or ends costs its row alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple
from unittest.mock import patch

import torch.distributed as dist

from behaviours import calls, state, training  # noqa: F401, they register rows
from behaviours.rows import ROWS, Outcome, outcome
from behaviours.wrappers import OWN, find
from pool import LostRanks, Pool

VERDICTS = ("equal", "refused", "error", "wrong", "hangs", "ends", "not offered")
LONGEST = 150  # characters of a table's cell
CELLS = {
    "wrong": "**wrong**: {}",
    "hangs": "**hangs** ({})",
    "ends": "**ends the process** ({})",
    "equal": "equal",
}


class Found(NamedTuple):
    """One cell of the table."""

    column: str
    row: str
    verdict: str
    text: str


def outcome_here(wrapper: str, name: str) -> Outcome:
    """Run the row ``name`` on this rank."""
    with patch.dict(os.environ):  # accelerate leaves variables behind
        here = outcome(find(wrapper), ROWS[name])
    if wrapper in OWN and ROWS[name].kind != "Failures":
        with contextlib.suppress(RuntimeError):  # where the group has failed, all ranks know
            dist.barrier()  # each rank is refused by itself, and the others may still be on their way there
    return Outcome(here.verdict, re.sub(rf"{tempfile.gettempdir()}/\w+", "…", here.text))


def outcomes(pool: Pool, transport: str, wrapper: str, name: str) -> list[Outcome]:
    """Return what became of the row ``name`` on each rank; of ranks that hang or end, that alone."""
    world = 3 if wrapper in OWN else 2  # 3 divides no width of the rows' models
    try:
        return pool.run(transport, world, outcome_here, wrapper, name)
    except LostRanks as lost:
        code = next(filter(None, lost.codes), None)
        hangs = Outcome("hangs", f"still after {pool.limit_s:.0f} s")
        return [hangs if code is None else Outcome("ends", f"exit code {code}")]


def summary(by_rank: Sequence[Outcome]) -> Outcome:
    """Return the outcome on the first rank whose is not equal."""
    return next((each for each in by_rank if each.verdict != "equal"), by_rank[0])


def cell(verdict: str, text: str) -> str:
    text = text.replace("|", "\\|")
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return CELLS.get(verdict, f"{verdict}: {{}}").format(text)


def table(found: Sequence[Found]) -> Iterator[str]:
    """Yield the lines of a table of counts, and of a table of rows, by kind."""
    columns = sorted({each.column for each in found})
    cells = {(each.row, each.column): each for each in found}
    counts = Counter((each.column, each.verdict) for each in found)
    yield from (f"|  | {' | '.join(VERDICTS)} |", f"| --- |{' --- |' * len(VERDICTS)}")
    for column in columns:
        yield f"| {column} | {' | '.join(str(counts[column, verdict]) for verdict in VERDICTS)} |"
    yield from ("", "## Rows", "", f"| behaviour | {' | '.join(columns)} |")
    yield f"| --- |{' --- |' * len(columns)}"
    kind = ""
    for name in (name for name in ROWS if any((name, column) in cells for column in columns)):
        if ROWS[name].kind != kind:
            kind = ROWS[name].kind
            yield f"| **{kind}** |{' |' * len(columns)}"
        here = [cells.get((name, column)) for column in columns]
        yield f"| {name} | {' | '.join(cell(*each[2:]) if each else '' for each in here)} |"
