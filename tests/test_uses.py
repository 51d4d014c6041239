"""What people do to a model: hooks, copies, odd optimizers, parts unused. Equal to a replica, or refused."""

from __future__ import annotations

import copy
import functools
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardtrain
from shardtrain import checkpoint, comm

from pool import each_rank
from small import (
    Block,
    OddNet,
    TwoPaths,
    assert_same_parameters,
    classify,
    like_a_replica,
    raised_soon,
    sgd,
    shard,
    sharded_and_replica,
    train,
)

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

    def backward() -> None:
        with shardtrain.no_sync(model):
            classify(model, 0).backward()

    backward()
    waiting = (
        "while gradients wait under no_sync to be reduced: run the last backward outside of no_sync first"
    )
    for what, call in {
        "an optimizer's step()": optimizer.step,
        "clip_grad_norm_()": lambda: shardtrain.clip_grad_norm_(model, 1.0),
        "unsharded(grads=True)": lambda: shardtrain.unsharded(model, grads=True).__enter__(),
    }.items():
        assert raised_soon(ValueError, call).startswith(f"{what} {waiting}")
    for param in model.parameters():
        param.grad.mul_(2.0)
    assert "was changed while it waits under no_sync" in raised_soon(ValueError, backward)
    optimizer.zero_grad()
    assert train(model, optimizer) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)


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
    with shardtrain.no_sync(model):
        classify(model, 0).backward()
    assert not seen or dist.get_world_size() == 1
    seen.clear()
    classify(model, 0).backward()
    assert seen == {n: [("before", s, True), ("after", s, True)] for n, s in pieces.items()}
    for handle in handles:
        handle.remove()
    seen.clear()
    classify(model, 0).backward()
    assert [w for w, *_ in seen["fc.weight"]] == ["before"]


# copies


@each_rank(1, 2, 3, 4)
def test_a_copy_is_sharded_too() -> None:
    nets = model, replica = sharded_and_replica()
    averages = [
        AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
        for net in (model, replica.module)
    ]
    optimizers = [sgd(net) for net in nets]
    for step in range(3):
        for net, optimizer, average in zip(nets, optimizers, averages, strict=True):
            train(net, optimizer, 1, start=step)
            average.update_parameters(getattr(net, "module", net))
    ours, theirs = (average.module for average in averages)
    assert_same_parameters(ours, theirs)
    assert type(ours) is OddNet
    train(ours, sgd(ours), 2)  # trains by itself,
    assert_same_parameters(model, replica)  # and leaves the other alone
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer, 1)
    assert_same_parameters(model, replica)


# optimizers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("Adadelta", "Adagrad", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")),
        *((name, {}) for name in ("RMSprop", "Rprop")),
        ("Adagrad", {"lr_decay": 0.1}),
        ("Adam", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9, "fused": True}),
    ],
)
@each_rank(3, transport="auto")
def test_element_wise_optimizers_equal_ddp_s(name: str, options: dict[str, Any]) -> None:
    """Those with options are built before sharding."""

    def make(net: nn.Module) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(net.parameters(), lr=0.01, **options)

    like_a_replica(optimizer=make, early=bool(options), tolerance=1e-4)


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
            classify(net, step).backward()
            with comm.meter() as meter:
                for optimizer, schedule in zip((first, second), schedules, strict=True):
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad(set_to_none=step == 1)
                list(net.named_parameters())
            assert not meter.calls
    assert_same_parameters(model, replica)


# models


@each_rank(2, 3)
def test_modules_without_parameters_may_be_attached_after_sharding() -> None:
    def step(net: nn.Module, number: int) -> None:
        net.blocks.append(nn.Identity())
        classify(net, number).backward()

    like_a_replica(step=step)


@each_rank(2, 3)
def test_models_that_differ_between_ranks_are_refused_on_all() -> None:
    odd = dist.get_world_size() - 1
    last = dist.get_rank() == odd
    frozen = OddNet()
    frozen.fc.requires_grad_(not last)
    start = f"the model to shard differs between ranks: rank {odd} has "
    shape = raised_soon(ValueError, lambda: shard(OddNet(9 if last else 7)))
    assert shape.startswith(f"{start}stem.weight (9, 3, 3, 3) torch.float32")
    assert "where rank 0 has stem.weight (7, 3, 3, 3)" in shape
    text = raised_soon(ValueError, lambda: shard(frozen))
    assert f"{start}fc.weight (5, 7) torch.float32 strides (7, 1) frozen in fc where" in text
    chosen = [Block] if last else [nn.Linear]
    assert raised_soon(ValueError, lambda: shard(OddNet(), units=chosen)).startswith(f"{start}fc.weight")


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

    def step(net: nn.Module, number: int) -> None:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(number + 10 * dist.get_rank()))
        net(x).square().mean().backward()

    unit_of = shardtrain.introspect(like_a_replica(make, step, units=units)).unit_of_parameter
    assert unit_of["0.0.weight"] == home
    assert unit_of["1.weight"] == "1"


# batches


@each_rank(3)
def test_a_users_own_group_is_the_one_used() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 2:
        return
    torch.manual_seed(0)
    plain = OddNet()
    replica = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), process_group=mesh.get_group())
    model = shard(plain, units=[Block], mesh=mesh)
    assert shardtrain.introspect(model).transport.world == 2
    assert train(model, sgd(model)) == pytest.approx(train(replica, sgd(replica)), rel=1e-5)
    assert_same_parameters(model, replica)


# memory


@each_rank(2, 3)
def test_an_account_of_what_is_gathered() -> None:
    """One unit at first, when nothing is known of the order; then two, the next one on its way."""
    world = dist.get_world_size()
    size = world * 16 * -(-90 * 4 // (world * 16))  # bytes of a unit of 90 fp32 elements, padded
    for reshard in (True, False):
        layers = nn.Sequential(*(nn.Linear(9, 9) for _ in range(7)))
        model = shard(layers, units=[nn.Linear], reshard_after_forward=reshard)
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
