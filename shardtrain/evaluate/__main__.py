"""Score a run, alone or under torchrun.

    python -m shardtrain.evaluate run=outputs/NAME data.root=FOLDER

The configuration is the run's own, with the command's words laid over it: an evaluation of the training
program, `eval_only=true resume=RUN`. If the words name other images, all of these are scored, and the data
set needs no training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from shardtrain.job import launch
from shardtrain.job.config import Config
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import DESCRIBING, compose, key_of
from shardtrain.job.launch import Context
from shardtrain.job.read import read_config
from shardtrain.job.record import require_record
from shardtrain.job.schema import checked
from shardtrain.train.loop import train

NAMES_IMAGES = ("data", "data.root", "data.table")
NOT_HERE = ("resume", "config", "eval_only", "dry_run", "run.name", "run.dir")


@dataclass(frozen=True)
class EvaluateKeys:
    """`config.yaml` explains every key."""

    run: str


@dataclass(frozen=True)
class Evaluation:
    """Hold the run's configuration with the command's words laid over it."""

    config: Config
    device: str
    threads: int | None
    names_images: bool  # the command names other images than the run's, which are all scored


def read(arguments: Sequence[str], speak: bool) -> Evaluation | None:
    """Return what the command scores; None if a flag asks for output."""
    own = [text for text in arguments if key_of(text) == "run" or text in DESCRIBING]
    keys = compose(own, speak=speak, folder=Path(__file__).parent / "configs")
    if keys is None:
        return None
    run = require_record(checked(keys, EvaluateKeys).run)
    words = [text for text in arguments if text not in own]
    for word in words:
        if key_of(word) in NOT_HERE:
            raise UserError(f"{word}: run=RUN alone says what is scored")
    config = read_config(["eval_only=true", f"resume={run}", *words], speak)
    names_images = any(key_of(word) in NAMES_IMAGES for word in words)
    if config is None:
        return None
    return Evaluation(config, config.device, config.threads, names_images)


def evaluate(evaluation: Evaluation, rank_info: RankInfo, device: torch.device) -> None:
    """Score the run's checkpoint; print a table, and the scores as JSON in the last line. Collective."""
    config = evaluation.config
    launch.require_same_command(config)
    run_dir = launch.run_dir(config, rank_info)
    train(config, Context(rank_info, device, run_dir, all_held_out=evaluation.names_images))


main = partial(launch.start, read, evaluate)

if __name__ == "__main__":
    main()
