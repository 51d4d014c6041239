"""shardtrain.evaluate scores a run: on its own validation and test images, or on other ones.

  python -m shardtrain.evaluate run=outputs/NAME
  python -m shardtrain.evaluate run=outputs/NAME/best data.root=FOLDER
  torchrun --nproc-per-node 2 -m shardtrain.evaluate run=outputs/NAME data=csv data.root=FOLDER data.table=CSV
  python -m shardtrain.evaluate +recipe=resnet model.weights=FILE

The configuration is the run's own, on which the command's words build. All of other images are scored, and
prepared as the run's were: FOLDER/<class>/<image>, or val/ with such folders; a table has image and label.
The last line is the scores as JSON. It takes every key of shardtrain.train, and this one:
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardtrain import data
from shardtrain.checkpoint.loading import Opened
from shardtrain.config.command import Command, Program, read_base, read_command, require_run
from shardtrain.config.config import Config, Data
from shardtrain.config.errors import UserError
from shardtrain.config.schema import key, typed
from shardtrain.job.build import completed, load_images, rehearsed_loss, require_logits, scoring_of
from shardtrain.job.evaluation import Evaluation, evaluate
from shardtrain.job.model import converted, ema_of, initial_model, model_notes, sharded
from shardtrain.launch import launcher
from shardtrain.launch.ranks import RankInfo
from shardtrain.monitor import score_table
from shardtrain.monitor.writers import json_of
from shardtrain.train.resume import load_saved, open_saved

NAMES_IMAGES = ("data", "data.root", "data.table")
NOT_HERE = ("resume", "config", "run.name", "run.dir", "recipe")
# How images are prepared, and which classes they have.
PREPARED = ("classes", "mean", "std", "image_size", "eval_size", "resize", "interpolation")


@dataclass(frozen=True)
class EvaluateKeys:
    """The evaluation's own keys."""

    # a run directory, whose newest complete checkpoint is scored, or one of its checkpoints, as RUN/best
    run: str | None = key(None)


def read(arguments: Sequence[str], speak: bool = True) -> Command | None:
    """Return what the command scores; None if a flag asks for output."""
    command = read_command(arguments, speak, Program(EvaluateKeys, base_key="run"))
    if command is None:
        return None
    run = command.keys.run
    if run is None and command.config.model.get("weights") is None:
        raise UserError("nothing to score: name a run (run=RUN), or plain weights (model.weights=FILE)")
    for name in NOT_HERE if run is not None else ():
        if name in command.words:
            raise UserError(f"{command.words[name]}: run=RUN alone says what is scored")
    # What divides training among ranks, and only training needs.
    parallel = replace(command.config.parallel, replicate=1, offload=False)
    train = replace(command.config.train, accumulate=1, capture=False)
    config = replace(command.config, parallel=parallel, train=train)
    if run is not None and "data" in command.words:
        before = typed(Data, read_base(require_run(Path(run)), "run")["data"], "data")
        config = prepared_as(before, config, command)
    return command._replace(config=config)


def prepared_as(before: Any, config: Config, command: Command) -> Config:
    """Return ``config`` with images prepared as those of the data set ``before``, unless words say how."""
    own = {
        name: getattr(before, name)
        for name in PREPARED
        if hasattr(before, name) and hasattr(config.data, name) and f"data.{name}" not in command.words
    }
    return replace(config, data=replace(config.data, **own))


def score(command: Command, rank_info: RankInfo, device: torch.device) -> list[Evaluation]:
    """Score the run's checkpoint, or plain weights; print a table, and the scores as JSON. Collective."""
    launcher.require_same_command(command.config)
    run = command.keys.run
    opened = None if run is None else open_saved(run, "raw")
    config = command.config if opened is None else weighted_as_saved(command.config, opened)
    names_images = run is not None and any(name in command.words for name in NAMES_IMAGES)
    images = load_images(config, all_held_out=names_images)
    config = completed(config, images)
    model = initial_model(config, deferred=True, resumed=opened is not None)
    side = config.data.side_in_eval
    require_logits(model, (2, images.preprocessing.channels, side, side), len(images.classes))
    notes = [*images.notes, *model_notes(model, config.model, resumed=opened is not None)]
    model = sharded(converted(model, config, device), config, device=device)
    ema = None
    if opened is not None:
        ema = ema_of(model, config, warmup=0)
        load_saved(opened, model, ema, f"run={run}")
    loss = rehearsed_loss(config, images, 2, device)
    scoring = scoring_of(config, images, loss)
    virtual = config.virtual_ranks(rank_info.world_size)
    share = data.Share(rank_info.world_size, 1, rank_info.rank, rank_info.world_size, virtual)
    prepare = data.Prepare(images.preprocessing, images.preprocessing.image_size, device)
    parts = [part for part in (images.val, images.test) if part]
    step = 0 if opened is None else int(opened.manifest.facts["step"])
    if rank_info.rank == 0:
        where = "" if opened is None else f"evaluating step {step} ({opened.path})"
        print("\n".join(filter(None, [*notes, where])), flush=True)
    feeds = [data.EvalFeed(part, share, prepare, config.data.workers) for part in parts]
    scored = [evaluate(model, feed, scoring, ema=ema) for feed in feeds]
    if rank_info.rank == 0:
        print(f"{score_table(scored)}\n{scores_as_json(step, scored)}", flush=True)
    return scored


def weighted_as_saved(config: Config, opened: Opened) -> Config:
    """Return the configuration with the balanced class weights that the run counted."""
    # An evaluation cannot count them itself: it may score other images, and have none to train on.
    weights = opened.manifest.facts.get("class_weights")
    if config.train.class_weights != "balanced" or weights is None:
        return config
    return replace(config, train=replace(config.train, class_weights=tuple(weights)))


def scores_as_json(step: int, scored: Sequence[Evaluation]) -> str:
    """Return the scores as one line of JSON, by their TensorBoard tags."""
    val, *tests = scored
    test = tests[0].ranking("test") if tests else {}
    return json.dumps(json_of({"step": step, **val.scalars(), **test}))


main = partial(launcher.start, read, score)

if __name__ == "__main__":
    main()
