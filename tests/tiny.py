"""A training run of seconds, for tests of the program around the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shardtrain import comm
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.train.loop import train

CPU = torch.device("cpu")
TINY = (
    *("data=fake", "data.train_images=60", "data.val_images=11", "data.channels=1", "data.image_size=8"),
    *("train.batch_size=12", "train.epochs=2", "train.log_every=5", "monitor.plan=false"),
    "monitor.progress=none",
)


def configure(*arguments: str) -> Config:
    raw = compose(["+recipe=resnet", *arguments])
    assert raw is not None
    return from_hydra(raw)


def run(folder: str, *arguments: str) -> None:
    """Train in ``folder`` on the ranks of this group."""
    rank_info = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    train(configure(*TINY, *arguments), Context(rank_info, CPU, Path(folder)))
    comm.barrier()


def events_of(folder: Path) -> Any:
    """What TensorBoard reads from a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()
