"""The sharded step against replicas: DistributedDataParallel, and the naive twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch.nn import functional as F

from naive_twin import NaiveTwin
from pool import each_rank
from small import OddNet, assert_same_parameters, images, sgd, shard, sharded_and_replica, train

Optimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


def small_resnet18() -> torch.nn.Module:
    return torchvision.models.resnet18(num_classes=5)


def resnet_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return images(step, n=4, size=32)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, foreach=True)


def momentum_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def mean_of_means(group: int):  # type: ignore[no-untyped-def]
    """Average as DDP, summed in the engine's order, so that fp32 results can be compared exactly.

    First inside shard groups of ``group`` ranks in rank order, then across them.
    """

    def mean(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for part in parts[1:]:
            total.add_(part)
        return total.div_(len(parts))

    def hook(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are strings
        own = bucket.buffer()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        means = [mean(parts[first : first + group]) for first in range(0, len(parts), group)]
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(mean(means))
        return future

    return hook


mean_in_rank_order = mean_of_means(1)


@pytest.mark.parametrize(
    ("optimizer", "steps"), [(momentum_sgd, 2), pytest.param(adamw, 10, marks=pytest.mark.long)]
)
@each_rank(2, transport="auto")
def test_resnet18_equals_ddp_bit_for_bit_and_again(optimizer: Optimizer, steps: int) -> None:
    sharded, replica = sharded_and_replica(small_resnet18, units=None)
    again = shard(copy.deepcopy(replica.module))
    replica.register_comm_hook(None, mean_in_rank_order)
    expected = train(replica, optimizer(replica), steps, resnet_batch)
    for model in (sharded, again):
        assert train(model, optimizer(model), steps, resnet_batch) == expected
        assert_same_parameters(model, replica, tolerance=0)


@each_rank(1, 3)
def test_the_engine_does_what_the_naive_twin_does() -> None:
    torch.manual_seed(0)
    model = OddNet()
    twin = NaiveTwin(copy.deepcopy(model), lr=0.05, momentum=0.9)
    sharded = shard(model, units=lambda name, module: name.startswith("blocks."))
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05, momentum=0.9)
    losses = train(sharded, optimizer, 6)
    for step, loss in enumerate(losses):
        x, y = images(step)
        assert twin.step(lambda m, x=x, y=y: F.cross_entropy(m(x), y)) == pytest.approx(loss, rel=1e-5)
    twin.gather()
    assert_same_parameters(sharded, twin.model)


def _nested(name: str, _: torch.nn.Module) -> bool:
    return name in ("blocks", "blocks.0", "blocks.1.conv", "fc")


def _leaves(_: str, module: torch.nn.Module) -> bool:
    return next(module.children(), None) is None


OPTIONS: dict[str, dict[str, Any]] = {
    "everything in the root": {"units": []},
    "kept between forward and backward": {"reshard_after_forward": False},
    "nested units": {"units": _nested},
    "every leaf": {"units": _leaves},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@each_rank(3)
def test_unit_boundaries_do_not_change_the_result(options: dict[str, Any]) -> None:
    sharded, replica = sharded_and_replica(**options)
    expected = train(replica, sgd(replica))
    assert train(sharded, sgd(sharded)) == pytest.approx(expected, rel=1e-5)
    assert_same_parameters(sharded, replica)
