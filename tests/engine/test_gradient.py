"""Gradients that wait under `no_sync`: autograd adds to them in place."""

import contextlib

import pytest
import torch
from torch import nn

import shardtrain

from pool import each_rank
from small import like_a_replica


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) / 3)
        self.late = nn.Parameter(torch.ones(5))  # used by a later call alone

    def forward(self, x: torch.Tensor, is_late: bool = False) -> torch.Tensor:
        return x @ self.weight + (self.late if is_late else 0.0)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unit = Late()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unit(self.unit(x), is_late=True)  # type: ignore[no-any-return]


@each_rank(2)
@pytest.mark.parametrize("reduced", [torch.float32, torch.float64])  # to fp64 autograd cannot add
def test_three_micro_batches_are_summed_where_a_unit_is_opened_twice(reduced: torch.dtype) -> None:
    def step(net: nn.Module, number: int) -> None:
        is_sharded = hasattr(net, "_shardtrain_engine")
        for micro in range(3):
            x = torch.full((2, 5), 0.1 * (3 * number + micro + 1))
            with shardtrain.no_sync(net) if is_sharded and micro < 2 else contextlib.nullcontext():
                net(x).square().mean().backward()

    like_a_replica(Twice, step, units=[Late], precision=shardtrain.Precision(reduce=reduced))
