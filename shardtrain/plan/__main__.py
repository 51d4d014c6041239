"""Predict memory, traffic and time: ``python -m shardtrain.plan +recipe=resnet world_size=64``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from PIL import Image

from shardtrain import device
from shardtrain.job import data, launch
from shardtrain.job.build import completed, require_equal_groups
from shardtrain.job.config import Config
from shardtrain.job.data.feed import Arrays
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError
from shardtrain.job.read import Beside, read_beside
from shardtrain.job.schema import above, at_least
from shardtrain.plan import report
from shardtrain.plan.simulate import Question, simulate

GIB = 2**30
WORLD_SIZES = (1, 2, 4, 8, 16, 64, 256, 1024)
MOST_IMAGES = 1 << 16  # per rank in one forward


@dataclass(frozen=True)
class PlanKeys:
    """`config.yaml` explains every key."""

    curve: bool
    out: str | None
    world_size: int = at_least(1, at_most=10**6)
    micro_batch: int | None = at_least(1)
    bandwidth: float | None = above(0)
    flops: float | None = above(0)
    memory: float | None = above(0)


@dataclass(frozen=True)
class PlanSettings(Beside[PlanKeys]):
    """Hold the command line's settings. The model's keys are completed, the planner runs on the CPU."""

    question: Question


def read(arguments: Sequence[str], speak: bool) -> PlanSettings | None:
    """Return the settings of ``arguments``; None if a flag asks for output."""
    both = read_beside(PlanKeys, Path(__file__).parent / "configs", arguments, speak)
    if both is None:
        return None
    keys, config = both.keys, both.config
    if (keys.bandwidth is None) != (keys.flops is None):
        raise UserError("bandwidth (GB/s) and flops (TFLOP/s) make a lower bound together: give both")
    images = _data_set(config, config.model.get("num_classes"))
    if config.device == "auto":  # otherwise also a device that this machine does not have
        config = replace(config, device=device.ACCELERATOR if device.count() else "cpu")
    config = completed(config, images)
    return PlanSettings(keys, config, "cpu", config.threads, _question(keys, config, images.channels))


def _data_set(config: Config, classes: int | None) -> data.DataSet:
    """Load the data set; if it is not available, return one of colour images and the model's classes."""
    try:
        return data.load(config.data, config.allow)
    except UserError as error:
        if classes is None or config.data.image_size == 0:
            raise UserError(f"{error}; or plan without the data set: model.num_classes=N") from None
    nothing = Arrays(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return data.DataSet(nothing, nothing, config.data.name, classes, 3, (0.0,) * 3, (1.0,) * 3)


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
    """Simulate, print the plan, and write `plan.json`, `plan.txt` and a picture."""
    if rank_info.world_size > 1:
        raise UserError(
            "the planner is one process for any world size: start it with python -m shardtrain.plan"
        )
    keys, config, question = settings.keys, settings.config, settings.question
    output = report.Output("plan", keys.out, f"{config.model_name}-{question.world_size}ranks")
    rates = (keys.bandwidth, keys.flops) if keys.bandwidth and keys.flops else None
    asked = simulate(config, question)
    text = f"{report.headline(config, asked)}\n\n{report.rank_table(asked)}"
    if rates is not None:
        text += f"\n{report.bound_in_words(asked, rates)}"
    largest = None
    if keys.memory is not None:

        def peak_of(images: int) -> int:
            return simulate(config, replace(asked.question, micro_batch=images)).peak

        images = largest_batch(peak_of, int(keys.memory * GIB), question.micro_batch)
        largest = {"memory": keys.memory, "images": images}
        text += f"\n{report.fit_in_words(asked, keys.memory, images)}"
    plans = [asked]
    if keys.curve:
        others = (w for w in WORLD_SIZES if w != question.world_size and w % question.replicate == 0)
        plans += [simulate(config, replace(question, world_size=world)) for world in others]
        plans.sort(key=lambda plan: plan.question.world_size)
        text += f"\n\n{report.curve_table(plans, rates)}\n\n{report.shards_table(plans)}"
    facts = {
        "plan": report.as_json(asked, rates),
        "largest_batch": largest,
        "curve": [report.as_json(plan, rates) for plan in plans],
        "config": config,
    }
    output.write(text, facts)
    picture = asked.timeline.picture(keys.memory and keys.memory * GIB)
    if isinstance(picture, str):
        print(picture)
    else:
        Image.fromarray(picture).save(output.folder / "memory.png")


def largest_batch(peak_of: Callable[[int], int], memory: int, start: int) -> int:
    """Return the largest number of images whose peak fits in ``memory`` bytes: from 0 to MOST_IMAGES.

    ``peak_of(images)``, in bytes, grows nearly in proportion to the images. So a few steps along the line
    through the two known points nearest to ``memory``, at first ``start`` and ``start + 1``, find it.
    """
    known = {images: peak_of(images) for images in (start, start + 1)}
    while True:
        fits = max((images for images, peak in known.items() if peak <= memory), default=0)
        too_many = min((images for images, peak in known.items() if peak > memory), default=MOST_IMAGES + 1)
        if too_many - fits <= 1:
            return fits
        (a, low), (b, high) = sorted(known.items(), key=lambda item: abs(item[1] - memory))[:2]
        guess = round(a + (memory - low) * (b - a) / (high - low)) if high != low else 2 * fits
        images = min(max(guess, fits + 1), too_many - 1)
        known[images] = peak_of(images)


main = partial(launch.start, read, plan)

if __name__ == "__main__":
    main()
