"""The device paths on a simulated device: order of streams, memory, launches and waits of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision.models import VisionTransformer

import shardtrain
from shardtrain import Precision

from simulated_device import DEVICE, SimulatedDevice
from small import Block, OddNet, images

WORLD, RANK = 8, 2
LOW = Precision(torch.bfloat16)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A simulated device, which rank 2 of 8 has."""
    with SimulatedDevice()(monkeypatch) as simulated:
        dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=RANK, world_size=WORLD)
        try:
            yield simulated
        finally:
            dist.destroy_process_group()


def train(
    device: SimulatedDevice, model: nn.Module, count: int = 4, size: int = 5, dtype: torch.dtype | None = None
) -> None:
    """Take ``count`` steps, the last of which ``device`` has counted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(count):
        x, y = [each.to(DEVICE) for each in images(step, 0, 4, size)]
        device.next_step()
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_has_no_races(device: SimulatedDevice) -> None:
    model = shardtrain.shard(OddNet().to(DEVICE), units=[Block])
    train(device, model)
    assert not device.findings
    assert not device.waits


def resnet50() -> nn.Module:
    return torchvision.models.resnet50(num_classes=5)


def vit24() -> nn.Module:
    return VisionTransformer(32, 8, 24, 2, 32, 64, num_classes=5)


def in_bf16(model: nn.Module) -> nn.Module:
    """Compute in bf16 and normalise in fp32, as the sharded model does."""
    for module in model.bfloat16().modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            module.register_forward_hook(lambda *args: args[2].bfloat16())
    return model


@pytest.mark.parametrize(
    ("make", "plain", "precision", "dtype", "budget"),
    [
        (resnet50, lambda model: model, None, torch.float32, 268),
        (vit24, in_bf16, LOW, torch.bfloat16, 653),
    ],
    ids=["resnet50 fp32", "vit24 bf16"],
)
def test_launches_beyond_the_plain_model_keep_their_budget(
    device: SimulatedDevice,
    make: Callable[[], nn.Module],
    plain: Callable[[nn.Module], nn.Module],
    precision: Precision | None,
    dtype: torch.dtype,
    budget: int,
) -> None:
    """Kernels, copies and collectives of one rank of eight; FSDP2's figures are 133 and 249."""
    train(device, plain(make()).to(DEVICE), 3, 32, dtype)
    alone = device.launches
    train(device, shardtrain.shard(make().to(DEVICE), precision=precision), 3, 32, torch.float32)
    assert not device.waits
    more: dict[str, Any] = device.launches - alone
    assert device.launches.total() - alone.total() <= budget, more
