"""shardtrain.predict writes the class of each image, as the run's model sees it, and how probable it is.

  python -m shardtrain.predict run=outputs/NAME data.root=FOLDER out=classes.csv
  torchrun --nproc-per-node 2 -m shardtrain.predict run=outputs/NAME/best data.root=FOLDER out=classes.csv

Each rank prepares its part of the images as in the run's evaluation: the run's record has sizes,
interpolation, mean and std. An image that cannot be read has no class in the table, and the exit code is 2.
"""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from shardtrain.config.command import read_keys
from shardtrain.config.errors import UserError, path_of, writing
from shardtrain.config.format import counted
from shardtrain.config.schema import key, typed
from shardtrain.config.target import RECIPES
from shardtrain.data import EvalFeed, Share, ToDevice
from shardtrain.job.inference import Inference
from shardtrain.job.scores import Gathering
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo, on_rank_0, together
from shardtrain.train.resume import SavedKeys, open_saved, saved_model

REPORTS = 10  # lines about the progress
NO_CLASS = -1  # of an image that cannot be read


@dataclass(frozen=True, kw_only=True)
class Where:
    """The place of the images, and how they are loaded."""

    # folder of the images, in any folders inside it
    root: str = key()
    # FILE.csv with a column image (a path in root): only these; null: all images
    table: str | None = key(None)
    # processes of a rank that load images; 0: none beside itself
    workers: int = key(0, at_least=0, at_most=1024)
    # images per rank in a forward, at most
    batch_size: int = key(64, above=0)


@dataclass(frozen=True, kw_only=True)
class PredictKeys(SavedKeys):
    """The keys of a prediction."""

    # FILE.csv with the columns file, class and probability; must not exist
    out: str = key()
    data: Where = field(default_factory=Where)
    # auto | cpu | cuda
    device: str = key("auto")


read = partial(read_keys, PredictKeys)


def predict(keys: PredictKeys, rank_info: RankInfo, device: torch.device) -> None:
    """Write the table. Collective."""
    out = path_of("out", keys.out)

    def look() -> None:
        if out.exists():
            raise UserError(f"out={out} exists already; choose another name or remove it")
        with writing("out", out):
            out.parent.mkdir(parents=True, exist_ok=True)

    on_rank_0(look)
    opened = open_saved(keys.run, keys.weights)
    inference = typed(Inference, opened.manifest.facts["inference"], "inference")
    files, notes = together(lambda: _files(keys.data))
    if rank_info.rank == 0:
        print("\n".join(notes), end="\n" if notes else "", flush=True)
    share = Share(rank_info.world_size, 1, rank_info.rank, rank_info.world_size)
    images = _recipe("photos").Prepared(files, inference)
    feed = EvalFeed(images, share, ToDevice(device), keys.data.workers, keys.data.batch_size)
    with saved_model(opened, keys, device) as model:
        answers = _answers(model, feed, rank_info)
    if rank_info.rank == 0:
        with writing("out", out):
            temporary = out.with_name(f".{out.name}.part")
            with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                _write(file, files, answers, inference.classes)
            os.replace(temporary, out)
        print(f"{out}: {counted(len(files), 'image')} of {opened.path}", flush=True)
        _require_all_read(images, answers, out)


def _files(where: Where) -> tuple[list[str], list[str]]:
    """Return the paths of the images, in order, and lines about other files. Raises UserError without any."""
    root = path_of("data.root", where.root)
    files: list[str]
    notes: list[str] = []
    photos = _recipe("photos")
    if where.table is None:
        files, notes = photos.images_in(root)
    else:
        files = _recipe("table").images_of(where.table, root)
    if not files:
        raise UserError(f"data.root={where.root}: no image in it or in its folders")
    return files, [*notes, *photos.warnings_of_grey(photos.Files(files, ()))]


def _recipe(name: str) -> Any:
    """Return a module of recipes, which this package does not import: they are beside it in a checkout."""
    return importlib.import_module(f"{RECIPES}.{name}")


def _answers(model: nn.Module, feed: EvalFeed, rank_info: RankInfo) -> Tensor:
    """Return the class and its probability for each image in order: [images, 2] on rank 0. Collective."""
    images = len(feed.images)
    batches = len(feed.sampler)
    gathering = Gathering()
    for number, batch in enumerate(feed, 1):
        unreadable = batch.images.isnan().flatten(1).any(1)
        probability, label = model(batch.images.nan_to_num()).float().softmax(1).max(1)
        label = label.masked_fill(unreadable, NO_CLASS)
        gathering.add(torch.stack([label.double(), probability.double()], 1), batch.labels)
        if rank_info.rank == 0 and (number == batches or number % -(-batches // REPORTS) == 0):
            done = min(images, number * feed.sampler.batch_size * rank_info.world_size)
            print(f"{done:,} of {counted(images, 'image')}", flush=True)
    answers, _ = gathering.in_order(images, virtual_ranks=1)
    return answers


def _write(file: TextIO, files: Sequence[str], answers: Tensor, classes: Sequence[str]) -> None:
    table = csv.writer(file)
    table.writerow(("file", "class", "probability"))
    for path, (label, probability) in zip(files, answers.tolist(), strict=True):
        answer = ("", "") if label == NO_CLASS else (classes[int(label)], f"{probability:.6f}")
        table.writerow((path, *answer))


def _require_all_read(images: Any, answers: Tensor, out: Path) -> None:
    """Raise UserError, after a line for each, if images could not be read."""
    bad = (answers[:, 0] == NO_CLASS).nonzero().flatten().tolist()
    for index in bad:
        print(images.problem(index), flush=True)
    if bad:
        raise UserError(
            f"out={out}: {len(bad):,} of {counted(len(answers), 'image')} cannot be read; they are listed "
            "above, and have no class in the table"
        )


main = partial(launcher.start, read, predict)

if __name__ == "__main__":
    main()
