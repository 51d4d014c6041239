"""Build the job of a model and of data that a program gives to `shardtrain.train.Trainer`.

Its own file, since nothing in it is about images or their classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardtrain import data, torch_private
from shardtrain import device as devices
from shardtrain.config.command import Command
from shardtrain.config.config import Config, OwnData
from shardtrain.config.errors import UserError, not_valid
from shardtrain.config.target import GIVEN
from shardtrain.data.items import Pairs
from shardtrain.data.preprocessing import Preprocessing
from shardtrain.job import tags
from shardtrain.job.build import Job, length_of, name_and_sizes, seed_process, share_of, update_of
from shardtrain.job.evaluation import Scores, Scoring, evaluate, table_rows
from shardtrain.job.model import converted, shard_with_optimizer
from shardtrain.job.scores import Results

# Keys, at the values that leave them out, of what a given model and given data do not have.
LEFT_OUT: dict[str, Any] = {
    "data.limit": None,
    "data.repeats": 1,
    "data.validation": 0,
    "train.mixup": 0,
    "train.cutmix": 0,
    "train.loss": "cross_entropy",
    "train.class_weights": None,
    "train.capture": False,
}
NOT_HERE = ("model", "data", "augment", "monitor.scores")


class Given(Protocol):
    """A model, its data, and what is learned: `shardtrain.train.Trainer`."""

    model: nn.Module
    train_set: Any
    val_set: Any

    def loss(self, outputs: Any, targets: Tensor) -> tuple[Any, Any]: ...

    def score(self, outputs: Any, targets: Tensor) -> Tensor | Mapping[str, Tensor]: ...


def configuration(command: Command, given: Given) -> Config:
    """Return the configuration of ``command``, with the given model and data in place of its own.

    Raises UserError for keys that these do not have.
    """
    config = command.config
    for name, usual in LEFT_OUT.items():
        group, _, key = name.partition(".")
        value = getattr(getattr(config, group), key)
        if value != usual:
            usual_text = "null" if usual is None else str(usual).lower()
            raise UserError(
                f"{name}={value}: a Trainer's model and data are its own, without it; say {name}={usual_text}"
            )
    for name, word in command.words.items():
        if name not in (*LEFT_OUT, "data.workers") and name.startswith(NOT_HERE):
            raise UserError(f"{word}: a Trainer's model, data and scores are its own; leave the word out")
    name = type(given.model).__name__
    return replace(
        config,
        model={"_target_": GIVEN, "name": name},
        data=OwnData(name="own", _target_=GIVEN, workers=config.data.workers, keywords={}),
        augment={"_target_": None},
        monitor=replace(config.monitor, scores=()),
    )


def build_given(
    given: Given, config: Config, rank: int, world_size: int, device: torch.device, first_step: int = 0
) -> tuple[Job, Config]:
    """Return the job after ``first_step`` steps, and ``config``. Collective."""
    share = share_of(config, rank, world_size)
    if share.virtual and devices.is_accelerator(device):
        devices.choose_deterministic_kernels()
    train = Pairs(given.train_set, "the training set")
    val = Pairs(given.val_set, "the validation set", train)
    name = type(given.train_set).__name__
    pairs = data.DataSet(train, val, name, Preprocessing.of_arrays((), (), (), 0))
    length = length_of(config, pairs, share)
    model = converted(given.model, config, device)
    optimizer = shard_with_optimizer(model, config, device=device)
    prepare = data.ToDevice(device)
    workers = config.data.workers
    steps = range(first_step, length[0])
    job = Job(
        loss=partial(mean_loss, given),
        scoring=Scoring(task=TaskScores(given), is_minimised=is_minimised(given, config.train.best)),
        train=data.TrainFeed(train, share, prepare, seed=config.seed, steps=steps, workers=workers),
        val=data.EvalFeed(val, share, prepare, workers),
        test=None,
        inference=None,
        class_counts={},
        labels_digest=pairs.labels_digest,
        data_name=name_and_sizes(pairs),
        forward_flops={},
        **update_of(config, model, optimizer, device, first_step, length),
    )
    rehearse(job, val, config.train.best)
    seed_process(device, config.seed, rank, first_step)
    return job, config


def is_minimised(given: Given, best: str) -> bool:
    """Return whether the smallest value of the score ``best`` is the best one."""
    return best == tags.VAL_LOSS or not getattr(given.score, "higher_is_better", True)


def rehearse(job: Job, val: Pairs, best: str) -> None:
    """Evaluate one item, to learn the names of the scores early. Collective.

    Raises UserError if none of them is ``best``.
    """
    inputs, targets = (part.to(job.device) for part in val[[0]])
    batches = [data.Batch(inputs, targets, 1)] * len(table_rows(job.model))
    known = evaluate(job.model, batches, job.scoring).ranking()
    if best not in known:
        raise not_valid(f"train.best={best}: no such score", best, known)


def sum_and_weight(given: Given, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and what divides it for the mean: 0-dim. Raises UserError for others."""
    pair = given.loss(outputs, targets)
    kind = type(pair).__name__
    if isinstance(pair, tuple) and len(pair) == 2:
        total, weight = (torch.as_tensor(value, device=targets.device) for value in pair)
        if total.ndim == weight.ndim == 0:
            return total, weight
        kind = f"pair of tensors {[*total.shape]} and {[*weight.shape]}"
    raise UserError(
        f"Trainer.loss returned a {kind}, expected two numbers: the sum of the losses, and what divides it "
        "for the mean"
    )


def mean_loss(given: Given, outputs: Any, targets: Tensor) -> Tensor:
    total, weight = sum_and_weight(given, outputs, targets)
    return total / weight


class TaskScores:
    """The sums of a given loss and of given scores in an evaluation."""

    def __init__(self, given: Given) -> None:
        self._given = given
        self._names: list[str] = []  # of the latest scores

    def sums(self, outputs: Any, batch: data.Batch) -> Tensor:
        """Return the loss's sum and weight, and of each score its sum and count: float64 [columns]."""
        valid = batch.valid or len(batch.labels)  # an empty batch is none that users think of
        outputs = torch_private.tree_map(lambda part: part[:valid], outputs)
        targets = batch.labels[:valid]
        parts = [*sum_and_weight(self._given, outputs, targets)]
        scores = self._given.score(outputs, targets)
        if isinstance(scores, Tensor):
            scores = {"score": scores}
        self._names = [*scores]
        for name, values in scores.items():
            if values.ndim == 0:
                raise UserError(f"Trainer.score: {name} is one number, expected one of each target")
            parts += [values.double().sum(), torch.tensor(values.numel())]
        sums = torch.stack([part.to(targets.device, torch.float64) for part in parts])
        return sums if batch.valid else torch.zeros_like(sums)

    def scores_of(self, *totals: float) -> tuple[Scores, Results]:
        means = [
            total / count if count else math.nan
            for total, count in zip(totals[::2], totals[1::2], strict=True)
        ]
        numbers = dict(zip(self._names, means[1:], strict=True))
        scores = Scores(means[0], numbers.pop("acc1", None), numbers.pop("acc5", None))
        return scores, Results.nothing()._replace(numbers=numbers)
