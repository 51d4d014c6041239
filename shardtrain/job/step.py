"""One step of any sharded model, without a trainer: the planner takes `Step`, trainers its parts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import clip_grad_norm_, no_sync
from shardtrain.config.errors import reading
from shardtrain.job.evaluation import table_of, table_rows
from shardtrain.job.losses import CrossEntropy, Loss
from shardtrain.optim import Ema


def accumulate(
    model: Callable[[Tensor], Tensor],
    loss: Loss,
    batches: Sequence[Sequence[Any]],
    no_sync: Callable[[], AbstractContextManager[object]],
) -> list[tuple[Tensor, Tensor]]:
    """Accumulate the gradients of the mean loss over micro-batches; return the loss and outputs of each.

    Args:
        batches: of inputs and targets; further items are ignored.
        no_sync: a context in which backward reduces nothing; the last micro-batch runs outside it.
    """
    results = []
    for number, (inputs, targets, *_) in enumerate(batches, 1):
        with contextlib.nullcontext() if number == len(batches) else no_sync():
            outputs = model(inputs)
            value = loss(outputs, targets)
            (value / len(batches)).backward()  # type: ignore[no-untyped-call]
        results.append((value, outputs))
    return results


class Step(NamedTuple):
    """A whole step of a sharded model: gradients of some micro-batches, clipping, and the update."""

    model: nn.Module
    loss: Loss
    optimizer: torch.optim.Optimizer
    max_norm: float | None
    ema: Ema | None = None

    def __call__(self, batches: Sequence[Sequence[Any]]) -> None:
        """Run the step over ``batches``, and clear the gradients."""
        accumulate(self.model, self.loss, batches, partial(no_sync, self.model))
        clip_grad_norm_(self.model, self.max_norm or math.inf)
        with refusals_of(self.optimizer):
            self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.ema.every)
        self.optimizer.zero_grad()


def refusals_of(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """Turn a ValueError inside into a UserError: the ``optimizer`` is not right on shards."""
    kind = type(optimizer)
    name = f"optim._target_={kind.__module__}.{kind.__qualname__}"
    return reading(name, "choose another optimizer", ValueError)


def weight_of(model: nn.Module, loss: CrossEntropy, batches: Sequence[Sequence[Any]]) -> Tensor:
    """Return the weight of all images of a step, over the number of micro-batches of all ranks. Collective.

    It has the same bits on any number of ranks that compute the same virtual ranks. The mean over
    micro-batches of their sums divided by this is the weighted mean over all images.
    """
    return mean_of([loss.weight_of(labels) for _, labels, *_ in batches], model)


def mean_of(weights: Sequence[Tensor], model: nn.Module) -> Tensor:
    """Return the mean of the weights, 0-dim, of a step's micro-batches, those of all ranks. Collective."""
    rows = table_rows(model)
    table = table_of(torch.stack([*weights]).view(len(rows), -1), rows)
    return table.sum() / table.numel()
