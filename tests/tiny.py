"""A training run of seconds, for tests of the program around the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from shardtrain import comm
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.data import DataSet, Prepare, Share, TrainFeed
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.train.loop import train

CPU = torch.device("cpu")
ALONE = Share(2, 1, 0, 1)  # one rank, two images per step
TINY = (
    *("data=fake", "data.train_images=60", "data.val_images=11", "data.channels=1", "data.image_size=8"),
    *("train.batch_size=12", "train.epochs=2", "train.log_every=5"),
    "monitor.progress=none",
)


def composed(*arguments: str) -> Config:
    """Return the configuration of a command line."""
    raw = compose(arguments)
    assert raw is not None
    return from_hydra(raw)


def configure(*arguments: str) -> Config:
    return composed("+recipe=resnet", *arguments)


def context(folder: str | Path) -> Context:
    """Return the context of a run in ``folder`` on the ranks of this group."""
    rank_info = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    return Context(rank_info, CPU, Path(folder))


def run(folder: str, *arguments: str) -> dict[str, Any]:
    """Train in ``folder`` on the ranks of this group, and return result.json."""
    train(configure(*TINY, *arguments), context(folder))
    comm.barrier()
    return result_of(folder)


def train_feed(found: DataSet, size: int, share: Share = ALONE, **options: Any) -> TrainFeed:
    """Return the micro-batches of two steps, of images with ``size`` pixels per side."""
    keywords = {"seed": 0, "workers": 0, "steps": range(2), **options}
    return TrainFeed(found, share, Prepare(found, size, CPU), **keywords)


def result_of(folder: str | Path) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "result.json").read_text()))


def events_of(folder: Path) -> Any:
    """What TensorBoard reads from a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()
