"""Whole parameters: looking at them, editing, saving, loading; and the first values of deferred models."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import shardtrain
from shardtrain import comm
from shardtrain.engine.deferred_init import deferred
from shardtrain.engine.hooks import engine_of

from pool import each_rank
from small import (
    Block,
    OddNet,
    assert_at_rest,
    assert_same_parameters,
    sgd,
    shard,
    sharded_and_replica,
    train,
)
from test_plan import allocated


@pytest.mark.parametrize("writeback", [True, False])
@each_rank(1, 2, 3, 4)
def test_unsharded_keeps_or_drops_edits(writeback: bool) -> None:
    model, replica = sharded_and_replica(lambda: OddNet().to(memory_format=torch.channels_last))
    x = torch.randn(2, 3, 5, 5)
    with shardtrain.unsharded(model, writeback=writeback):
        torch.testing.assert_close(model(x), replica.module(x))
        for (name, ours), theirs in zip(model.named_parameters(), replica.module.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.stride() == theirs.stride(), name
            with torch.no_grad():
                ours.add_(1.0)
                theirs.add_(1.0 if writeback else 0.0)
        model.fc.bias.data = torch.full((5,), 3.0)
        if writeback:
            replica.module.fc.bias.data = torch.full((5,), 3.0)
        with pytest.raises(ValueError, match="cannot be called inside forward, backward or unsharded"):
            shardtrain.full_state_dict(model)
    assert_same_parameters(model, replica, tolerance=0)
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)


@each_rank(1, 2)
def test_an_edit_of_a_shape_is_refused() -> None:
    model, _ = sharded_and_replica()
    named = "parameter fc.weight or its gradient was given shape (6, 7) inside unsharded(), expected (5, 7)"
    with pytest.raises(ValueError, match=re.escape(named)), shardtrain.unsharded(model):
        model.fc.weight.data = torch.zeros(6, 7)
    assert_at_rest(model)


@pytest.mark.parametrize("writeback", [True, False])
@each_rank(2, 3)
def test_unsharded_gradients(writeback: bool) -> None:
    model, replica = sharded_and_replica()
    for net in (model, replica):
        train(net, torch.optim.SGD(net.parameters(), 0.0), 1)
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    with shardtrain.unsharded(model, grads=True, writeback=writeback):
        for ours, theirs in zip(model.parameters(), replica.module.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
            ours.grad.mul_(2.0)
    after = [p.grad for p in model.parameters()]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new, old * 2 if writeback else old)
    assert_at_rest(model)


@pytest.mark.parametrize("rank0_only", [True, False])
@each_rank(1, 2, 3, 4)
def test_a_full_state_dict_is_the_plain_model_s(rank0_only: bool) -> None:
    model, replica = sharded_and_replica()
    train(model, sgd(model))
    train(replica, sgd(replica))
    plain = replica.module.state_dict()
    whole = shardtrain.full_state_dict(model, rank0_only=rank0_only)
    if rank0_only and dist.get_rank():
        assert whole == {}
        return
    assert list(whole) == list(plain)
    assert [(v.shape, v.dtype) for v in whole.values()] == [(v.shape, v.dtype) for v in plain.values()]
    fresh = OddNet()
    fresh.load_state_dict(whole)
    assert list(model.state_dict()) == list(plain)


@each_rank(1, 2, 3, 4)
def test_rank_0_s_state_is_loaded_everywhere() -> None:
    torch.manual_seed(7)
    source = OddNet()
    source.blocks[0].norm.running_var.fill_(4.0)
    model, _ = sharded_and_replica()
    shardtrain.load_full_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {})
    assert_same_parameters(model, source, tolerance=0)
    assert model.blocks[0].norm.running_var.eq(4.0).all()
    part = {"fc.bias": torch.arange(5.0), "other": torch.zeros(1)}
    shardtrain.load_full_state_dict(model, part if dist.get_rank() == 0 else {}, strict=False)
    source.fc.bias.data = torch.arange(5.0)
    assert_same_parameters(model, source, tolerance=0)


@each_rank(3)
def test_a_state_that_does_not_fit_is_refused_everywhere_and_nothing_is_loaded() -> None:
    torch.manual_seed(7)
    plain = OddNet().state_dict()
    missing = ("fc.weight", "blocks.0.norm.running_mean")
    cases = {
        "fc.weight is missing; blocks.0.norm.running_mean is missing": {
            name: value for name, value in plain.items() if name not in missing
        },
        "extra is unexpected": plain | {"extra": torch.zeros(1)},
        "fc.weight has shape (7, 5), expected (5, 7)": plain | {"fc.weight": plain["fc.weight"].t()},
        "fc.weight is torch.int64, expected torch.float32": plain | {"fc.weight": plain["fc.weight"].long()},
    }
    model, replica = sharded_and_replica()
    for text, state in cases.items():
        with pytest.raises(ValueError, match=re.escape(f"nothing was loaded: {text}") + "$"):
            shardtrain.load_full_state_dict(model, state if dist.get_rank() == 0 else {})
        assert_same_parameters(model, replica, tolerance=0)


class Twice(OddNet):
    """Its head and its stem have two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.first = self.fc, self.stem


