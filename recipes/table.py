"""Read photographs of one folder whose labels are in a table: a CSV file of `image`, `label` and `split`."""

from __future__ import annotations

import csv
import os.path
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from shardtrain.config.config import Csv
from shardtrain.config.errors import UserError, not_valid, path_of, plain_file, reading
from shardtrain.config.format import first_of
from shardtrain.data.feed import DataSet
from shardtrain.recipes.photos import NO_FILES, Files, photographs

COLUMNS = ("image", "label", "split")
PARTS = ("train", "val", "test")
EXPECTED = "expected a CSV file with the columns image, label and perhaps split"


class Row(NamedTuple):
    """A line of the table."""

    image: str
    label: str
    split: str


def image_table(config: Csv, *, all_held_out: bool = False) -> DataSet:
    """Open the images of a folder that a table names, or all of them to score, of the classes of a run.

    Without a column `split` all are training images, of which `data.validation` holds some out.
    """
    where = f"data.table={config.table}"
    root = path_of("data.root", config.root)
    rows = _read(path_of("data.table", config.table), where, root)
    _require_files([row.image for row in rows], root, where)
    if all_held_out:
        return photographs(config, config.classes or (), NO_FILES, *_to_score(config, rows, root, where))
    classes = _in_order({row.label for row in rows})
    parts = _by_part(rows, classes, root)
    _require_parts(parts, classes, where, held_out=config.validation > 0)
    val = parts.get("val", parts.get("test"))
    test = parts.get("test") if "val" in parts else None
    data = photographs(config, classes, parts["train"], val, test)
    if "val" in parts or "test" not in parts or config.validation:
        return data
    note = (
        f"{where}: no row has split=val, so those of split=test decide the best step; data.validation=0.1 "
        "holds out training images for that, and scores test once, at the end"
    )
    return data._replace(notes=(*data.notes, note))


def _to_score(config: Csv, rows: Sequence[Row], root: Path, where: str) -> list[Files]:
    """Return the images to validate and to test by; without a column `split` all are of the first."""
    classes = config.classes or ()
    for row in rows:
        if row.label not in classes:
            raise not_valid(f"{where}: the run has no class {row.label}", row.label, classes)
    parts = _by_part(rows, classes, root)
    return [parts[name] for name in ("val", "test") if name in parts] or [parts["train"]]


def _by_part(rows: Sequence[Row], classes: Sequence[str], root: Path) -> dict[str, Files]:
    """Return the images of each part that has some, with the numbers of their classes."""
    labels = {label: number for number, label in enumerate(classes)}
    parts = {}
    for part in PARTS:
        own = [row for row in rows if row.split == part]
        if own:
            parts[part] = Files([str(root / row.image) for row in own], [labels[row.label] for row in own])
    return parts


def images_of(table: str, root: Path) -> list[str]:
    """Return the paths of the images in a table, which needs no labels. Raises UserError for absent ones."""
    where = f"data.table={table}"
    path = path_of("data.table", table)
    expected = "expected a CSV file with a column image"
    with reading(where, expected), plain_file(path).open(encoding="utf-8-sig", newline="") as file:
        names = [(line["image"] or "").strip() for line in _reader(file, ("image",))]
    _require_files(names, root, where)
    return [str(root / name) for name in names]


def _require_files(names: Sequence[str], root: Path, where: str) -> None:
    """Raise UserError if images of the table are not in the folder ``root``."""
    missing = [name for name in names if not os.path.isfile(root / name)]
    if missing:
        raise UserError(
            f"{where}: {len(missing)} of {len(names)} images are not in data.root={root}: {first_of(missing)}"
        )


def _reader(file: TextIO, required: Sequence[str]) -> csv.DictReader[str]:
    """Return a reader of the table. Raises ValueError if its first line lacks a ``required`` column."""
    table = csv.DictReader(file, skipinitialspace=True, strict=True)
    columns = [column.strip() for column in table.fieldnames or ()]
    if not {*required} <= {*columns}:
        raise ValueError(f"its first line has {', '.join(columns) or 'nothing'}")
    table.fieldnames = columns
    return table


def _read(path: Path, where: str, root: Path) -> list[Row]:
    """Return the lines of the table. Raises UserError for lines that lack a cell or name an image again."""
    with reading(where, EXPECTED), plain_file(path).open(encoding="utf-8-sig", newline="") as file:
        table = _reader(file, ("image", "label"))
        rows = []
        for line in table:
            rows.append(_row(line, f"{where}: line {table.line_num}"))
    if not rows:
        raise UserError(f"{where}: no line follows the first; {EXPECTED}")
    paths = [os.path.normpath(root / row.image) for row in rows]  # `./0.png` and `0.png` are one image
    path_of_most, times = Counter(paths).most_common(1)[0]
    if times > 1:
        same = [row.image for row, own in zip(rows, paths, strict=True) if own == path_of_most]
        names = " and ".join(dict.fromkeys(same))
        raise UserError(f"{where}: {names} is in {times} lines; expected each image once")
    return rows


def _row(line: Mapping[str | None, str | None], where: str) -> Row:
    if None in line:
        raise UserError(f"{where} has more cells than the first line; a text with a comma goes in quotes")
    cells = {"split": "train"} | {str(name): (cell or "").strip() for name, cell in line.items()}
    row = Row(*[cells[name] for name in COLUMNS])
    for name, cell in zip(COLUMNS, row, strict=True):
        if not cell:
            raise UserError(f"{where} has no {name}")
    if row.split not in PARTS:
        raise not_valid(f"{where} has split={row.split}", row.split, PARTS)
    return row


def _in_order(labels: Iterable[str]) -> list[str]:
    """Return names of classes in alphabetical order, numbers by their values, nan last as in the alphabet."""
    by_name = sorted(labels)
    try:
        return sorted(by_name, key=float)
    except ValueError:
        return by_name


def _require_parts(parts: Mapping[str, Files], classes: Sequence[str], where: str, held_out: bool) -> None:
    """Raise UserError unless there are images to train on, of every class, and others to evaluate by."""
    seen = set(parts["train"].labels) if "train" in parts else set()
    lacking = [name for number, name in enumerate(classes) if number not in seen]
    if lacking:
        raise UserError(f"{where}: no training image of {first_of(lacking)}; each class needs some")
    if parts.keys() == {"train"} and not held_out:
        raise UserError(
            f"{where}: no image to evaluate by; data.validation=0.2 holds out a fifth of each class, or a "
            "column split has train, val and test"
        )
