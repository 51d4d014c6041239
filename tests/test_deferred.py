"""Deferred models: initial values are those of the plain constructor on rank 0; other ranks hold little."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchvision.models.convnext import CNBlockConfig

import shardtrain
from shardtrain import comm
from shardtrain.engine.deferred_init import deferred

from pool import each_rank
from small import Block, OddNet, assert_same_parameters, shard, train

Ranks = Callable[..., list[Any]]


def small_convnext() -> nn.Module:
    blocks = [CNBlockConfig(15, 21, 2), CNBlockConfig(21, None, 1)]
    return torchvision.models.ConvNeXt(blocks, stochastic_depth_prob=0.1, num_classes=7)


class Usual(nn.Module):
    """What constructors do without looking at values: clones, ties, dtypes, strides, in-place changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(40, 50), std=1.0, a=-1.5, b=1.5))
        self.orthogonal = nn.Linear(31, 17)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
        self.clones = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(6, 2, 10), num_layers=2, enable_nested_tensor=False
        )
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.randn(9, 5, generator=own))
        self.embedding = nn.Embedding(11, 3, padding_idx=2)
        self.tied = nn.Linear(3, 11, bias=False)
        self.tied.weight = self.embedding.weight
        self.wide = nn.Linear(3, 5).double()
        self.register_buffer("table", torch.eye(4)[torch.randperm(4)])
        self.register_buffer("hidden", torch.rand(3), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("hidden", self.hidden, persistent=False)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.last = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        with torch.no_grad():
            self.last.weight.mul_(2).add_(self.wide.weight.mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class NeedsValues(nn.Module):
    """Looks at a value, or keeps a plain tensor."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 3)
        if which == "item":
            self.rates = torch.linspace(0, 0.1, 3).tolist()
        else:
            self.plain = [torch.arange(5.0) * 2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def on_every_rank(make: Callable[..., nn.Module], args: tuple[Any, ...], without_values: bool) -> None:
    """Ranks have other seeds: rank 0's values count, as without `deferred`."""
    torch.manual_seed(7)
    expected, after = make(*args), torch.rand(3)
    torch.manual_seed(7 + dist.get_rank())
    before = torch.get_rng_state()
    model = deferred(make, *args)
    params = dict(model.named_parameters())
    if dist.get_rank() == 0:
        assert torch.equal(torch.rand(3), after)
    else:
        assert all(param.is_meta == without_values for param in params.values())
        assert torch.equal(torch.get_rng_state(), before) == without_values
    model = shard(model, units=None)
    assert all(params[name] is param for name, param in model.named_parameters())
    assert_same_parameters(model, expected, tolerance=0)
    whole = shardtrain.full_state_dict(model)
    assert list(whole) == list(expected.state_dict())
    for name, value in expected.state_dict().items():
        assert (whole[name].dtype, whole[name].stride()) == (value.dtype, value.stride()), name
    for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    if isinstance(model, NeedsValues) and hasattr(model, "plain"):
        assert torch.equal(model.plain[0], torch.arange(5.0) * 2)
    elif isinstance(model, Usual):
        assert model.again.hidden is model.hidden


@pytest.mark.parametrize("world", [1, 3, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("make", [small_convnext, Usual])
def test_values_are_those_of_the_constructor_on_rank_0(
    ranks: Ranks, world: int, make: Callable[[], nn.Module]
) -> None:
    ranks(world, on_every_rank, make, (), True)


@pytest.mark.parametrize("which", ["item", "plain tensor"])
def test_a_constructor_that_needs_values_runs_everywhere(on_ranks: Ranks, which: str) -> None:
    on_ranks(2, on_every_rank, NeedsValues, (which,), False)


@each_rank(2, transport="auto")
def test_a_mistake_in_the_constructor_is_raised_on_every_rank() -> None:
    with pytest.raises(TypeError, match="argument"):
        deferred(OddNet, 1, 2, 3)


@each_rank(2)
def test_an_optimizer_built_before_and_ignored_parameters() -> None:
    """With an optimizer built before, and parameters and buffers of an ignored module; seeds differ."""
    torch.manual_seed(1 + dist.get_rank())
    meta = deferred(lambda: OddNet().to(memory_format=torch.channels_last))
    groups = [{"params": [param], "lr": 0.05} for param in meta.parameters()]
    model = shard(meta, units=[Block], ignored=[meta.fc, meta.blocks[1]])
    torch.manual_seed(1)
    ignoring = OddNet().to(memory_format=torch.channels_last)
    ignoring = shard(ignoring, units=[Block], ignored=[ignoring.fc, ignoring.blocks[1]])
    optimizer = torch.optim.SGD(ignoring.parameters(), lr=0.05)
    assert train(model, torch.optim.SGD(groups)) == train(ignoring, optimizer)
    for ours, theirs in zip(model.parameters(), ignoring.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@each_rank(2, transport="auto")
def test_conversions_copies_and_wrappers_after_deferring() -> None:
    torch.manual_seed(2)
    expected = nn.Sequential(OddNet(), nn.Linear(5, 3))
    expected = expected.to(memory_format=torch.channels_last).double()
    torch.manual_seed(2)
    model = nn.Sequential(deferred(OddNet), nn.Linear(5, 3))
    model = copy.deepcopy(model).to(memory_format=torch.channels_last).double()
    assert model[0].fc.weight.is_meta == (dist.get_rank() > 0)
    assert_same_parameters(shard(model, units=[Block]), expected, tolerance=0)


@each_rank(3, transport="auto")
def test_a_mesh_without_rank_0_is_refused() -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    model = deferred(OddNet)
    if dist.get_rank():
        with pytest.raises(ValueError, match=r"deferred\(\) built the values on rank 0.*not in the mesh"):
            shard(model, mesh=mesh)
    dist.barrier()  # rank 0 stays while the others connect


class Counter(TorchDispatchMode):
    """The most bytes of living tensors at once, of those made while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._living: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._living[storage._cdata] = weakref.ref(storage)
        storages = [reference() for reference in self._living.values()]
        self.most = max(self.most, sum(storage.nbytes() for storage in storages if storage is not None))
        return result


def layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 3)])
def test_a_rank_holds_its_shards_and_about_one_unit(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 also holds what has not been cut yet. Nothing is sent, which would be held a while longer."""
    monkeypatch.setattr(comm, "rank", lambda: rank)
    unit, whole = 101 * 101 * 4, 12 if rank == 0 else 0
    with Counter() as counter:
        model = deferred(layers, 12, 101)
        assert counter.most == whole * unit
        shardtrain.shard(model, units=[nn.Linear], transport=comm.Simulated(rank, world))
    assert counter.most <= (max(12 / world, whole) + 2.1) * unit, counter.most / unit
