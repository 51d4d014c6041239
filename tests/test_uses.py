"""What people do to a model: hooks, copies, odd optimizers, parts unused. Equal to a replica, or refused."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardtrain
from shardtrain import checkpoint, comm

from pool import each_rank
from small import (
    Block,
    OddNet,
    TwoPaths,
    assert_same_parameters,
    images,
    sgd,
    shard,
    sharded_and_replica,
    train,
)

Ranks = Callable[..., list[Any]]


def refusal(call: Callable[[], object], kind: type[Exception] = ValueError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# parts of a model without gradients


@each_rank(2, 3)
def test_a_checkpoint_of_a_model_with_unused_parameters_continues_bit_for_bit(tmp_path: Path) -> None:
    """No rank uses the second layer before the save; some do after it."""

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = shard(TwoPaths(), units=[])
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, order: str) -> dict[str, torch.Tensor]:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 9), order).square().mean().backward()
            optimizer.step()
        return shardtrain.full_state_dict(model)

    model, optimizer = fresh()
    steps(model, optimizer, "first")
    checkpoint.save(tmp_path / "one", model, optimizer)
    other, its_optimizer = fresh()
    checkpoint.load(tmp_path / "one", other, its_optimizer)
    order = "first second" if dist.get_rank() == 0 else "first"
    ours, theirs = steps(model, optimizer, order), steps(other, its_optimizer, order)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# accumulation


@each_rank(2, 3)
def test_gradients_that_wait_are_not_stepped_with_clipped_or_changed() -> None:
    model, replica = sharded_and_replica()
    optimizer = sgd(model)
    x, y = images(0)

    def backward() -> None:
        with shardtrain.no_sync(model):
            F.cross_entropy(model(x), y).backward()

    backward()
    texts = [
        refusal(optimizer.step),
        refusal(lambda: shardtrain.clip_grad_norm_(model, 1.0)),
        refusal(lambda: shardtrain.unsharded(model, grads=True).__enter__()),
    ]
    for param in model.parameters():
        param.grad.mul_(2.0)
    texts.append(refusal(backward))
    optimizer.zero_grad()
    assert train(model, optimizer) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)
    waiting = (
        "while gradients wait under no_sync to be reduced: run the last backward outside of no_sync first"
    )
    for text, what in zip(
        texts, ["an optimizer's step()", "clip_grad_norm_()", "unsharded(grads=True)"], strict=False
    ):
        assert text.startswith(f"{what} {waiting}")
    assert "was changed while it waits under no_sync" in texts[3]


# hooks


@each_rank(1, 2, 3, 4)
def test_users_post_accumulate_hooks_fire_once_with_the_reduced_piece() -> None:
    plain = OddNet()
    seen: dict[str, list[tuple[str, torch.Size, bool]]] = {}

    def note(param: torch.Tensor, name: str, when: str) -> None:
        at_rest = shardtrain.introspect(plain).gathered.units == 0
        seen.setdefault(name, []).append((when, param.grad.shape, at_rest))

    for name, param in plain.named_parameters():
        param.register_post_accumulate_grad_hook(functools.partial(note, name=name, when="before"))
    model = shard(plain, units=[Block])
    handles = [
        p.register_post_accumulate_grad_hook(functools.partial(note, name=n, when="after"))
        for n, p in model.named_parameters()
    ]
    pieces = {n: p.shape for n, p in model.named_parameters()}
    x, y = images(0)
    with shardtrain.no_sync(model):
        F.cross_entropy(model(x), y).backward()
    assert not seen or dist.get_world_size() == 1
    seen.clear()
    F.cross_entropy(model(x), y).backward()
    assert seen == {n: [("before", s, True), ("after", s, True)] for n, s in pieces.items()}
    for handle in handles:
        handle.remove()
    seen.clear()
    F.cross_entropy(model(x), y).backward()
    assert [w for w, *_ in seen["fc.weight"]] == ["before"]


# copies


@each_rank(1, 2, 3, 4)
def test_a_copy_is_sharded_too() -> None:
    model, replica = sharded_and_replica()
    pairs = []
    for net in (model, replica.module):
        pairs.append((net, AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)))
    ours, theirs = sgd(model), sgd(replica)
    for step in range(3):
        train(model, ours, 1, start=step)
        train(replica, theirs, 1, start=step)
        for net, average in pairs:
            average.update_parameters(net)
    average = pairs[0][1].module
    assert_same_parameters(average, pairs[1][1].module)
    assert_same_parameters(model, replica)
    assert type(average) is OddNet
    train(average, sgd(average), 2)  # trains by itself,
    assert_same_parameters(model, replica)  # and leaves the other alone
    train(model, ours, 1)
    train(replica, theirs, 1)
    assert_same_parameters(model, replica)


@each_rank(2, 3)
def test_other_copies_are_refused() -> None:
    model, _ = sharded_and_replica()
    part = copy.deepcopy(model.blocks[0])
    texts = [refusal(lambda: part(torch.ones(2, 7, 3, 3)))]
    with shardtrain.unsharded(model):
        texts.append(refusal(lambda: copy.deepcopy(model)))
    texts.append(refusal(lambda: pickle.dumps(model)))
    train(model, sgd(model), 1)
    assert texts[0].startswith("this Block is a copy of a part of a sharded model")
    assert texts[1] == "a sharded model cannot be copied inside forward, backward or unsharded()"
    assert texts[2].startswith("a sharded model cannot be pickled")


# optimizers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Adadelta", "Adagrad", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")),
        *((name, {}) for name in ("RMSprop", "Rprop")),
        ("Adam", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9, "fused": True}),
    ],
)
@each_rank(3, transport="auto")
def test_element_wise_optimizers_equal_ddp_s(name: str, options: dict[str, Any]) -> None:
    """Those with options are built before sharding."""
    torch.manual_seed(0)
    model = OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    make = functools.partial(getattr(torch.optim, name), lr=0.01, **options)
    early = make(model.parameters()) if options else None
    shard(model, units=[Block])
    train(model, early or make(model.parameters()), 3)
    train(replica, make(replica.parameters()), 3)
    assert_same_parameters(model, replica, tolerance=1e-4)


class Lars(torch.optim.SGD):
    """Scales each parameter's gradient by norms, which pieces have others of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad.mul_(param.norm() / (param.grad.norm() + 1e-8))
        return super().step(closure)


