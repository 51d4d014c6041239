"""Whole-parameter cuts: each parameter on one rank, and optimizers that need whole parameters on top."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from test_parity import adamw, mean_in_rank_order, momentum_sgd
from torch import nn

import shardtrain
from shardtrain import comm

from small import (
    Block,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    shard,
    sharded_and_replica,
    train,
)

Ranks = Callable[..., list[Any]]
every = pytest.mark.parametrize("world", [1, 2, 3, 4])
several = pytest.mark.parametrize("world", [2, 3])


def whole(**options: Any) -> dict[str, Any]:
    return {"layout": "whole", **options}


# what is shown


def shows_whole_parameters() -> list[tuple[tuple[int, ...], ...]]:
    torch.manual_seed(0)
    plain = OddNet().to(memory_format=torch.channels_last)
    model = shard(copy.deepcopy(plain), **whole(units=[Block]))
    assert_at_rest(model)
    for (name, param), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.numel() and full.ndim:
            assert param.stride() == full.stride(), name
            assert torch.equal(param, full), name
    return [tuple(param.shape) for param in model.parameters()]


@several
def test_an_owner_shows_the_parameter_and_others_show_nothing_of_it(ranks: Ranks, world: int) -> None:
    shown = ranks(world, shows_whole_parameters)
    for shapes, param in zip(zip(*shown, strict=True), OddNet().parameters(), strict=True):
        shape = tuple(param.shape) or (1,)
        assert sorted(shapes) == [(0, *shape[1:])] * (world - 1) + [shape]


@pytest.mark.parametrize(
    ("name", "world", "most"),
    [("resnet50", 8, 1.01), ("resnet50", 64, 5.91), ("vit_b_16", 8, 1.04), ("vit_b_16", 64, 1.75)],
)
def test_balance_of_known_models(name: str, world: int, most: float) -> None:
    """README's figures: the most of any rank, over total / world. At 64 ranks that is the largest parameter."""
    with torch.device("meta"):
        model = getattr(torchvision.models, name)()
    share = sum(param.numel() for param in model.parameters()) / world
    shardtrain.shard(model, layout="whole", transport=comm.Simulated(0, world))
    held = shardtrain.held_by_rank(model)
    assert max(held) / (4 * share) == pytest.approx(most, abs=0.005)
    infos = shardtrain.describe(model)
    assert sum(info.local_bytes for info in infos) == held[0]
    assert all(info.local_bytes <= info.most_bytes <= info.bytes + 16 for info in infos)


# the same results as with even cuts


def like_ddp_bit_for_bit(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    sharded, replica = sharded_and_replica(**whole())
    replica.register_comm_hook(None, mean_in_rank_order)
    expected = train(replica, optimizer(replica))
    assert train(sharded, optimizer(sharded)) == expected
    assert_same_parameters(sharded, replica, tolerance=0.0)


@every
@pytest.mark.parametrize("optimizer", [momentum_sgd, adamw])
def test_losses_are_ddp_s_bit_for_bit(ranks: Ranks, world: int, optimizer: Any) -> None:
    ranks(world, like_ddp_bit_for_bit, optimizer)
