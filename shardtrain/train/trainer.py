"""Train a model and data of one's own from Python, as `python -m shardtrain.train` trains its own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.config.command import Command, read_command
from shardtrain.config.config import Config
from shardtrain.config.errors import UserError
from shardtrain.data import Batch
from shardtrain.job.build import Job
from shardtrain.job.given import build_given, configuration, sum_and_weight
from shardtrain.job.step import mean_of
from shardtrain.launch import launcher
from shardtrain.launch.launcher import Context
from shardtrain.monitor import Monitor, StepMetrics
from shardtrain.train.loop import Parts, train
from shardtrain.train.steps import BaseTrainer, Hook

EVENTS = ("before_fit", "after_step", "after_evaluation", "before_save", "at_end")


class Trainer(BaseTrainer):
    """A trainer of a model and data of one's own; subclasses override `loss` and `score`.

    `fit` trains, and goes on with a run of the same `run.name`. Under torchrun each rank is such a process,
    and the model begins with rank 0's values. Hooks get the trainer, which has `model`, `optimizer`, `job`
    and the other attributes of `BaseTrainer` while it trains.
    """

    def __init__(
        self, model: nn.Module, train_set: Any, val_set: Any, config: str = "", hooks: Sequence[Any] = ()
    ) -> None:
        """Hold what is trained.

        Args:
            model: called with a batch of inputs. It is sharded in place.
            train_set, val_set: ``items[i]`` are an input and its target, tensors, arrays or numbers.
            config: words of a command, as for `python -m shardtrain.train`, but for keys of model and data.
            hooks: objects with some methods of `Hook`; `after_step` at least, unless they are of a subclass.
        """
        self.model = model
        self.train_set = train_set
        self.val_set = val_set
        self._words = shlex.split(config)
        self._own_hooks = [*map(_hook_of, hooks)]

    def fit(self) -> float | None:
        """Train; return the best score, of `train.best`. Raises SystemExit as the program exits."""
        return launcher.run(self._train, self._read)

    def loss(self, outputs: Any, targets: Tensor) -> tuple[Any, Any]:
        """Return the sum of the losses, and what divides it for the mean over ranks and micro-batches.

        Cross-entropy of logits [batch, classes, …] and class numbers [batch, …].
        """
        smoothing = self.config.train.label_smoothing
        total = F.cross_entropy(outputs, targets, reduction="sum", label_smoothing=smoothing)
        return total, targets.numel()

    def score(self, outputs: Any, targets: Tensor) -> Any:
        """Return a tensor by name, whose mean over all validation targets is the score: accuracy, percent.

        ``score.higher_is_better = False`` says that the smallest mean is the best.
        """
        return {"acc1": 100.0 * (outputs.argmax(1) == targets)}

    def _read(self, arguments: Sequence[str], speak: bool) -> Command | None:
        command = read_command(self._words, speak)
        if command is None:
            return None
        if "train.label_smoothing" in command.words and type(self).loss is not Trainer.loss:
            raise UserError(
                "train.label_smoothing is of Trainer.loss, which the subclass overrides; leave it out"
            )
        return command._replace(config=configuration(command, self))

    def _train(self, config: Config, context: Context) -> float | None:
        self.config = config
        build = partial(build_given, self)
        return train(config, context, Parts(build, self._begin, self._own_hooks))

    def _begin(self, config: Config, job: Job, metrics: StepMetrics, monitor: Monitor) -> BaseTrainer:
        super().__init__(config, job, metrics, monitor)
        self._weights: list[Tensor] = []  # of the losses of this step's micro-batches
        return self

    def gradients(self, step: int, feed: Iterator[Batch], *, checked: bool = True) -> None:
        """Compute the gradients of the mean over all targets of the step. Collective.

        Micro-batches may have other weights, so each is first divided by its number of items.
        """
        self._weights.clear()
        super().gradients(step, feed, checked=checked)
        factor = self.job.train.share.micro_batch / mean_of(self._weights, self.model)
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(factor.to(param.grad.device))

    def forward_backward(self, batch: Batch, of: int = 1, *, counts: bool = True) -> Tensor:
        with self.metrics.phase("forward"):
            total, weight = sum_and_weight(self, self.model(batch.images), batch.labels)
        with self.metrics.phase("backward"):
            self.job.scaler.scale(total / (len(batch.labels) * of)).backward()  # type: ignore[no-untyped-call]
        if counts:
            self._weights.append(weight.double())
            self.metrics.add_sums(batch, total, weight)
        return total


def _hook_of(own: Any) -> Hook:
    """Return a user's object as a hook that does nothing where it has no method."""
    if isinstance(own, Hook):
        return own
    if not callable(getattr(own, "after_step", None)):
        raise UserError(f"hooks: {type(own).__name__} has no method after_step(trainer, step, finite)")
    hook = Hook()
    vars(hook).update({name: getattr(own, name) for name in EVENTS if hasattr(own, name)})
    return hook
