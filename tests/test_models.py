"""Model families, three steps each with automatic units: sharded against replicated.

On two ranks the order of summation is DistributedDataParallel's, so losses and parameters are compared bit
for bit. `tests/wild` has many more.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchvision import models

import shardtrain

from pool import each_rank
from small import assert_same_parameters, sgd, shard, train


def convnext() -> nn.Module:
    settings = [
        models.convnext.CNBlockConfig(a, b, n) for a, b, n in ((24, 40, 1), (40, 72, 2), (72, None, 1))
    ]
    return models.ConvNeXt(settings, stochastic_depth_prob=0.2, num_classes=5)


def resnet18() -> nn.Module:
    return models.resnet18(num_classes=5)


def vit() -> nn.Module:
    return models.VisionTransformer(16, 4, 3, 3, 27, 50, dropout=0.1, num_classes=5)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 * step + dist.get_rank())  # data, dropout and stochastic depth alike
    return torch.randn(4, 3, 16, 16), torch.randint(5, (4,))


@pytest.mark.parametrize("make", [convnext, resnet18, vit])
@each_rank(2, transport="auto")
def test_three_steps_equal_ddp_s(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = make()
    model = shard(copy.deepcopy(plain))
    replica = nn.parallel.DistributedDataParallel(plain)
    ours = train(model, sgd(model), 3, batch)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")  # DDP, ConvNeXt
        assert ours == train(replica, sgd(replica), 3, batch)
    assert_same_parameters(model, replica, tolerance=0)


def units_of(model: nn.Module) -> list[str]:
    with torch.device("meta"):
        return [info.name for info in shardtrain.introspect(shardtrain.shard(model)).units][1:]


def test_automatic_units_are_blocks() -> None:
    """Named after the modules that repeat, and none of them large."""

    def inside(prefix: str, *counts: int) -> list[str]:
        return [f"{prefix}{stage}.{block}" for stage, n in enumerate(counts, 1) for block in range(n)]

    def largest(model: nn.Module) -> float:
        infos = shardtrain.introspect(shardtrain.shard(model)).units[1:]
        return max(i.parameters for i in infos) / sum(p.numel() for p in model.parameters())

    with torch.device("meta"):
        assert units_of(models.resnet50()) == [*inside("layer", 3, 4, 6, 3), "fc"]
        names = units_of(models.convnext_tiny())
        assert [n for n in names if n.startswith("features.5.")] == [f"features.5.{i}" for i in range(9)]
        encoder = [f"encoder.layers.encoder_layer_{layer}" for layer in range(12)]
        assert [name for name in units_of(models.vit_b_16()) if "encoder_layer" in name] == encoder
        assert units_of(models.vgg11_bn())[-3:] == ["classifier.0", "classifier.3", "classifier.6"]
        assert {"aux1", "aux2", "inception5b", "fc"} <= set(units_of(models.googlenet(init_weights=False)))
        for name in ("efficientnet_b0", "densenet121", "swin_t", "vit_b_16", "mobilenet_v3_large"):
            assert largest(models.get_model(name)) < 0.26, name


class NoForward(nn.Module):
    """Holds layers and has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(99, 99), nn.Linear(99, 99)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.attention = NoForward(), nn.MultiheadAttention(99, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers.second(self.layers.first(x))
        return self.attention(x, x, x)[0]


def test_automatic_units_are_modules_that_are_called() -> None:
    """Not a holder without a forward; nor the projection inside an attention that never calls it."""
    model = Attends()
    assert units_of(model) == ["layers.first", "layers.second", "attention"]
