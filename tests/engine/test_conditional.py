"""Modules that some ranks skip: gathered and reduced with the unit around them, equal to a replica's."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardtrain
from shardtrain import UnitOptions

from small import Block, assert_same_parameters, average_gradients, images, mesh, shard


class Adapted(Block):
    """A unit that holds a conditional module."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.adapter = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor, adapts: bool = False) -> Tensor:
        x = super().forward(x)
        return self.adapter(x) if adapts else x


class Towers(nn.Module):
    """Which parts run is chosen by each rank: a tower of blocks, an adapter inside a block, an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.body = Adapted(6)
        self.fc = nn.Linear(6, 5)
        self.tower = nn.Sequential(Block(6), Block(6))
        self.experts = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x: Tensor, tower: bool, adapts: bool, expert: int) -> Tensor:
        x = self.stem(x)
        x = self.body(self.tower(x) if tower else x, adapts)
        return self.experts[expert](self.fc(x.mean((2, 3))))


def conditional(model: Towers) -> list[nn.Module]:
    return [model.tower, model.body.adapter, *model.experts]


def skips(steps: int, replicate: int = 0) -> None:
    torch.manual_seed(0)
    plain = Towers()
    model = copy.deepcopy(plain)
    options: dict[str, Any] = {"units": [Block, nn.Linear], "conditional": conditional(model)}
    if replicate:
        options["mesh"] = mesh(replicate, dist.get_world_size() // replicate)
    shard(model, **options)
    assert [unit.name for unit in shardtrain.introspect(model).units] == ["(root)", "body", "fc"]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, model)]
    drawn = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        tower, adapts = (torch.rand(2, generator=drawn) < 0.5).tolist()
        expert = int(torch.randint(2, (), generator=drawn))  # never the third
        x, y = images(step)
        for net in (plain, model):
            F.cross_entropy(net(x, tower, adapts, expert), y).backward()
        average_gradients(plain)
        never = [param for param in model.experts[2].parameters() if len(param)]
        assert all(param.grad is None for param in never)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, plain, 1e-4)


@pytest.mark.parametrize(
    ("world", "replicate", "steps"),
    [
        (2, 0, 20),
        *(pytest.param(*n, 60, marks=pytest.mark.release) for n in ((2, 0), (4, 0), (4, 2))),
    ],
)
def test_ranks_skip_modules_at_random(ranks: Any, world: int, replicate: int, steps: int) -> None:
    ranks(world, skips, steps, replicate)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match=r"conditional=Linear: expected modules inside the one that is shar"):
        shardtrain.shard(nn.Linear(3, 3), conditional=[nn.Linear(3, 3)])
    model = Towers()
    with pytest.raises(ValueError, match=r"tower\.1 is a unit in units=, but inside conditional=tower"):
        shardtrain.shard(model, units={model.tower[1]: UnitOptions()}, conditional=[model.tower])
