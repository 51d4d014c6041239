"""Whole parameters: looking at them, editing, saving, loading."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardtrain
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

Ranks = Callable[..., list[Any]]


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


def test_units_are_kept_apart_from_blocks() -> None:
    names = [info.name for info in shardtrain.introspect(shardtrain.shard(OddNet(), units=[Block])).units]
    assert names == ["(root)", "blocks.0", "blocks.1"]
