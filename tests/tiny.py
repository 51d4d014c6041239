"""A training run of seconds, for tests of the program around the engine."""

import functools
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardtrain import comm
from shardtrain.job.config import Config, Images
from shardtrain.job.data import DataSet, Share, TrainFeed
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.job.read import from_hydra
from shardtrain.train.loop import train

CPU = torch.device("cpu")
ALONE = RankInfo(0, 1, 0, 1)
TWO_IMAGES = Share(2, 1, 0, 1)  # per step, on one rank
SHORT = (
    *("data=fake", "data.train_images=60", "data.val_images=11", "data.channels=1", "data.image_size=8"),
    *("train.batch_size=12", "train.epochs=2", "train.log_every=5"),
)
# 6,362 parameters for images of three channels. Neither BatchNorm nor dropout.
VIT = (*("model=vit_cifar", "model.layers=1", "model.width=24", "model.heads=2"), "model.mlp_width=16")
TINY = (*SHORT, *VIT)


@functools.cache
def composed(*arguments: str) -> Config:
    """Return the configuration of a command line."""
    return from_hydra(compose(arguments))


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


def train_feed(found: DataSet, size: int, share: Share = TWO_IMAGES, **options: Any) -> TrainFeed:
    """Return the micro-batches of two steps, of images with ``size`` pixels per side."""
    keys = {key: options.pop(key, usual) for key, usual in (("repeats", 1), ("workers", 0))}
    images = Images(
        name="", image_size=size, eval_size=None, validation=0.0, limit=None, mean=None, std=None, **keys
    )
    return TrainFeed(found, share, images, CPU, **{"seed": 0, "steps": range(2), **options})


def global_batches(
    found: DataSet, size: int, batch_size: int, world: int, accumulate: int, mix: Any = None, **options: Any
) -> list[tuple[torch.Tensor, ...]]:
    """Return each step's images and labels of all ranks, in the order of the global batch.

    ``mix(share)`` returns what mixes a rank's images.
    """
    steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for rank in range(world):
        share = Share(batch_size, accumulate, rank, world)
        feed = train_feed(found, size, share, mix=mix and mix(share), **options)
        for index, batch in enumerate(feed):
            steps.setdefault(index // accumulate, []).append(batch[:2])
    return [tuple(map(torch.cat, zip(*parts, strict=True))) for parts in steps.values()]


def small_model(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Build what may stand for torchvision's models: the mobile net has dropout and buffers, others neither.

    ``patch.object(models, "_build", small_model)`` of `shardtrain.recipes.models` puts it there.
    """
    chance = name == "mobilenet_v3_small"

    def block(inputs: int, outputs: int, stride: int) -> nn.Module:
        norm = nn.BatchNorm2d(outputs) if chance else nn.Identity()
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride), norm, nn.ReLU())

    blocks = (block(3, 9, 2), block(9, 9, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*blocks, nn.Dropout(0.2 * chance), nn.Linear(9, num_classes))


def result_of(folder: str | Path) -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "result.json").read_text()))


def events_of(folder: Path) -> Any:
    """What TensorBoard reads from a run directory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()