@each_rank(1, 3)
def test_ignored_parameters_are_loaded_too() -> None:
    torch.manual_seed(7)
    source = Twice().state_dict()
    model = Twice()
    weight, shape = model.fc.weight, model.fc.weight.shape
    shard(model, units=[Block], ignored=[model.fc])
    assert weight is model.fc.weight
    assert weight.shape == shape
    lacking = {name: value for name, value in source.items() if not name.startswith(("fc", "again"))}
    with pytest.raises(ValueError, match=r"^nothing was loaded: fc\.weight is missing; fc\.bias is missing$"):
        shardtrain.load_full_state_dict(model, lacking if dist.get_rank() == 0 else {})
    shardtrain.load_full_state_dict(model, lacking if dist.get_rank() == 0 else {}, strict=False)
    assert not torch.equal(model.fc.weight, source["fc.weight"])
    shardtrain.load_full_state_dict(model, source if dist.get_rank() == 0 else {})
    whole = shardtrain.full_state_dict(model)
    assert list(whole) == list(source)
    assert all(torch.equal(whole[name], source[name]) for name in source)


@each_rank(1, 2)
def test_unsharded_that_cannot_open_leaves_all_as_it_was() -> None:
    """A gather fails at the second unit, as it does where memory ends."""
    model, replica = sharded_and_replica()
    train(model, torch.optim.SGD(model.parameters(), 0.0), 1)
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    segment = engine_of(model).units[1].segments[0]
    fitting = segment.views_of

    def too_large(full: torch.Tensor) -> list[torch.Tensor]:
        raise MemoryError("no memory")

    segment.views_of = too_large
    with pytest.raises(MemoryError, match="no memory"), shardtrain.unsharded(model, grads=True):
        raise AssertionError("opened all the same")
    segment.views_of = fitting
    assert_at_rest(model)
    for param, grad in zip(model.parameters(), grads, strict=True):
        assert torch.equal(param.grad, grad)
    assert_same_parameters(model, replica, tolerance=0)
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)


# deferred models


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


def on_every_rank(make: Callable[..., nn.Module], *args: Any, without_values: bool) -> None:
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


@each_rank(1, 2, 3)
def test_values_are_those_of_the_constructor_on_rank_0() -> None:
    on_every_rank(Usual, without_values=True)


@pytest.mark.parametrize("which", ["item", "plain tensor"])
@each_rank(2, transport="auto")
def test_a_constructor_that_needs_values_runs_everywhere(which: str) -> None:
    on_every_rank(NeedsValues, which, without_values=False)


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


def layers(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 3)])
def test_a_rank_holds_its_shards_and_about_one_unit(
    rank: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 also holds what has not been cut yet. Nothing is sent, which would be held a while longer."""
    monkeypatch.setattr(comm, "rank", lambda: rank)
    unit, whole = 101 * 101 * 4, 12 if rank == 0 else 0

    def start() -> None:
        model = deferred(layers, 12, 101)
        shardtrain.shard(model, units=[nn.Linear], transport=comm.Simulated(rank, world))

    most = allocated(start) / unit
    assert whole <= most <= max(12 / world, whole) + 2.1
