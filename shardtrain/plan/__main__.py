"""shardtrain.plan says what a rank will hold, send and compute, before any hardware is rented.

  python -m shardtrain.plan +recipe=resnet world_size=64
  python -m shardtrain.plan +recipe=resnet world_size=64 device=cuda
  python -m shardtrain.plan PACKAGE.FUNCTION world_size=64
  python -m shardtrain.plan data=imagefolder data.root=FOLDER check=true

device=cuda plans for GPUs wherever it runs; device=auto for what this machine has, and says which.
FUNCTION returns any module, which then gets images, or a module and the inputs of its forward;
model.KEY=VALUE is a keyword of it. check=true reads every image of the data set, lists those that cannot be
read, and loads model.weights. It takes every key of shardtrain.train, and these:
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardtrain import data, device
from shardtrain.config.command import Program, read_command
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.config.schema import key
from shardtrain.data.check import require_readable
from shardtrain.data.feed import Arrays
from shardtrain.data.preprocessing import Preprocessing, numbered
from shardtrain.job.build import completed, require_equal_groups
from shardtrain.job.model import initial_model, transport_name
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo, require_device
from shardtrain.plan import report
from shardtrain.plan.simulate import Question, simulate

FUNCTION = re.compile(r"\w+(\.\w+)+")  # a word of the command line
BROAD = ("torch", "numpy")  # of whose packages only a part can be allowed
ON_IMAGES = ("data=fake", "data.image_size=224")  # what the module of a FUNCTION gets


@dataclass(frozen=True)
class PlanKeys:
    """The planner's own keys."""

    # ranks to plan for; no process is started
    world_size: int = key(8, at_least=1, at_most=10**6)
    # images of a rank in one forward; null: what train.batch_size leaves a rank; if that is no whole number,
    # the next, at least 2
    micro_batch: int | None = key(None, at_least=1)
    # true: read every image, and list those that cannot be read
    check: bool = key(False)


@dataclass(frozen=True)
class PlanSettings:
    """The command line's settings, with the model's keys completed from the data set."""

    keys: PlanKeys
    config: Config
    device: str
    threads: int | None
    question: Question


def read(arguments: Sequence[str], speak: bool) -> PlanSettings | None:
    """Return the settings of ``arguments``; None if a flag asks for output."""
    words = list[str]()
    for text in arguments:
        words += _as_words(text, arguments)
    command = read_command(words, speak, Program(PlanKeys))
    if command is None:
        return None
    keys = command.keys
    config = command.config
    require_device(config.device)
    images = _data_set(config, config.model.get("num_classes"))
    if config.device == "auto":  # otherwise also a device that this machine does not have
        config = replace(config, device=device.ACCELERATOR if device.count() else "cpu")
    config = completed(config, images)
    question = _question(keys, config, images.preprocessing.channels)
    question = replace(question, any_module=len(words) > len(arguments))
    return PlanSettings(keys, config, "cpu", config.threads, question)


def _as_words(text: str, arguments: Sequence[str]) -> list[str]:
    """Return ``text`` as it is, or PACKAGE.FUNCTION as the words of a model that the command line allows."""
    if not FUNCTION.fullmatch(text) or {"--help", "-h"} & {*arguments}:
        return [text]
    module = text.rpartition(".")[0]
    package = text.partition(".")[0]
    allowed = module if package in BROAD else package
    names = [word.partition("=")[0] for word in arguments]
    images = [word for word in ON_IMAGES if word.partition("=")[0] not in names and "data" not in names]
    return [f"model._target_={text}", f"allow=[{allowed}]", *images]


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
    in_place = transport_name() == "shared_memory" and keys.world_size > replicate
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
    if keys.check:
        check(settings.config)
    result = simulate(settings.config, settings.question)
    print(f"{report.headline(settings.config, result)}\n\n{report.rank_table(result)}")


def check(config: Config) -> None:
    """Load `model.weights`, and read every image. Raises UserError after a list of the unreadable ones."""
    if config.model.get("weights") is not None:
        initial_model(config)
    images = data.load(config.data, config.allow)
    parts = {"train": images.train_as_val or images.train, "val": images.val, "test": images.test}
    require_readable(parts, config.data, partial(print, flush=True))


main = partial(launcher.start, read, plan)

if __name__ == "__main__":
    main()
