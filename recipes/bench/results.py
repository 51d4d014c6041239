"""Append results to a CSV file, and print the documents' tables from it.

    torchrun --nproc-per-node 2 -m shardtrain.recipes.bench suite results=docs/results/bench.csv
    python -m shardtrain.recipes.bench.results

A document has a comment above a table: the file and the number of ranks, then what a row and a column of the
table are called and what a cell shows, by the file's fields. The document says which rows and columns there
are. A cell is of the last row in the file that has both names, or "–"::

    <!-- docs/results/bench.csv ranks=2: {contender} | {case} | {ratio} -->
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

from shardtrain.monitor.monitor import commit

from .compared import Comparison, title

# ``value``: the median over rounds, in ``unit``. ``ratio``: the median within rounds, to ``reference``.
FIELDS = ["date", "commit", "cpu", "cores", "ranks", "torch", "case", "contender"]
FIELDS += ["rounds", "unit", "value", "reference", "ratio"]
DOCUMENTS = ("README.md", "docs/benchmarks.md")
TABLE = re.compile(r"<!-- (\S+\.csv) ranks=(\d+): (.*?) \| (.*?) \| (.*?) -->\n\n((?:\|.*\n)+)")


def append(path: Path, comparisons: Sequence[Comparison], more: str, conditions: Mapping[str, Any]) -> None:
    """Append a row for every case and contender with right losses. ``more``: what a case's title lacks."""
    facts = {**conditions, "date": date.today().isoformat(), "commit": (commit() or "")[:7]}
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, extrasaction="ignore", lineterminator="\n")
        if new:
            writer.writeheader()
        for each in comparisons:
            reference = each.references[0]
            ratios = each.ratios_to(reference)
            for name, values in each.right().items():
                own = {"case": each.title + more, "contender": title(name), "rounds": len(values)}
                own |= {"unit": each.unit, "value": f"{median(values) * each.scale:.1f}"}
                if name in ratios:
                    own |= {"reference": title(reference), "ratio": f"{ratios[name].median:.2f}"}
                writer.writerow({**facts, **own})


def printed(text: str, root: Path) -> str:
    """Return a document with the cells of its marked tables from the files, whose paths begin at ``root``."""

    def table(found: re.Match[str]) -> str:
        path, ranks, row, column, cell, old = found.groups()
        with (root / path).open(newline="") as file:
            rows = [each for each in csv.DictReader(file) if each["ranks"] == ranks]
        cells = {(row.format(**each), column.format(**each)): cell.format(**each) for each in rows}
        head, rule, *lines = old.splitlines()
        columns = [name.strip() for name in head.split("|")[2:-1]]
        labels = [line.split("|")[1].strip() for line in lines]
        new = [[label, *(cells.get((label, name), "–") for name in columns)] for label in labels]
        return found[0].replace(
            old, "\n".join([head, rule, *(f"| {' | '.join(each)} |" for each in new), ""])
        )

    return TABLE.sub(table, text)


if __name__ == "__main__":
    for document in map(Path, DOCUMENTS):
        document.write_text(printed(document.read_text(), Path.cwd()))
