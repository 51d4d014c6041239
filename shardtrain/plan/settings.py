"""The planner's command line: its own keys, and the training program's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain import data
from shardtrain.build import completed
from shardtrain.checked import above, at_least
from shardtrain.compose import read_beside
from shardtrain.config import Config, Data, require_equal_groups
from shardtrain.data.batches import Arrays
from shardtrain.errors import UserError
from shardtrain.plan.simulate import Question

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Keys:
    """`config.yaml` explains every key."""

    curve: bool
    out: str | None
    world_size: int = at_least(1)
    micro_batch: int | None = at_least(1)
    bandwidth: float | None = above(0)
    flops: float | None = above(0)
    memory: float | None = above(0)


@dataclass(frozen=True)
class Settings:
    """``config``: the training program's, the model's keys completed; ``question``: what to plan for."""

    keys: Keys
    config: Config
    question: Question

    @property
    def device(self) -> str:
        return "cpu"  # where the planner itself runs

    @property
    def threads(self) -> int | None:
        return self.config.threads


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """The settings that ``arguments`` ask for; None when they asked for something to be printed."""
    found = read_beside(Keys, arguments, speak=speak, folder=CONFIGS)
    if found is None:
        return None
    keys, config = found
    if (keys.bandwidth is None) != (keys.flops is None):
        raise UserError("bandwidth (GB/s) and flops (TFLOP/s) make a lower bound together: give both")
    outline = _outline(config.data, config.model.get("num_classes"))
    config = dataclasses.replace(config, model=completed(config, outline), device=_planned_device(config))
    return Settings(keys, config, _question(keys, config, outline.channels))


def _question(keys: Keys, config: Config, channels: int) -> Question:
    require_equal_groups(config.parallel, keys.world_size)
    replicate = config.parallel.replicate
    parts = keys.world_size * config.train.accumulate
    whole, left = divmod(config.train.batch_size, parts)
    share = max(2, whole + 1) if left else whole  # BatchNorm does not train on a single pixel of one image
    in_place = config.parallel.transport == "shared_memory" and keys.world_size > replicate
    return Question(
        world_size=keys.world_size,
        replicate=replicate,
        micro_batch=keys.micro_batch or share,
        channels=channels,
        in_place=in_place,
        inbox=config.device == "cpu" and not in_place,
    )


def _planned_device(config: Config) -> str:
    """What the ranks compute on; a device that this machine has not can be planned for all the same."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _outline(config: Data, classes: int | None) -> data.DataSet:
    """The data set's shape; where it is not at hand, colour images of as many classes as the model has."""
    try:
        return data.load(config)
    except UserError as error:
        if classes is None:
            raise UserError(f"{error}; or plan without the data set: model.num_classes=N") from None
    nothing = Arrays(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return data.DataSet(nothing, nothing, config.name, classes, 3, (0.0,) * 3, (1.0,) * 3)
