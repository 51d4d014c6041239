"""Large worlds in one process: torch's fake process group, whose collectives move nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtrain
from shardtrain import comm
from shardtrain.engine.shard import ALIGN_BYTES
from shardtrain.layout import Policy

from small import OddNet, sgd


@pytest.fixture(params=[(0, 8), (5, 8), (1023, 1024)], ids=str)
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    rank, world = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    yield world
    dist.destroy_process_group()


@pytest.mark.parametrize("layout", ["even", "whole"])
def test_a_step_runs_in_a_simulated_world(world: int, layout: Policy) -> None:
    """Whole parameters have uneven intervals, most of them empty, and move by other collectives."""
    model = shardtrain.shard(
        OddNet(), units=lambda name, _: name.startswith("blocks.") and name.count(".") == 1, layout=layout
    )
    optimizer = sgd(model)
    for _ in range(2):
        with comm.meter() as meter:
            model(torch.randn(2, 3, 5, 5)).sum().backward()
        shardtrain.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert meter.calls == {"all_gather": 5, "reduce_scatter": 3}
    assert list(shardtrain.full_state_dict(model)) == list(OddNet().state_dict())
    shardtrain.load_full_state_dict(model, OddNet().state_dict())


def test_a_step_with_replicas_runs_in_a_simulated_world(world: int) -> None:
    mesh = init_device_mesh("cpu", (world // 4, 4))
    model = shardtrain.shard(OddNet(), units=[], mesh=mesh)
    interval = model.fc.weight.untyped_storage().nbytes()  # type: ignore[union-attr,operator]
    with comm.meter() as meter:
        model(torch.randn(2, 3, 5, 5)).sum().backward()
    assert meter.calls == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    assert meter.bytes["all_reduce"] == 2 * interval * (world // 4 - 1) // (world // 4)
    assert meter.bytes["reduce_scatter"] == 3 * interval


def test_resnet50_wastes_less_than_one_alignment_unit_per_unit(world: int) -> None:
    with torch.device("meta"):
        model = shardtrain.shard(torchvision.models.resnet50())
    infos = shardtrain.introspect(model).units
    for info in infos:
        assert info.bytes / world <= info.local_bytes < info.bytes / world + ALIGN_BYTES
    assert sum(i.local_bytes for i in infos) * world < 1.01 * sum(i.bytes for i in infos)


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_parameter_that_gets_no_gradient_can_be_planned() -> None:
    """Nobody can be asked whether another rank has one, and what is lacking here has no values to look at."""
    with FakeTensorMode():
        model = shardtrain.shard(HalfUsed(), units=(), transport=comm.Simulated(2, 3))
        model(torch.randn(2, 7)).sum().backward()
        got = {name for name, param in model.named_parameters() if param.grad is not None}
    assert got == {"used.weight", "used.bias"}  # an empty piece has an empty gradient
