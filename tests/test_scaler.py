"""Loss scaling in fp16: the same decisions on all ranks, and the updates of unscaled training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain import GradScaler, Precision

from small import shard

Ranks = Callable[..., list[Any]]
FP16 = Precision(param=torch.float16, output=torch.float32)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return model(torch.randn(4, 5, generator=generator)).square().mean()


def scaled_and_not(fused: bool, clip: bool) -> None:
    """A power of two as scale changes no bit of what does not overflow."""
    ends = []
    for scale in (1.0, 2.0**10):
        model = shard(net(), units=[nn.Linear], precision=FP16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        scaler = GradScaler("cpu", init_scale=scale)
        for step in range(4):
            scaler.scale(loss_of(model, step)).backward()
            if clip:
                scaler.unscale_(optimizer)
                shardtrain.clip_grad_norm_(model, 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(shardtrain.full_state_dict(model))
    for name, value in ends[0].items():
        torch.testing.assert_close(
            ends[1][name], value, rtol=1e-3, atol=1e-5
        )  # subnormal fp16 has fewer bits


@pytest.mark.parametrize(("fused", "clip"), [(False, False), (True, False), (False, True)])
def test_scaling_changes_no_update(ranks: Ranks, fused: bool, clip: bool) -> None:
    ranks(3, scaled_and_not, fused, clip)


def overflows(fused: bool) -> list[tuple[float, bool]]:
    """The last parameter overflows in the second step; only the last of three ranks owns a part of it."""
    model = shard(net(), units=[nn.Linear], precision=FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=2)
    seen = []
    for step in range(4):
        before = shardtrain.full_state_dict(model)
        scaler.scale(loss_of(model, step)).backward()
        last = list(model.parameters())[-1]
        if step == 1 and last.grad is not None and last.grad.numel():
            last.grad[-1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = shardtrain.full_state_dict(model)
        moved = any(not torch.equal(before[name], after[name]) for name in before)
        seen.append((scaler.get_scale(), moved))
    return seen


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_a_step_that_overflows_on_one(ranks: Ranks, fused: bool) -> None:
    seen = ranks(3, overflows, fused)
    assert seen == [[(8.0, True), (4.0, False), (4.0, True), (8.0, True)]] * 3
