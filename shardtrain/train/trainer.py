"""Train a model and data of one's own from Python, as `python -m shardtrain.train` trains its own."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain import comm, data, torch_private
from shardtrain import device as devices
from shardtrain.config.command import Command, read_command
from shardtrain.config.config import Config, OwnData
from shardtrain.config.errors import UserError, not_valid, reading
from shardtrain.config.target import GIVEN
from shardtrain.data.items import Pairs
from shardtrain.data.preprocessing import Preprocessing
from shardtrain.job import tags
from shardtrain.job.build import Job, length_of, name_and_sizes, share_of, update_of
from shardtrain.job.evaluation import Scores, Scoring, evaluate, table_rows
from shardtrain.job.model import converted, shard_with_optimizer
from shardtrain.job.scores import Results
from shardtrain.job.step import mean_of
from shardtrain.launch import launcher
from shardtrain.launch.launcher import Context
from shardtrain.launch.signals import restored
from shardtrain.monitor import Monitor, StepMetrics
from shardtrain.train.loop import Parts, train
from shardtrain.train.steps import BaseTrainer, Hook

EVENTS = [name for name in vars(Hook) if not name.startswith("_")]
# Keys of what images have, at the values that leave them out, and groups of which nothing is taken.
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
Words = str | Sequence[str]
NOT_HERE = ("model", "data", "augment", "monitor.scores")


class Trainer(BaseTrainer):
    """A trainer of a model and data of one's own; subclasses override `loss` and `score`.

    `fit` trains, and goes on with a run of the same `run.name`. Under torchrun each rank is such a process,
    and the model begins with rank 0's values. Hooks get the trainer, which has `model`, `optimizer`, `job`
    and the other attributes of `BaseTrainer` while it trains.
    """

    def __init__(
        self, model: nn.Module, train_set: Any, val_set: Any, config: Words = "", hooks: Sequence[Any] = ()
    ) -> None:
        """Set what `fit` trains, and how.

        Args:
            model: called with a batch of inputs. It is sharded in place.
            train_set, val_set: ``items[i]`` are an input and its target, tensors, arrays or numbers. All
                ranks have the same.
            config: words of a command, a text or a list, as for `python -m shardtrain.train`, but for keys of
                model and data.
            hooks: objects with some methods of `Hook`; `after_step` at least, unless they are of a subclass.
        """
        self.model = model
        self.train_set = train_set
        self.val_set = val_set
        self._words = config
        self._own_hooks = [*map(_hook_of, hooks)]
        self._names: list[str] = []  # of the latest scores
        self._weights: list[Tensor] = []  # of the losses of this step's micro-batches

    def fit(self) -> float | None:
        """Train; return the best score, of `train.best`. Raises SystemExit as the program exits."""
        with restored():
            return launcher.run(self._train, self._read)

    def loss(self, outputs: Any, targets: Tensor) -> tuple[Any, Any]:
        """Return the sum of the losses, and what divides it for the mean over ranks and micro-batches.

        Cross-entropy of logits [batch, classes, …] and class numbers [batch, …].
        """
        if targets.dtype != torch.int64:
            raise UserError(f"targets are {targets.dtype}, cross entropy needs int64: override Trainer.loss")
        smoothing = self.config.train.label_smoothing
        total = F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)
        return total, targets.numel()

    def score(self, outputs: Any, targets: Tensor) -> Any:
        """Return a tensor by name, whose mean over all validation targets is the score: accuracy, percent.

        There is none of targets that are no class numbers. ``score.higher_is_better = False`` says that the
        smallest mean is the best.
        """
        if targets.is_floating_point():
            return {}
        return {"acc1": 100.0 * (outputs.argmax(1) == targets)}

    def _read(self, arguments: Sequence[str], speak: bool) -> Command | None:
        words = self._words
        with reading(f"a Trainer's words {words!r}", "close the quotation mark", ValueError):
            words = shlex.split(words) if isinstance(words, str) else [*words]
        command = read_command(words, speak)
        return command and command._replace(config=configuration(command, type(self.model).__name__))

    def _train(self, config: Config, context: Context) -> float | None:
        if hasattr(self, "config"):
            raise UserError("Trainer.fit: the model is trained already; make another Trainer and model")
        self.config = config
        return train(config, context, Parts(self._build, self._begin, self._own_hooks))

    def _build(
        self, config: Config, rank: int, world_size: int, device: torch.device, first_step: int
    ) -> tuple[Job, Config]:
        """Return the job after ``first_step`` steps, and ``config``. Collective."""
        share = share_of(config, rank, world_size)
        train = Pairs(self.train_set, "the training set")
        val = Pairs(self.val_set, "the validation set", train)
        labels = {"train": _same_on_all(train), "val": _same_on_all(val)}
        name = type(self.train_set).__name__
        pairs = data.DataSet(train, val, name, Preprocessing.of_arrays((), (), (), 0))
        length = length_of(config, pairs, share)
        optimizer = shard_with_optimizer(converted(self.model, config, device), config, device=device)
        feed = partial(data.TrainFeed, train, share, data.ToDevice(device), workers=config.data.workers)
        is_minimised = not getattr(self.score, "higher_is_better", True)
        job = Job(
            loss=self.loss,  # type: ignore[arg-type]  # what else uses it is refused
            scoring=Scoring(task=self, is_minimised=is_minimised or config.train.best == tags.VAL_LOSS),
            train=feed(seed=config.seed, steps=range(first_step, length[0])),
            val=data.EvalFeed(val, share, data.ToDevice(device), config.data.workers),
            test=None,
            inference=None,
            class_counts={},
            labels=labels,
            data_name=name_and_sizes(pairs),
            **update_of(config, self.model, optimizer, device, first_step, length),
        )
        self._rehearse(job, val, config.train.best)
        return job, config

    def _rehearse(self, job: Job, val: Pairs, best: str) -> None:
        """Evaluate an item twice, to find mistakes early; UserError if no score is ``best``. Collective."""
        # Of one item alone scores of a wrong shape have as many numbers as those of a right one.
        inputs, targets = (part.to(job.device) for part in val[[0, 0]])
        batches = [data.Batch(inputs, targets, 2)] * len(table_rows(job.model))
        known = evaluate(job.model, batches, job.scoring).ranking()
        if best not in known:
            raise not_valid(f"train.best={best}: no such score", best, known)

    def _begin(self, config: Config, job: Job, metrics: StepMetrics, monitor: Monitor) -> BaseTrainer:
        super().__init__(config, job, metrics, monitor)
        return self

    def gradients(self, step: int, feed: Iterator[data.Batch], *, checked: bool = True) -> None:
        """Compute the gradients of the mean over all targets of the step. Collective."""
        self._weights.clear()
        super().gradients(step, feed, checked=checked)
        mean = mean_of(self._weights, self.model)
        if not devices.is_accelerator(self.job.device) and not mean > 0:  # elsewhere the host would wait
            raise UserError(f"Trainer.loss: what divides the sum is {mean} in step {step}, expected > 0")
        # Each micro-batch was divided by its number of items, not by its weight.
        factor = self.job.train.share.micro_batch / mean
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))

    def forward_backward(self, batch: data.Batch, of: int = 1, *, counts: bool = True) -> Tensor:
        with self.metrics.phase("forward"):
            total, weight = self._sum_and_weight(self.model(batch.images), batch.labels)
        with self.metrics.phase("backward"):
            self.job.scaler.scale(total / (len(batch.labels) * of)).backward()  # type: ignore[no-untyped-call]
        if counts:
            self._weights.append(weight.double())
            self.metrics.add_sums(batch, total, weight)
        return total

    def _sum_and_weight(self, outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `loss` returns: 0-dim. Raises UserError for anything else."""
        pair = self.loss(outputs, targets)
        kind = type(pair).__name__
        if isinstance(pair, tuple) and len(pair) == 2:
            total, weight = (_numbers(value, "Trainer.loss").to(targets.device) for value in pair)
            if total.ndim == weight.ndim == 0:
                return total, weight
            kind = f"pair of tensors {[*total.shape]} and {[*weight.shape]}"
        raise UserError(f"Trainer.loss returned a {kind}, expected two numbers: sum, and what divides it")

    def sums(self, outputs: Any, batch: data.Batch) -> Tensor:
        """Return the loss's sum and weight, and of each score its sum and count: float64 [columns]."""
        valid = batch.valid or len(batch.labels)  # an empty batch is none that users think of
        outputs = torch_private.tree_map(partial(_first, valid, len(batch.labels)), outputs)
        targets = batch.labels[:valid]
        parts = [*self._sum_and_weight(outputs, targets)]
        scores = self.score(outputs, targets)
        if not isinstance(scores, Mapping):
            raise UserError(f"Trainer.score returned a {type(scores).__name__}, expected tensors by name")
        for name, score in scores.items():
            values = _numbers(score, f"Trainer.score: {name}")
            if values.ndim == 0 or values.numel() > targets.numel():
                raise UserError(
                    f"Trainer.score: {name} is a tensor {[*values.shape]} of targets {[*targets.shape]}, "
                    "expected one number of each target"
                )
            parts += [values.double().sum(), torch.tensor(values.numel())]
        self._names = [*scores]
        sums = torch.stack([part.to(targets.device, torch.float64) for part in parts])
        return sums if batch.valid else torch.zeros_like(sums)

    def scores_of(self, *totals: float) -> tuple[Scores, Results]:
        """Return the means of `sums` over all targets."""
        if totals[1] < 0:
            raise UserError(f"Trainer.loss: what divides the sum is {totals[1]} of all targets, expected > 0")
        pairs = zip(totals[::2], totals[1::2], strict=True)
        loss, *means = (total / count if count else math.nan for total, count in pairs)
        numbers = dict(zip(self._names, means, strict=True))
        scores = Scores(loss, numbers.pop("acc1", None), numbers.pop("acc5", None))
        return scores, Results.nothing()._replace(numbers=numbers)


