"""Gradients of several micro-batches in fp16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shardtrain
from shardtrain import Precision

from small import images, shard

Ranks = Callable[..., list[Any]]


def accumulates() -> None:
    """fp16 gradients of micro-batches are added up in the dtype of the reduction, here fp32."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(75, 9), nn.Tanh(), nn.Linear(9, 5))
    low = [param.detach().half().requires_grad_() for param in plain.parameters()]
    model = shard(plain, units=[nn.Linear], precision=Precision(torch.float16, torch.float32, torch.float32))
    total = [torch.zeros(param.shape) for param in low]
    for micro in range(3):
        x, y = images(micro)
        hidden = torch.tanh(F.linear(x.half().flatten(1), low[0], low[1]))
        loss = F.cross_entropy(F.linear(hidden, low[2], low[3]).float(), y)
        for into, grad in zip(total, torch.autograd.grad(loss, low), strict=True):
            into.add_(grad)
        if micro < 2:
            with shardtrain.no_sync(model):
                F.cross_entropy(model(x), y).backward()
        else:
            F.cross_entropy(model(x), y).backward()
    with shardtrain.unsharded(model, grads=True):
        for param, expected in zip(model.parameters(), total, strict=True):
            torch.distributed.all_reduce(expected)
            assert torch.equal(param.grad, expected / torch.distributed.get_world_size())


def test_accumulation_adds_up_in_the_dtype_of_the_reduction(ranks: Ranks) -> None:
    for world in (1, 2):
        ranks(world, accumulates)
