"""Predict one rank's memory and traffic: ``python -m shardtrain.plan +recipe=resnet world_size=64``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from shardtrain import device
from shardtrain.job import data, launch
from shardtrain.job.build import completed, require_equal_groups
from shardtrain.job.config import Config
from shardtrain.job.data.feed import Arrays
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError
from shardtrain.job.preprocessing import Preprocessing, numbered
from shardtrain.job.read import Beside, read_beside
from shardtrain.job.schema import above, at_least
from shardtrain.plan import report
from shardtrain.plan.simulate import Question, simulate


@dataclass(frozen=True)
class PlanKeys:
    """`config.yaml` explains every key."""

    world_size: int = at_least(1, at_most=10**6)
    micro_batch: int | None = at_least(1)
    bandwidth: float | None = above(0)
    flops: float | None = above(0)


@dataclass(frozen=True)
class PlanSettings(Beside[PlanKeys]):
    """Hold the command line's settings, with the model's keys completed from the data set."""

    question: Question


def read(arguments: Sequence[str], speak: bool) -> PlanSettings | None:
    """Return the settings of ``arguments``; None if a flag asks for output."""
    both = read_beside(PlanKeys, Path(__file__).parent / "configs", arguments, speak)
    if both is None:
        return None
    keys = both.keys
    config = both.config
    if (keys.bandwidth is None) != (keys.flops is None):
        raise UserError("bandwidth (GB/s) and flops (TFLOP/s) make a lower bound together: give both")
    images = _data_set(config, config.model.get("num_classes"))
    if config.device == "auto":  # otherwise also a device that this machine does not have
        config = replace(config, device=device.ACCELERATOR if device.count() else "cpu")
    config = completed(config, images)
    return PlanSettings(
        keys, config, "cpu", config.threads, _question(keys, config, images.preprocessing.channels)
    )


def _data_set(config: Config, classes: int | None) -> data.DataSet:
    """Load the data set; if it is not available, return one of colour images and the model's classes."""
    try:
        return data.load(config.data, config.allow)
    except UserError as error:
        if classes is None or config.data.image_size == 0:
            raise UserError(f"{error}; or plan without the data set: model.num_classes=N") from None
    nothing = Arrays(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    mean = (0.0,) * 3
    std = (1.0,) * 3
    preprocessing = Preprocessing.of_arrays(numbered(classes), mean, std, config.data.side_in_eval)
    return data.DataSet(nothing, nothing, config.data.name, preprocessing)


def _question(keys: PlanKeys, config: Config, channels: int) -> Question:
    require_equal_groups(config.parallel, keys.world_size)
    replicate = config.parallel.replicate
    whole, left = divmod(config.train.batch_size, keys.world_size * config.micro_batches(keys.world_size))
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


def plan(settings: PlanSettings, rank_info: RankInfo, _: torch.device) -> None:
    """Simulate one rank, and print its plan."""
    if rank_info.world_size > 1:
        raise UserError(
            "the planner is one process for any world size: start it with python -m shardtrain.plan"
        )
    keys = settings.keys
    result = simulate(settings.config, settings.question)
    print(f"{report.headline(settings.config, result)}\n\n{report.rank_table(result)}")
    if keys.bandwidth and keys.flops:
        print(report.bound_in_words(result, keys.bandwidth, keys.flops))


main = partial(launch.start, read, plan)

if __name__ == "__main__":
    main()