def configuration(command: Command, model: str) -> Config:
    """Return the configuration of ``command``, with a given model and given data in place of its own.

    ``model``: the name of its class. Raises UserError for keys that these do not have.
    """
    config = command.config
    for name, usual in LEFT_OUT.items():
        group, _, key = name.partition(".")
        value = getattr(getattr(config, group), key)
        if value != usual:
            said = "null" if usual is None else str(usual).lower()
            raise UserError(f"{name}={value}: a Trainer's model and data are its own; say {name}={said}")
    for name, word in command.words.items():
        if name not in (*LEFT_OUT, "data.workers") and name.startswith(NOT_HERE):
            raise UserError(f"{word}: a Trainer's model, data and scores are its own; leave the word out")
    return replace(
        config,
        model={"_target_": GIVEN, "name": model},
        data=OwnData(name="own", _target_=GIVEN, workers=config.data.workers, keywords={}),
        augment={"_target_": None},
        monitor=replace(config.monitor, scores=()),
    )


def _same_on_all(part: Pairs) -> str:
    """Return the summary of a data set. Raises UserError on all ranks if it differs. Collective."""
    summary = part.summary()
    with reading("Trainer", "make it alike on all, e.g. by a seed", ValueError):
        comm.require_same([summary], part.name, comm.plain_transport())
    return summary


def _first(valid: int, count: int, part: Any) -> Any:
    """Return the ``valid`` first rows of a part of the outputs, if it has one for each of ``count`` items."""
    is_of_items = isinstance(part, Tensor) and part.ndim > 0 and len(part) == count
    return part[:valid] if is_of_items else part


def _numbers(value: Any, whose: str) -> Tensor:
    """Return what a user's method returned as a tensor. Raises UserError if it is none."""
    with reading(whose, "expected numbers"):
        return torch.as_tensor(value)


def _hook_of(own: Any) -> Hook:
    """Return a user's object as a hook that does nothing where it has no method."""
    if isinstance(own, Hook):
        return own
    if not callable(getattr(own, "after_step", None)):
        raise UserError(f"hooks: {type(own).__name__} has no method after_step(trainer, step, finite)")
    hook = Hook()
    vars(hook).update({name: getattr(own, name) for name in EVENTS if hasattr(own, name)})
    return hook