@each_rank(1, 2, 3, 4)
def test_optimizers_that_need_whole_parameters_are_refused_at_the_first_step() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 7, bias=False), nn.Linear(7, 5, bias=False))
    optimizers = [
        torch.optim.Adafactor(plain.parameters()),
        torch.optim.Muon(plain.parameters()),
        torch.optim.LBFGS(plain.parameters()),
        Lars(plain.parameters(), lr=0.1),
    ]
    model = shard(plain)
    optimizers.append(torch.optim.Muon(model.parameters()))
    texts = []
    for optimizer in optimizers:
        loss = model(torch.ones(2, 7)).sum()
        loss.backward()
        before = [p.clone() for p in model.parameters()]
        texts.append(refusal(lambda optimizer=optimizer, loss=loss: optimizer.step(lambda: loss)))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    other = "cannot step on a sharded model: it gives a piece of a parameter other values than the whole one"
    assert texts[0].startswith(f"Adafactor {other}")
    assert texts[1].startswith(f"Muon {other}")
    assert texts[2].startswith(f"LBFGS {other}")
    assert texts[3].startswith(f"Lars {other}")
    assert ["layout='whole'" in text for text in texts] == [True, True, False, True, True]
    assert texts[4] == texts[1]


@each_rank(1, 2, 3, 4)
def test_two_optimizers_with_groups_and_schedules_and_steps_move_nothing() -> None:
    model, replica = sharded_and_replica()
    for net in (model, replica):
        params = list(net.parameters())
        first = torch.optim.AdamW(
            [{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(params[:4])] + [{"params": []}]
        )
        second = torch.optim.SGD(params[4:], lr=0.05, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (first, second)]
        for step in range(3):
            x, y = images(step)
            F.cross_entropy(net(x), y).backward()
            with comm.meter() as meter:
                for optimizer, schedule in zip((first, second), schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad(set_to_none=step == 1)
                list(net.named_parameters())
            assert not meter.calls
    assert_same_parameters(model, replica)


# autograd


class Outside(nn.Module):
    """Uses a unit's weight without calling the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.outside = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x))
        return F.linear(x, self.first.weight) if self.outside else x


@each_rank(2, 3)
def test_a_parameter_used_outside_its_unit_fails_cleanly() -> None:
    torch.manual_seed(0)
    plain = Outside()
    root_only = shard(copy.deepcopy(plain), units=[])
    torch.testing.assert_close(root_only(torch.ones(2, 7)), plain(torch.ones(2, 7)))
    model = shard(copy.deepcopy(plain), units=[nn.Linear])
    with pytest.raises(RuntimeError, match=r"matrix|shape|size|2-D"):
        model(torch.ones(2, 7))
    assert shardtrain.introspect(model).gathered == (0, 0)
    model.outside = plain.outside = False
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(2, 7)), plain(torch.ones(2, 7)))
    assert_same_parameters(model, plain)


# models


@each_rank(2, 3)
def test_parameters_attached_after_sharding_are_refused_by_name() -> None:
    texts = []
    for attach in (
        lambda m: setattr(m, "fc", nn.Linear(7, 5)),
        lambda m: m.blocks[0].register_parameter("extra", nn.Parameter(torch.ones(3))),
        lambda m: m.blocks.append(Block(7)),
    ):
        model, _ = sharded_and_replica()
        attach(model)
        texts.append(refusal(lambda model=model: model(images(0)[0])))
    model, replica = sharded_and_replica()
    for net in (model, replica.module):
        net.blocks.append(nn.Identity())
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    names = ["fc.weight, fc.bias", "blocks.0.extra", "blocks.2.conv.weight, blocks.2.norm.weight"]
    for text, name in zip(texts, names, strict=True):
        assert text.startswith(f"parameters attached after shard(): {name}")


@each_rank(2, 3)
def test_models_that_differ_between_ranks_are_refused_on_all() -> None:
    odd = dist.get_world_size() - 1
    last = dist.get_rank() == odd
    frozen = OddNet()
    frozen.fc.requires_grad_(not last)
    start = f"the model to shard differs between ranks: rank {odd} has "
    shape = refusal(lambda: shard(OddNet(9 if last else 7)))
    assert shape.startswith(f"{start}stem.weight (9, 3, 3, 3) torch.float32")
    assert "where rank 0 has stem.weight (7, 3, 3, 3)" in shape
    text = refusal(lambda: shard(frozen))
    assert f"{start}fc.weight (5, 7) torch.float32 strides (7, 1) frozen in fc where" in text
    chosen = [Block] if last else [nn.Linear]
    assert refusal(lambda: shard(OddNet(), units=chosen)).startswith(f"{start}fc.weight")
    lazy = refusal(lambda: shard(nn.Sequential(nn.LazyLinear(3))))
    assert lazy.startswith("parameters without a shape yet: 0.weight, 0.bias; run one forward")


class Constant(nn.Module):
    """No inputs, fp32 and fp64 parameters, and a part without any."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.wide = nn.Parameter(torch.linspace(0, 1, 5, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.linspace(0, 1, 3))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self) -> torch.Tensor:
        return self.act(self.wide).square().sum() + self.narrow.square().sum() + self.empty.sum()


@each_rank(1, 2, 3, 4)
def test_no_inputs_no_parameters_empty_parameters_and_mixed_dtypes() -> None:
    plain = nn.Sequential(nn.ReLU(), nn.Flatten())
    torch.testing.assert_close(shard(plain)(torch.ones(2, 2)), torch.ones(2, 2))
    replica = Constant()
    model = shard(copy.deepcopy(replica))
    assert isinstance(model, Constant)
    for net in (model, replica):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net().backward()
            optimizer.step()
    assert_same_parameters(model, replica)
    model.apply(lambda m: isinstance(m, Constant) and nn.init.constant_(m.wide, 3.0))
    assert shardtrain.full_state_dict(model)["wide"].eq(3).all()


def _linear_and_stage(name: str, module: nn.Module) -> bool:
    return name == "0" or isinstance(module, nn.Linear)


@pytest.mark.parametrize(("units", "home"), [([nn.Linear], "the root"), (_linear_and_stage, "0")])
@each_rank(2, 3)
def test_tied_weights_belong_to_the_common_ancestor(units: Any, home: str) -> None:
    """And a module reachable by two names is one unit."""

    def make() -> nn.Module:
        stage = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
        stage[1].weight = stage[0].weight
        again = nn.Linear(7, 7)
        return nn.Sequential(stage, again, nn.Linear(7, 7), again)

    model, replica = sharded_and_replica(make, units=units)
    unit_of = shardtrain.introspect(model).unit_of_parameter
    assert unit_of["0.0.weight"] == home
    assert unit_of["1.weight"] == "1"
    for net in (model, replica):
        optimizer = sgd(net)
        for step in range(3):
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step + 10 * dist.get_rank()))
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
    assert_same_parameters(model, replica)


