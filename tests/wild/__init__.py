"""Models and loops of well-known packages, as people write them, against a replica averaged by hand.

They need ``pip install -e ".[wild]"``. Models come from configurations: nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain

from small import average_gradients, shard

PACKAGES = ["transformers", "accelerate", "timm", "peft", "torchmetrics"]
MISSING = [name for name in PACKAGES if find_spec(name) is None]
MARKS = [
    pytest.mark.long,
    pytest.mark.timeout(120),
    pytest.mark.skipif(bool(MISSING), reason=f'pip install -e ".[wild]": {", ".join(MISSING)} missing'),
]

Wrap = Callable[[nn.Module], Any]
Sync = Callable[[nn.Module], None]
Loop = Callable[[Wrap, Sync], list[Any]]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def seed(step: int) -> None:
    """Seed what this rank draws in this step: its batch, its dropout masks."""
    torch.manual_seed(1000 * step + dist.get_rank())
    np.random.seed(1000 * step + dist.get_rank())  # timm's mixup


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, sync: Sync, model: nn.Module) -> None:
    optimizer.zero_grad()
    loss.backward()
    sync(model)
    optimizer.step()


def train(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    sync: Sync,
    steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[], object] = lambda: None,
) -> list[Any]:
    """Return the model after some steps, and its losses; ``after`` runs after each."""
    optimizer, losses = optimizer or adamw(model), []
    for step in range(steps):
        seed(step)
        losses.append(loss())
        update(optimizer, losses[-1], sync, model)
        after()
    assert losses[-1] != losses[0], "nothing was learnt"
    return [model, torch.stack(losses).detach()]


def nothing(model: nn.Module) -> None:
    """Average nothing: a sharded model's gradients are means."""


def run(loop: Loop, wrap: Wrap, sync: Sync) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the packages' own
        warnings.filterwarnings("error", message=".* cannot be tried on pieces")
        torch.manual_seed(0)
        return loop(wrap, sync)


def require_as_replicas(loop: Loop, tolerance: float = 0.0) -> None:
    """Run ``loop`` with replicas averaged by hand, and sharded over each transport; require equal results.

    ``loop`` takes what wraps a model and what runs after its backward, and returns models and values. Of
    models, parameters and buffers are compared: those of this rank, that is, of its batches.
    """
    replicas = run(loop, lambda model: model, average_gradients)
    for transport in ("process_group", "shared_memory"):
        models = run(loop, partial(shard, transport=transport), nothing)
        for model, replica in zip(models, replicas, strict=True):
            ours, theirs = (
                ({"": model}, {"": replica})
                if isinstance(model, torch.Tensor)
                else (
                    {**shardtrain.full_state_dict(model), **dict(model.named_buffers())},
                    dict(chain(replica.named_parameters(), replica.named_buffers())),
                )
            )
            torch.testing.assert_close(
                {name: ours[name].detach() for name in theirs}, theirs, rtol=tolerance, atol=tolerance
            )
