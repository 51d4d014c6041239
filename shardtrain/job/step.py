"""The training program's step by itself: what a plan simulates, and a measurement takes for real."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardtrain import clip_grad_norm_, no_sync
from shardtrain.job.build import Loss
from shardtrain.optim.ema import Ema


class Step(NamedTuple):
    """One optimizer step over micro-batches of (images, labels)."""

    model: nn.Module  # sharded
    loss: Loss
    optimizer: torch.optim.Optimizer
    max_norm: float | None
    ema: Ema | None = None

    def __call__(self, batches: Sequence[tuple[Tensor, Tensor]]) -> None:
        for index, (images, labels) in enumerate(batches):
            last = index == len(batches) - 1
            with contextlib.nullcontext() if last else no_sync(self.model):
                loss = self.loss(self.model(images), labels)
                (loss / len(batches)).backward()
        clip_grad_norm_(self.model, self.max_norm or math.inf)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(step=self.ema.every)
        self.optimizer.zero_grad()