# batches


@each_rank(2, 3)
def test_unequal_and_empty_local_batches() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain))
    model = shard(plain, units=[nn.Linear])
    for net in (model, replica):
        optimizer = sgd(net)
        for step in range(3):
            n = (dist.get_rank() + step) % 3  # one rank has nothing
            x = torch.randn(n, 7, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            net(x).square().sum().backward()
            optimizer.step()
    assert_same_parameters(model, replica)


def shares_a_global_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3)).double()
    shard(model, units=[nn.Linear] if dist.get_world_size() % 2 else [])
    optimizer = sgd(model)
    for step in range(3):
        x = torch.randn(12, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        model(mine).square().mean().backward()
        optimizer.step()
    return shardtrain.full_state_dict(model)


def test_the_same_global_batch_at_any_world_size(ranks: Ranks) -> None:
    """With other units at odd world sizes."""
    alone, *others = (ranks(world, shares_a_global_batch)[0] for world in (1, 2, 3, 4))
    for state in others:
        torch.testing.assert_close(state, alone, rtol=1e-10, atol=1e-12)


@each_rank(2, 3)
def test_a_state_dict_between_forward_and_backward() -> None:
    model, replica = sharded_and_replica()
    ours, theirs = sgd(model), sgd(replica)
    for step in range(2):
        x, y = images(step)
        loss = F.cross_entropy(model(x), y)
        before = shardtrain.full_state_dict(model)
        loss.backward()
        F.cross_entropy(replica(x), y).backward()
        for name, param in replica.module.named_parameters():
            torch.testing.assert_close(before[name], param.detach(), rtol=1e-5, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, replica)


@each_rank(3)
def test_a_users_own_group_is_the_one_used() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    group = mesh.get_group() if dist.get_rank() < 2 else None
    if group is None:
        return
    torch.manual_seed(0)
    plain = OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), process_group=group)
    model = shard(plain, units=[Block], mesh=mesh)
    assert shardtrain.introspect(model).transport.world == 2
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)


# memory


def _seven() -> nn.Module:
    return nn.Sequential(*(nn.Linear(9, 9) for _ in range(7)))


@each_rank(2, 3)
def test_an_account_of_what_is_gathered() -> None:
    """One unit at first, when nothing is known of the order; then two, the next one on its way."""
    world = dist.get_world_size()
    size = world * 16 * -(-90 * 4 // (world * 16))  # bytes of a unit of 90 fp32 elements, padded
    for reshard in (True, False):
        model, _ = sharded_and_replica(_seven, units=[nn.Linear], reshard_after_forward=reshard)
        inside = shardtrain.introspect(model)
        peaks = []
        for _ in range(3):
            out = model(torch.ones(2, 9)).sum()
            peaks.append(inside.take_gathered_peak())
            out.backward()
            peaks.append(inside.take_gathered_peak())
            assert inside.gathered == (0, 0)
        if reshard:
            assert peaks[2:] == [(2, 2 * size)] * 4
        else:
            assert peaks[2] == (7, 7 * size)


@pytest.mark.long
@each_rank(2, transport="auto")
def test_memory_is_flat_over_200_steps() -> None:
    model, _ = sharded_and_replica()
    optimizer = sgd(model)
    train(model, optimizer, 20)
    gc.collect()
    tensors, before = _tensors(), _resident()
    train(model, optimizer, 200)
    gc.collect()
    grown = _resident() - before  # before `_tensors` makes a list of some megabytes, where malloc sees fit
    assert _tensors() <= tensors
    assert grown < 2**20
    assert shardtrain.introspect(model).gathered.bytes == 0


def _tensors() -> int:
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
